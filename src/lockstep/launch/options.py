"""The options of a launch: devices, threads, limits, restarts; and the environment that they give the ranks.

Devices are found without importing torch:

--devices 4        4 GPUs, or 4 CPU processes where there is no GPU
--devices 0,5      these two of the visible GPUs ("5," is a list of one)
--devices 0,0      two ranks on one GPU, for tests
--devices auto     every visible GPU; without one, a CPU process per core, at most 8
--devices cpu:3    3 CPU processes, also where there are GPUs; "cpu" chooses the number as auto does
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from urllib.parse import urlsplit

from lockstep.config.checks import at_least, check_fields, device_request, one_of, seconds, threads
from lockstep.core.world import (
    DEBUG_RANK,
    LOOPBACK,
    PORTABLE_ENVIRONMENT,
    SHARED_DEVICES,
    HostLayout,
    threads_of_environment,
    usable_cores,
)
from lockstep.distributed.authentication import TOKEN_VARIABLE
from lockstep.errors import ConfigError

_MOST_CPU_RANKS = 8
_LIST_SECONDS = 20.0
_GPU_NODE = re.compile(r"nvidia\d+")


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of the ranks of this host."""

    kind: str
    """``cuda`` or ``cpu``."""
    names: tuple[str, ...]
    """Each an entry of ``CUDA_VISIBLE_DEVICES``, or ``cpu``."""
    per_rank: int = 1
    """Number of consecutive devices that a rank uses."""

    @property
    def count(self) -> int:
        """Number of ranks on this host."""
        return len(self.names) // self.per_rank

    @property
    def visible(self) -> str:
        """The value of ``CUDA_VISIBLE_DEVICES`` for all ranks; the local rank is an index into it, or ``shared``."""
        return ",".join(dict.fromkeys(self.names)) if self.kind == "cuda" else ""

    @property
    def shared(self) -> str:
        """Where devices are named more than once, the place in ``visible`` of each name; else empty."""
        once = list(dict.fromkeys(self.names))
        is_shared = self.kind == "cuda" and len(once) < len(self.names)
        return ",".join(str(once.index(name)) for name in self.names) if is_shared else ""


def parse_devices(text: str | int, *, gpus: tuple[str, ...] | None = None, cores: int | None = None) -> Devices:
    """Reads a ``--devices`` value; the visible GPUs and usable cores are found on this host if they are not given."""
    asked = device_request(text)
    if isinstance(asked, str):
        raise ConfigError(f"devices {asked}")
    gpus = visible_gpus() if gpus is None else gpus
    cpu_ranks = min(usable_cores() if cores is None else cores, _MOST_CPU_RANKS)
    if asked.indices:
        absent = [index for index in asked.indices if index >= len(gpus)]
        if absent:
            raise ConfigError(
                f"devices={','.join(map(str, asked.indices))} was asked for and {_found(gpus)}: there is no index "
                f"{absent[0]}. Indices count the visible GPUs from 0."
            )
        return Devices(kind="cuda", names=tuple(gpus[index] for index in asked.indices))
    if asked.is_cpu or not gpus:
        return Devices(kind="cpu", names=("cpu",) * (asked.count or cpu_ranks))
    if asked.count is not None and asked.count > len(gpus):
        raise ConfigError(
            f"devices={asked.count} was asked for and {_found(gpus)}. "
            f"Use devices={len(gpus)}, or devices=cpu:{asked.count} for CPU processes."
        )
    return Devices(kind="cuda", names=gpus[: asked.count])


def visible_gpus(
    environment: Mapping[str, str] | None = None,
    device_folder: Path = Path("/dev"),
    driver_folder: Path = Path("/proc/driver/nvidia"),
) -> tuple[str, ...]:
    """Returns the GPUs that a process may use: those of ``CUDA_VISIBLE_DEVICES`` if it is set, else all of the host.

    Of MIG instances it is one, since CUDA shows a process no more. Empty if the installed torch is a CPU build.
    """
    variables = os.environ if environment is None else environment
    chosen = variables.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        count = sum(1 for entry in device_folder.iterdir() if _GPU_NODE.fullmatch(entry.name))
        if not count and (device_folder / "dxg").exists():
            count = _count_listed(variables)
        has_instances = any(driver_folder.glob("capabilities/gpu*/mig/gi*"))
        found = tuple(map(str, range(min(count, 1) if has_instances else count)))
    else:  # CUDA stops reading at the first invalid entry
        names = map(str.strip, chosen.split(","))
        found = tuple(takewhile(lambda name: name and not name.startswith("-"), names))
        if found and found[0].startswith("MIG-"):
            found = found[:1]
    return () if found and _torch_is_cpu_build() else found


def _count_listed(environment: Mapping[str, str]) -> int:
    """Returns the number of GPUs that nvidia-smi lists: the Windows Subsystem for Linux has no node for each."""
    path = os.pathsep.join([environment.get("PATH", os.defpath), "/usr/lib/wsl/lib"])
    program = shutil.which("nvidia-smi", path=path)
    if program is None:
        return 0
    with suppress(OSError, subprocess.TimeoutExpired):
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_LIST_SECONDS).stdout
        return sum(line.startswith("GPU ") for line in listed.splitlines())
    return 0


def _found(gpus: tuple[str, ...]) -> str:
    if not gpus:
        return "no GPU is visible"
    verb = "GPU is" if len(gpus) == 1 else "GPUs are"
    one = "; of MIG instances a process sees one" * gpus[0].startswith("MIG-")
    return f"{len(gpus)} {verb} visible ({', '.join(gpus)}{one})"


