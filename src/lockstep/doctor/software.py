"""What torch is here, and what it sees: imports torch, so it comes after the host."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from lockstep.doctor.finding import Finding, fault, ok, warning

_OLDEST_TORCH = (2, 8)
_OPTIONAL = {
    "tensorboard": "TensorBoard logs are left out; pip install tensorboard.",
    "safetensors": "Checkpoints need it: pip install safetensors.",
}


def look_at_software() -> Iterator[Finding]:
    """Versions, backends and devices."""
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        yield fault(
            "torch", f"cannot be imported: {error}", "Reinstall torch: https://pytorch.org/get-started."
        )
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    found = f"{torch.__version__}, built for {built}"
    yield (
        ok("torch", found)
        if version >= _OLDEST_TORCH
        else fault("torch", found, "Install torch 2.8 or later.")
    )
    for package, advice in _OPTIONAL.items():
        try:
            yield ok(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            yield warning(package, "not installed", advice)
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    yield (
        ok("backends", ", ".join(backends))
        if "gloo" in backends
        else fault("backends", ", ".join(backends) or "none", "Install a torch that has gloo.")
    )
    yield from _devices()


def _devices() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        reason = "this torch has no CUDA" if not torch.version.cuda else "no driver or no device was found"
        yield ok("devices", f"no GPU ({reason}): ranks compute on the CPU")
        return
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        found = f"{number}: {properties.name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        if free < total / 2:
            advice = "Another program holds it: see nvidia-smi and 'lockstep ps'."
            yield warning("devices", found, advice)
        else:
            yield ok("devices", found)
