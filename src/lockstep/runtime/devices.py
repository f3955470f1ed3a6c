"""The types of devices that Lockstep trains on. No other module asks for one; a further type is added here.

    cpu     work is done when a call returns
    cuda    work is queued on streams, and the process continues: NVIDIA's GPUs, and AMD's in a ROCm build of torch

What follows calls ``torch.cuda``, which is the same for both makers. Settings of NVIDIA's libraries are in
``numerics/precision.py``, and what decides the bits of a device in ``core/fingerprint.py``.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import torch

from lockstep.core.world import World, shared_devices
from lockstep.errors import ConfigError

logger = logging.getLogger(__name__)

_COLLECTIVES = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Backends of torch.distributed for tensors on each type of device and, in any case, on the host."""


def choose_device(world: World, devices: int = 1) -> torch.device:
    """The first of the ``devices`` GPUs of this local rank if the host has GPUs, otherwise the CPU.

    Of a device that is not supported a line in the log tells. Ranks that share a GPU get an id of their own for NCCL.

    Raises:
        ConfigError: there are more ranks than GPUs.
    """
    if not torch.cuda.is_available():
        other = torch.accelerator.current_accelerator(check_available=True)
        if other is not None and world.is_main:
            logger.warning(
                "This host has a device of type %s, which Lockstep does not use yet: it trains on the CPU. NVIDIA GPUs "
                "are supported.",
                other.type,
            )
        return torch.device("cpu")
    count = count_gpus()
    number = world.local_rank * devices
    if shared := shared_devices():
        number = shared[number]
        # NCCL refuses two ranks on one device, and takes them as of two hosts if they say so.
        os.environ.setdefault("NCCL_HOSTID", f"lockstep-{world.rank}")
        if world.is_main:
            logger.warning(
                "Some GPUs are given to several ranks (%s). That is meant for tests: the ranks share its memory and "
                "its time, and exchange over the network interface.",
                ", ".join(map(str, shared)),
            )
    if number >= count:
        raise ConfigError(
            f"Rank {world.rank} is number {world.local_rank} on its host, which shows {count} CUDA devices. Start at "
            f"most {count} processes there, show more devices by CUDA_VISIBLE_DEVICES, or train with --devices cpu:N."
        )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.cuda.set_device(number)
    return gpu(number)


def is_gpu(device: torch.device) -> bool:
    """Returns whether a device has memory and queues of its own, so that the process need not wait for it."""
    return device.type == "cuda"


def gpu(number: int) -> torch.device:
    """The GPU of this number among those that the process sees."""
    return torch.device("cuda", number)


def count_gpus() -> int:
    """How many GPUs the process sees."""
    return torch.cuda.device_count()


def open_gpus() -> list[int]:
    """The numbers of all GPUs, if this process has used one; else none."""
    return list(range(count_gpus())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]  # torch's stub


def collectives_for(device: torch.device) -> str:
    """The ``backend`` of a process group for a device and the host."""
    return _COLLECTIVES[device.type]


def has_gpus() -> bool:
    """Returns whether there is a GPU that Lockstep uses."""
    return torch.cuda.is_available()


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A queue of a GPU beside the current one; None where there are no queues."""
    return torch.cuda.Stream(device) if is_gpu(device) else None  # type: ignore[no-untyped-call]  # torch's stub


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """The queue of a GPU to which this thread adds."""
    return torch.cuda.current_stream(device)


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """A context in which this thread adds to a queue; without one nothing changes."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def selected(device: torch.device) -> AbstractContextManager[object]:
    """A context in which a GPU is the one that this thread uses; a CPU always is."""
    return torch.cuda.device(device) if is_gpu(device) else nullcontext()


def wait_for(device: torch.device) -> None:
    """Waits for all that has been queued on a device."""
    if is_gpu(device):
        torch.cuda.synchronize(device)


def page_lock(address: int, size: int, gpu: torch.device) -> bool:
    """Page-locks memory of the host, so that copies to a GPU out of it are not waited for.

    It must be unlocked before it is unmapped.

    Returns:
        False where CUDA refuses.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's stub
    if not int(runtime.cudaHostRegister(address, size, 0)):
        return True
    with suppress(RuntimeError):  # CUDA tells the next kernel of the error
        torch.zeros(1, device=gpu)
    return False


def page_unlock(address: int) -> None:
    """Ends what ``page_lock`` has begun; no copy may be under way."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]  # torch's stub


def passing(devices: Sequence[torch.device]) -> Callable[[], bool]:
    """Marks the end of what is queued on some GPUs' current streams; what is returned tells whether they passed it."""
    marks = [current_stream(device).record_event() for device in devices]
    return lambda: all(mark.query() for mark in marks)


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has had: allocated on one GPU, or else resident, Python and torch included."""
    if device.type != "cpu":
        return max(torch.cuda.max_memory_allocated(each) for each in range(count_gpus()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def memory_shortages() -> int:
    """How often a GPU had too little memory for what this process asked for, also where it then did without."""
    return sum(torch.cuda.memory_stats(each).get("num_ooms", 0) for each in range(count_gpus()))


def gpu_generators(devices: Sequence[torch.device]) -> list[torch.Generator]:
    """The generators of random numbers that operators on these GPUs draw from; none for a CPU, which has torch's."""
    numbers = dict.fromkeys(each.index or 0 for each in devices if is_gpu(each))
    if numbers:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch's stub
    return [torch.cuda.default_generators[number] for number in numbers]
