"""How the ranks of this host are started and ended."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import ConfigError, nearest
from lockstep.launch.devices import Devices
from lockstep.launch.place import LOOPBACK, Place
from lockstep.world import DEBUG_RANK, PROFILE

RESTART_WORLDS = ("same", "left")
TOKEN_VARIABLE = "LOCKSTEP_TOKEN"
"""Holds the secret of the supervisors of several hosts; ranks have no use for it."""
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
    profile: str = ""
    """FIRST:COUNT: the steps of which a script's ``lockstep.init`` writes a timeline; empty: as the script says."""

    restarts: int = 0
    """How often the run is started again after a process was lost."""
    restart_world: str = "same"
    """What it is started on: ``same``, or ``left`` for the devices whose ranks were not lost."""
    fits: Callable[[int], bool] = field(default=lambda ranks: True, repr=False)
    """Whether the target can run on so many ranks; asked for ``restart_world="left"``."""
    restart: int = 0
    """How often it has been started again."""
    run_id: str = ""
    """Of the run, over all restarts; a new one if empty."""

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise ConfigError(f"restarts={self.restarts} was asked for; it is a number, 0 for never.")
        if self.restart_world not in RESTART_WORLDS:
            raise ConfigError(
                f"restart_world {self.restart_world!r} is not known.{nearest(self.restart_world, RESTART_WORLDS)}"
            )
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


def alone(options: LaunchOptions) -> Place:
    """The place of a host that trains without others."""
    return Place(run_id=options.run_id or new_run_id(), world_size=options.devices.count)


def world_environment(
    options: LaunchOptions, place: Place, run_directory: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The environment of the fork server, which all ranks share."""
    environment = {
        name: text
        for name, text in inherited.items()
        if not name.startswith(_FOREIGN) and name != TOKEN_VARIABLE
    }
    threads = str(options.threads or inherited.get("OMP_NUM_THREADS") or 1)
    environment.update(
        OMP_NUM_THREADS=threads,
        MKL_NUM_THREADS=threads,
        CUDA_VISIBLE_DEVICES=options.devices.visible,
        GLOO_SOCKET_IFNAME=place.interface,
        NCCL_SOCKET_IFNAME=place.interface if place.interface == LOOPBACK else f"={place.interface}",
        WORLD_SIZE=str(place.world_size),
        LOCAL_WORLD_SIZE=str(options.devices.count),
        GROUP_RANK=str(place.node),
        GROUP_WORLD_SIZE=str(place.nodes),
        LOCKSTEP_RUN_ID=place.run_id,
        LOCKSTEP_RUN_DIRECTORY=str(run_directory),
        LOCKSTEP_RESTART=str(options.restart),
        LOCKSTEP_RENDEZVOUS=place.rendezvous or f"file://{run_directory / 'rendezvous'}",
    )
    environment[PROFILE] = options.profile
    if options.debug_rank is not None:
        environment.update(**{DEBUG_RANK: str(options.debug_rank)})
    return environment


def rank_environment(local_rank: int, place: Place) -> dict[str, str]:
    """What differs between the ranks of one host."""
    return {"RANK": str(place.first_rank + local_rank), "LOCAL_RANK": str(local_rank)}
