"""The facts about machine and versions that stand under every table."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

_PACKAGES = ("torch", "numpy", "accelerate", "lightning", "lockstep-train")
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def facts() -> list[str]:
    """One line each: processor, memory, system, versions. Nothing in it names the machine."""
    model, flags = _processor()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    present = ", ".join(flag for flag in _FLAGS if flag in flags) or "none of " + ", ".join(_FLAGS)
    return [
        f"{len(os.sched_getaffinity(0))} cores of {model} ({present}), {memory:.0f} GiB",
        f"{platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()}",
        versions,
    ]


def _processor() -> tuple[str, set[str]]:
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields.get("model name", platform.machine()), set(fields.get("flags", "").split())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
