"""How the ranks of this host are started and ended."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.launch.devices import Devices

_LOOPBACK = "lo" if os.uname().sysname == "Linux" else "lo0"
_FOREIGN = ("TORCHELASTIC_", "OMPI_COMM_WORLD_")
"""Variables of other launchers, which would make a rank believe that one of them started it."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What ``supervise`` and ``launch`` can be told."""

    devices: Devices
    """One per rank."""
    threads: int | None = None
    """Intra-op threads per rank. Part of the recipe, so the default does not depend on the number of ranks:
    ``OMP_NUM_THREADS`` if set, else 1."""
    preload: tuple[str, ...] = ()
    """Modules that the fork server imports beside torch, once for all ranks."""
    log_directory: str = ""
    """Where ranks write output and error records; if empty, a temporary folder, kept after a failure."""
    grace: float = 25.0
    """Seconds between a preemption signal and the end of ranks that did not stop."""
    stall_limit: float = 60.0
    """Seconds without any progress, at least, after which a run in which ranks wait for one is ended; 0: never."""
    debug_rank: int | None = None
    """The rank that waits for a debugger before it begins; set by ``with_debugger``."""
    debug_port: int = 0
    """Where it listens, on loopback; 0: any free port."""

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads={self.threads} was asked for; a rank computes with at least 1.")
        if self.stall_limit < 0:
            raise ConfigError(
                f"stall_limit={self.stall_limit:g} was asked for; it is a number of seconds, 0 for never."
            )
        if self.grace < 0:
            raise ConfigError(f"grace={self.grace:g} was asked for; it is a number of seconds, 0 or more.")


def new_run_id() -> str:
    """A name for a run: the time, and six digits so that two runs of one second differ."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def world_environment(
    options: LaunchOptions, run_id: str, run_directory: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The environment of the fork server, which all ranks share."""
    environment = {name: text for name, text in inherited.items() if not name.startswith(_FOREIGN)}
    threads = str(options.threads or inherited.get("OMP_NUM_THREADS") or 1)
    environment.update(
        OMP_NUM_THREADS=threads,
        MKL_NUM_THREADS=threads,
        CUDA_VISIBLE_DEVICES=options.devices.visible,
        GLOO_SOCKET_IFNAME=_LOOPBACK,
        NCCL_SOCKET_IFNAME=_LOOPBACK,
        WORLD_SIZE=str(options.devices.count),
        LOCAL_WORLD_SIZE=str(options.devices.count),
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        LOCKSTEP_RUN_ID=run_id,
        LOCKSTEP_RUN_DIRECTORY=str(run_directory),
        LOCKSTEP_RENDEZVOUS=f"file://{run_directory / 'rendezvous'}",
    )
    if options.debug_rank is not None:
        environment.update(LOCKSTEP_DEBUG_RANK=str(options.debug_rank))
    return environment


def rank_environment(rank: int) -> dict[str, str]:
    """What differs between the ranks of one host."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}
