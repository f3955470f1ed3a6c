"""The fingerprint of a model: SHA-256 over the bits of its tensors, and what those bits depend on.

Every tensor is hashed on its own, then the list of (name, type, shape, digest) in name order. So a tensor may be
hashed by whoever holds it, and where two fingerprints differ the tensor that differs can be named.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""A type of the same size for each size of a number."""
_SUMMED = 512
"""Bytes whose sum gets one weight in a checksum."""
_SPREAD = 0x9E3779B97F4A7C15
_CPU_INFO = Path("/proc/cpuinfo")
_MATRIX_INSTRUCTIONS = (
    *("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16"),
    *("asimdhp", "asimdfhm", "bf16", "i8mm", "sve", "sve2", "svebf16", "sme"),
)
"""Those of x86-64, then those of 64-bit Arm, which libraries choose between at run time."""
_KERNEL_VARIABLES = {
    "cpu": "MKL_CBWR ONEDNN_MAX_CPU_ISA DNNL_MAX_CPU_ISA ONEDNN_DEFAULT_FPMATH_MODE DNNL_DEFAULT_FPMATH_MODE",
    "cuda": "NVIDIA_TF32_OVERRIDE CUBLASLT_WORKSPACE_SIZE CUDNN_CONV_WSCAP_DBG TORCH_BLAS_PREFER_CUBLASLT",
}
"""Environment variables by which the libraries of a type of device choose their code."""


def digest_tensor(tensor: Tensor) -> str:
    """SHA-256 of a tensor's type, shape and values, in hexadecimal; memory layout and device do not matter.

    Of one of a class that keeps its values in other tensors, as quantised ones do, it is that of these.
    """
    if inner := _inner(tensor):
        return combine({name: digest_tensor(each) for name, each in inner.items()})
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(memory_of(tensor))
    return digest.hexdigest()


def octets(tensor: Tensor) -> Tensor:
    """The values of a tensor as bytes, flat, where it lies."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)  # a single number may have stride 0


def memory_of(tensor: Tensor) -> memoryview:
    """The values of a tensor as bytes of the host; after ``Tensor.numpy`` nobody could resize its storage."""
    values = octets(tensor).to("cpu")
    memory: Any = (ctypes.c_ubyte * len(values)).from_address(values.data_ptr())
    memory.values = values  # they stay as long as their memory is used
    return memoryview(memory).cast("B")


def _inner(tensor: Tensor) -> dict[str, Tensor]:
    """The tensors that one of such a class keeps its values in; none of any other."""
    cls: Any = type(tensor)
    if cls.__torch_dispatch__ is Tensor.__torch_dispatch__ or not hasattr(cls, "__tensor_flatten__"):
        return {}
    return {name: getattr(tensor, name) for name in cls.__tensor_flatten__(tensor)[0]}


def digest_tensors(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """The digest of each named tensor."""
    named = tensors.items() if isinstance(tensors, Mapping) else tensors
    return {name: digest_tensor(tensor) for name, tensor in named}


def sum_of_bits(tensor: Tensor) -> Tensor:
    """A sum over the bits of a tensor, int64, 0-dim, where it lies: equal where all bits are, and quick."""
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.contiguous().view(_INTEGERS[values.element_size()]).sum(dtype=torch.int64)


def checksum(tensor: Tensor) -> Tensor:
    """A sum over the bits of a dense tensor, weighted by their places, int64, 0-dim, where it lies.

    For comparisons on the way: quick, and the same in whatever order it is added. It is no proof as SHA-256 is.
    """
    if inner := _inner(tensor):
        return _weighted(torch.stack([checksum(each) for each in inner.values()]))
    values = octets(tensor)
    if values.storage_offset() % 8:
        values = values.clone()
    whole = values.numel() // _SUMMED * _SUMMED
    rows = values[:whole].view(torch.int64).view(-1, _SUMMED // 8).sum(1)
    return _weighted(rows) + _weighted(values[whole:])


def _weighted(numbers: Tensor) -> Tensor:
    return (numbers * torch.arange(1, numbers.numel() + 1, device=numbers.device)).sum()


def checksums(tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> dict[str, str]:
    """The checksum of each named tensor, in hexadecimal; the host waits for ``device`` once."""
    found = {name: checksum(tensor).to(device) for name, tensor in tensors}
    if not found:
        return {}
    sums = torch.stack([*found.values()]).tolist()
    # An odd factor loses nothing and brings a difference in the last digits to the first, which messages show.
    return {name: f"{each * _SPREAD % 2**64:016x}" for name, each in zip(found, sums)}


def combine(digests: Mapping[str, str]) -> str:
    """One fingerprint for all tensors: SHA-256 over ``name digest`` lines in name order, in hexadecimal."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Context:
    """The conditions that the bits of a run depend on. Two runs can only be compared if these agree.

    The world size, the strategy and the number of loader workers are absent on purpose: the result does not depend
    on them.
    """

    global_batch: int
    micro_batches: int
    seed: int
    precision: str
    reduce: str
    threads: int
    device: str
    torch: str
    compiled: bool = False
    channels_last: bool = False
    sync_batch_norm: bool = False
    tensor_shards: int = 0
    """``tensor.shards``; earlier versions did not record it, as they had none."""
    deterministic: bool = False
    optimizers: tuple[str, ...] = ()
    cpu: str = ""
    """The maker of the CPU and the library of matrix products; empty on a GPU, and where bits are portable."""
    photos: str = ""
    """Hash of the pixels that photos are decoded to here; empty while the run has read none."""

    def differences(self, other: Mapping[str, object]) -> list[str]:
        """One line per entry in which ``other`` (as from ``as_dict``) differs; of some, where both know it."""
        mine, other = self.as_dict(), {"tensor_shards": 0, **other}
        for name in ("cpu", "photos"):
            if not (mine[name] and other.get(name)):
                del mine[name]
        return [
            f"{name}: {other.get(name)!r} there, {mine[name]!r} here" for name in mine if mine[name] != other.get(name)
        ]

    def as_dict(self) -> dict[str, object]:
        """The entries, ready for JSON."""
        return {**asdict(self), "optimizers": list(self.optimizers)}


