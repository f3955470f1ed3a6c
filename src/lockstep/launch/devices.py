"""Which devices the ranks of this host get, found without importing torch.

--devices 4        4 GPUs, or 4 CPU processes where there is no GPU
--devices 0,5      these two of the visible GPUs ("5," is a list of one)
--devices auto     every visible GPU; without one, a CPU process per core, at most 8
--devices cpu:3    3 CPU processes, also where there are GPUs; "cpu" chooses the number as auto does
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from lockstep.errors import ConfigError

_MOST_CPU_RANKS = 8
_GPU_NODE = re.compile(r"nvidia\d+")


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices that the ranks of this host share out."""

    kind: str
    """``cuda`` or ``cpu``."""
    names: tuple[str, ...]
    """Each an entry of ``CUDA_VISIBLE_DEVICES``, or ``cpu``."""
    per_rank: int = 1
    """How many consecutive ones a rank uses."""

    @property
    def count(self) -> int:
        """Number of ranks on this host."""
        return len(self.names) // self.per_rank

    @property
    def visible(self) -> str:
        """What ``CUDA_VISIBLE_DEVICES`` is set to for all ranks; the local rank picks from it."""
        return ",".join(self.names) if self.kind == "cuda" else ""


def parse_devices(
    text: str | int, *, gpus: tuple[str, ...] | None = None, cores: int | None = None
) -> Devices:
    """Reads a ``--devices`` value.

    Args:
        text: ``N``, ``auto``, ``cpu``, ``cpu:N`` or a list of indices such as ``0,5``.
        gpus: the visible GPUs; found on this host if not given.
        cores: the usable cores; found on this host if not given.
    """
    asked = str(text).strip()
    gpus = visible_gpus() if gpus is None else gpus
    cpu_ranks = min(usable_cores() if cores is None else cores, _MOST_CPU_RANKS)
    if asked == "auto":
        return Devices(kind="cuda", names=gpus) if gpus else _cpu(cpu_ranks)
    if asked == "cpu":
        return _cpu(cpu_ranks)
    if match := re.fullmatch(r"cpu:(\d+)", asked):
        return _cpu(_at_least_one(asked, int(match[1])))
    if re.fullmatch(r"\d+", asked):
        return _count(_at_least_one(asked, int(asked)), gpus)
    if re.fullmatch(r"\d+(,\d+)*,?", asked):
        return _subset([int(index) for index in asked.rstrip(",").split(",")], gpus)
    raise ConfigError(
        f"devices={asked!r} is not known. Use a number, auto, cpu, cpu:N, or a list such as 0,5."
    )


def visible_gpus(
    environment: Mapping[str, str] | None = None, device_folder: Path = Path("/dev")
) -> tuple[str, ...]:
    """The GPUs that a process may use: those of ``CUDA_VISIBLE_DEVICES`` if it is set, else all of the host.

    None, if the installed torch is a CPU build.
    """
    variables = os.environ if environment is None else environment
    chosen = variables.get("CUDA_VISIBLE_DEVICES")
    found = _nodes(device_folder) if chosen is None else _valid(chosen)
    return () if found and _torch_is_cpu_build() else found


def _nodes(device_folder: Path) -> tuple[str, ...]:
    nodes = sum(1 for entry in device_folder.iterdir() if _GPU_NODE.fullmatch(entry.name))
    return tuple(str(index) for index in range(nodes))


def _valid(chosen: str) -> tuple[str, ...]:
    """The entries before the first invalid one, where CUDA stops reading."""
    names = [name.strip() for name in chosen.split(",")]
    return tuple(takewhile(lambda name: name and not name.startswith("-"), names))


def usable_cores() -> int:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu(count: int) -> Devices:
    return Devices(kind="cpu", names=("cpu",) * count)


def _at_least_one(asked: str, count: int) -> int:
    if count < 1:
        raise ConfigError(f"devices={asked!r} asks for no process at all. Ask for at least 1.")
    return count


def _count(count: int, gpus: tuple[str, ...]) -> Devices:
    if not gpus:
        return _cpu(count)
    if count > len(gpus):
        raise ConfigError(
            f"devices={count} was asked for and {_found(gpus)}. "
            f"Use devices={len(gpus)}, or devices=cpu:{count} for CPU processes."
        )
    return Devices(kind="cuda", names=gpus[:count])


def _subset(indices: list[int], gpus: tuple[str, ...]) -> Devices:
    asked = ",".join(map(str, indices))
    if len(set(indices)) < len(indices):
        raise ConfigError(f"devices={asked} names a GPU twice. Each rank needs its own; name each once.")
    absent = [index for index in indices if index >= len(gpus)]
    if absent:
        raise ConfigError(
            f"devices={asked} was asked for and {_found(gpus)}: there is no index {absent[0]}. "
            "Indices count the visible GPUs from 0."
        )
    return Devices(kind="cuda", names=tuple(gpus[index] for index in indices))


def _found(gpus: tuple[str, ...]) -> str:
    if not gpus:
        return "no GPU is visible"
    verb = "GPU is" if len(gpus) == 1 else "GPUs are"
    return f"{len(gpus)} {verb} visible ({', '.join(gpus)})"


def _torch_is_cpu_build() -> bool:
    from importlib.metadata import (
        PackageNotFoundError,
        version,
    )  # slow to import, and only needed beside a GPU

    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False