def _torch_is_cpu_build() -> bool:
    from importlib import metadata  # slow to import, and only needed beside a GPU

    with suppress(metadata.PackageNotFoundError):
        return metadata.version("torch").endswith("+cpu")
    return False


RESTART_WORLDS = ("same", "remaining")
_FOREIGN = ("TORCHELASTIC_", "OMPI_COMM_WORLD_")
"""Prefixes of variables of other launchers; a rank that has them would think that one of them started it."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The options of ``supervise`` and ``launch``."""

    devices: Devices
    """One per rank."""
    threads: int | None = field(default=None, metadata={"check": threads})
    """Intra-op threads per rank. Part of the recipe, so the default does not depend on the number of ranks:
    ``OMP_NUM_THREADS`` if set, else 1."""
    preload: tuple[str, ...] = ()
    """Modules that the fork server imports beside torch, once for all ranks."""
    log_directory: str = ""
    """Where ranks write output and error records; if empty, a temporary folder, kept after a failure."""
    grace: float = field(default=25.0, metadata={"check": seconds(or_none=True)})
    """Seconds after a preemption signal until ranks that did not stop are killed."""
    stall_limit: float = field(default=60.0, metadata={"check": seconds(or_none=True)})
    """Minimum number of seconds without progress after which a run that waits for a rank is ended; 0: never."""
    debug_rank: int | None = None
    """The rank that waits for a debugger before it starts; set by ``with_debugger``."""
    debug_port: int = 0
    """Its port on loopback; 0: any free port."""
    profile: str = ""
    """FIRST:COUNT: the steps of which a script's ``lockstep.init`` writes a timeline; empty: as the script says."""
    portable: bool = False
    """Starts the ranks with the environment of portable bits."""
    hash_seed: str = "0"
    """``PYTHONHASHSEED`` of the ranks if it is not set; without it a set of strings has another order in every run."""
    restarts: int = field(default=0, metadata={"check": at_least(0)})
    """How often the run is restarted after a process was lost."""
    restart_world: str = field(default="same", metadata={"check": one_of(*RESTART_WORLDS)})
    """The devices of a restart: ``same``, or ``remaining`` for those whose ranks were not lost (formerly ``left``)."""
    fits: Callable[[int], bool] = field(default=lambda ranks: True, repr=False)
    """Returns whether the target can run on a number of ranks; called for ``restart_world="remaining"``."""
    restart: int = 0
    """How often it has been restarted."""
    run_id: str = ""
    """Id of the run, the same over all restarts; a new one if empty."""

    def __post_init__(self) -> None:
        if self.restart_world == "left":
            object.__setattr__(self, "restart_world", "remaining")
        check_fields(self, prefix="")


def new_run_id() -> str:
    """Returns a new run id: the time, and six random digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def single_host_layout(options: LaunchOptions) -> HostLayout:
    """Returns the layout of a run on only this host."""
    return HostLayout(run_id=options.run_id or new_run_id(), world_size=options.devices.count)


def world_environment(
    options: LaunchOptions, layout: HostLayout, run_directory: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Returns the environment of the fork server, which all ranks share."""
    kept = [name for name in inherited if not name.startswith(_FOREIGN) and name != TOKEN_VARIABLE]
    environment = {name: inherited[name] for name in kept}
    threads = str(options.threads or threads_of_environment(inherited))
    environment.setdefault("PYTHONHASHSEED", options.hash_seed)
    environment.update(
        OMP_NUM_THREADS=threads,
        MKL_NUM_THREADS=threads,
        CUDA_VISIBLE_DEVICES=options.devices.visible,
        GLOO_SOCKET_IFNAME=layout.interface,
        NCCL_SOCKET_IFNAME=layout.interface if layout.interface == LOOPBACK else f"={layout.interface}",
        WORLD_SIZE=str(layout.world_size),
        LOCAL_WORLD_SIZE=str(options.devices.count),
        GROUP_RANK=str(layout.node),
        GROUP_WORLD_SIZE=str(layout.nodes),
        LOCKSTEP_RUN_ID=layout.run_id,
        LOCKSTEP_RUN_DIRECTORY=str(run_directory),
        LOCKSTEP_RESTART=str(options.restart),
        LOCKSTEP_RENDEZVOUS=layout.rendezvous or f"file://{run_directory / 'rendezvous'}",
        LOCKSTEP_PROFILE=options.profile,
        **_master(layout),
    )
    if options.devices.shared:
        environment[SHARED_DEVICES] = options.devices.shared
    if options.debug_rank is not None:
        environment[DEBUG_RANK] = str(options.debug_rank)
    if options.portable:
        environment.update(PORTABLE_ENVIRONMENT)
    return environment


def _master(layout: HostLayout) -> dict[str, str]:
    """Returns the address that torchrun gives a script, for scripts that read it; ``env://`` leads to the rendezvous.

    On one host it is a port of loopback that was free just now.
    """
    place = urlsplit(layout.rendezvous)
    if place.hostname:
        return {"MASTER_ADDR": place.hostname, "MASTER_PORT": str(place.port)}
    try:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise ConfigError(
            f"The ranks of one host meet at 127.0.0.1, and no port can be opened there: {why}. "
            "Give the loopback interface that address: ip addr add 127.0.0.1/8 dev lo."
        ) from error


def rank_environment(local_rank: int, layout: HostLayout) -> dict[str, str]:
    """Returns the variables that differ between the ranks of one host."""
    return {"RANK": str(layout.first_rank + local_rank), "LOCAL_RANK": str(local_rank)}