def device_model(device: torch.device, *, portable: bool = False) -> str:
    """The model of a device, as far as bits may depend on it.

    Of a GPU its name, the number of its multiprocessors, and the versions of CUDA, cuBLAS and cuDNN; of a CPU its
    vector instructions. Of both the environment variables by which libraries choose other code than they would.
    """
    names = _KERNEL_VARIABLES.get(device.type, "").split()
    names += ["OPENBLAS_CORETYPE"] if device.type == "cpu" and not has_mkl() else []
    chosen = [f"{name}={os.environ[name]}" for name in names if os.environ.get(name)]
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch's stub
        versions = f"CUDA {torch.version.cuda} cuBLAS {_cublas()} cuDNN {cudnn}"
        words = [torch.cuda.get_device_name(device), f"({count} multiprocessors)", versions]
    elif portable:
        return "any x86_64 with AVX2"
    else:
        has = _of_cpu("flags", "Features")  # as Linux names them; unknown elsewhere
        instructions = [name for name in _MATRIX_INSTRUCTIONS if name in has]
        words = [platform.machine(), torch.backends.cpu.get_cpu_capability(), *instructions]
    return " ".join([*words, *chosen])


def _cublas() -> str:
    """The version of cuBLAS, where it was installed as a package of its own; else that of CUDA stands for it."""
    for name in ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "of CUDA"


def cpu_of(device: torch.device) -> str:
    """The CPU's maker, by which libraries choose their code, and torch's library for matrix products; "" on a GPU.

    Of an Arm CPU also the design of its cores, since OpenBLAS has other code for each.
    """
    if device.type != "cpu":
        return ""
    maker = " ".join(_of_cpu("vendor_id", "CPU implementer", "CPU part")) or platform.machine()
    return f"{maker} {'MKL' if has_mkl() else 'without MKL'}"


def has_mkl() -> bool:
    """True if torch was built with MKL, which then computes its matrix products."""
    return bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]


def _of_cpu(*entries: str) -> list[str]:
    """The words of entries of ``/proc/cpuinfo``, over all cores, each once; none where Linux does not say."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return []
    values = (value for name, _, value in (line.partition(":") for line in lines) if name.strip() in entries)
    return list(dict.fromkeys(word for value in dict.fromkeys(values) for word in value.split()))
