"""The place of a process, and of a host, in the run, as Lockstep, torchrun, SLURM or Open MPI describe it."""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lockstep.errors import ConfigError

_FIRST_PORT, _PORTS = 20000, 12000
"""Below the ports that Linux hands out by itself (32768 and up)."""
_NUMBERS = re.compile(r"\[([^,\]-]+)[^\]]*\]")


def first_host(nodes: str) -> str:
    """The first host of SLURM's short form of a node list: ``r[1-2]n[003-007,9]-ib,cpu1`` begins with ``r1n003-ib``."""
    return _NUMBERS.sub(r"\1", nodes.strip()).partition(",")[0]


def meeting_place(variables: Mapping[str, str]) -> str:
    """The rendezvous of a step's ranks: the first host of its nodes, on a port that follows from job and step.

    A ``MASTER_ADDR`` that the batch script exports comes first.
    """
    if "MASTER_ADDR" in variables and "MASTER_PORT" in variables:
        return "env://"
    host = _first_node(variables)
    if not host:
        return "env://"
    return f"tcp://{host}:{port_of(variables.get('SLURM_JOB_ID', '0'), variables.get('SLURM_STEP_ID', '0'))}"


def master_of_step(variables: Mapping[str, str]) -> str:
    """``HOST:PORT`` where the supervisors of a step's nodes connect, chosen as in ``meeting_place``."""
    job, step = variables.get("SLURM_JOB_ID", "0"), variables.get("SLURM_STEP_ID", "0")
    return f"{_first_node(variables)}:{variables.get('MASTER_PORT') or port_of(job, step, ports=2)}"


def _first_node(variables: Mapping[str, str]) -> str:
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or ""
    return variables.get("MASTER_ADDR") or first_host(nodes)


def port_of(job: str, step: str, *, ports: int = 1) -> int:
    """The first of ``ports`` ports of a step. Jobs that run at once have close numbers, so their ports differ."""
    numbers = [int(text) if text.isdecimal() else 0 for text in (job, step)]
    return _FIRST_PORT + ports * (numbers[0] * 7 + numbers[1]) % _PORTS


RENDEZVOUS = "LOCKSTEP_RENDEZVOUS"
"""Variable with the address where the ranks meet; our launcher sets it, and so does ``--rendezvous``."""
DEBUG_RANK = "LOCKSTEP_DEBUG_RANK"
"""Variable with the rank that a debugger may hold up; set on every rank of such a run."""
PROFILE = "LOCKSTEP_PROFILE"
"""Variable with the steps of which a script's run is to write a timeline; ``lockstep run --profile`` sets it."""
_PORTABLE = "LOCKSTEP_PORTABLE"
PORTABLE_VARIABLES = {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
"""Variables that hold the libraries of torch to code that every x86-64 CPU with AVX2 runs; they read them once."""
PORTABLE_ENVIRONMENT = {**(PORTABLE_VARIABLES if platform.machine() == "x86_64" else {}), _PORTABLE: "1"}
"""The environment of ranks whose bits are to be portable: the variables, which torch warns of on other CPUs, and a
note that they came before torch."""


def make_environment_portable() -> None:
    """Sets the variables in this process, which must not have imported torch."""
    assert "torch" not in sys.modules, "the libraries of torch have read them"
    os.environ.update(PORTABLE_ENVIRONMENT)


SHARED_DEVICES = "LOCKSTEP_DEVICES"
"""Variable with the GPU of each rank of a host, where ranks share one, as 0,0,1; places in CUDA_VISIBLE_DEVICES."""


_FUSED_REDUCTION = "LOCKSTEP_FUSED_REDUCTION"
"""Variable that turns on summing gradients by one kernel on GPUs (docs/decisions/0043)."""


def wants_fused_reduction() -> bool:
    """True where the user has turned on the fused kernel."""
    return os.environ.get(_FUSED_REDUCTION, "0") not in ("", "0")


def shared_devices() -> tuple[int, ...]:
    """The GPU of each rank of this host, where ranks share one; else empty."""
    return tuple(int(place) for place in os.environ.get(SHARED_DEVICES, "").split(",") if place)


def usable_cores() -> int:
    """Returns the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of_environment(environment: Mapping[str, str]) -> int:
    """The threads that ``OMP_NUM_THREADS`` gives a process, whose list has a number for each level; 1 without it."""
    text = environment.get("OMP_NUM_THREADS", "")
    first = text.partition(",")[0].strip() or "1"
    if not (first.isascii() and first.isdecimal() and len(first) < 5 and int(first)):
        raise ConfigError(f"OMP_NUM_THREADS is {text!r:.60}. Set it to the threads of a process, such as 1.")
    return int(first)


@dataclass(frozen=True, kw_only=True)
class World:
    """The position of one process in the run. ``rank`` is always the global rank."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes of this host; picks the device."""
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1
    launcher: str = "python"
    """The launcher that started the process: python, lockstep, torchrun, slurm or mpi."""
    rendezvous: str = ""
    """Rendezvous of the ranks: ``file://PATH``, ``tcp://HOST:PORT`` or ``env://``; empty for a world of one."""
    run_id: str = ""
    """Names the run on this host; empty where Lockstep's launcher did not start it."""
    run_directory: str = ""
    """Private folder (0700) shared with the launcher: rendezvous file, heartbeats, error records; empty if none."""
    restart: int = 0
    """Restarts of the run by our launcher so far, after lost processes."""
    is_debugged: bool = False
    """True where a debugger may hold up one of the ranks, so that the others must wait for it without a limit."""
    is_portable: bool = False
    """True where the launcher has set the variables for portable bits, before torch was imported."""
    profile: str = ""
    """FIRST:COUNT: the steps of which the run is to write a timeline, whatever the script says; empty for none."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} does not exist in a world of {self.world_size} processes.")
        if not 0 <= self.local_rank < self.local_world_size:
            raise ConfigError(
                f"local rank {self.local_rank} does not exist on a host with {self.local_world_size} processes."
            )
        if self.world_size > 1 and not self.rendezvous:
            raise ConfigError(
                f"A world of {self.world_size} processes needs a rendezvous: file://PATH, tcp://HOST:PORT or env://."
            )

    @property
    def is_main(self) -> bool:
        """True for the process that logs, shows progress and writes checkpoints (rank 0)."""
        return self.rank == 0

    @property
    def is_one_host(self) -> bool:
        """True where every process of the run is on this host."""
        return self.local_world_size == self.world_size

    def patience(self, seconds: float) -> float:
        """Seconds to wait for other ranks: as many as asked, 30 days where a debugger may hold one up."""
        return 30 * 86400.0 if self.is_debugged else seconds

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> World:
        """Reads the variables of the launcher that started this process.

        Known are Lockstep's own launcher and torchrun (``RANK``), SLURM (``SLURM_PROCID``, inside a step) and
        Open MPI (``OMPI_COMM_WORLD_RANK``); none of them means a world of one. ``LOCKSTEP_RENDEZVOUS`` comes before
        the rendezvous that any of them names. ``ConfigError`` names a variable that is missing or not a number.

        ``RANK`` and ``WORLD_SIZE`` without ``LOCAL_WORLD_SIZE`` mean processes of one host, where they meet at a
        loopback address or by a file. In Kubernetes they mean one process in each pod, as Kubeflow's PyTorchJob starts
        them. Anywhere else the number cannot be known, and a ``ConfigError`` says what to set.
        """
        variables = os.environ if environment is None else environment
        world = cls._of_launcher(variables)
        return replace(
            world,
            profile=variables.get(PROFILE, ""),
            is_debugged=DEBUG_RANK in variables,
            is_portable=bool(variables.get(_PORTABLE)),
        )

    @classmethod
    def alone(cls) -> World:
        """This process by itself, whatever launcher started it; portable where its environment is."""
        return cls(is_portable=bool(os.environ.get(_PORTABLE)))

    @classmethod
    def _of_launcher(cls, variables: Mapping[str, str]) -> World:
        read = _Reader(variables)
        if "RANK" in variables:
            world_size = read.size("WORLD_SIZE")
            told = "LOCAL_WORLD_SIZE" in variables
            local_world_size = read.size("LOCAL_WORLD_SIZE") if told else _processes_of_this_host(variables, world_size)
            return cls(
                rank=read.number("RANK"),
                world_size=world_size,
                local_rank=read.number("LOCAL_RANK", default=read.number("RANK") % local_world_size),
                local_world_size=local_world_size,
                node=read.number("GROUP_RANK", default=read.number("RANK") // local_world_size),
                nodes=read.number("GROUP_WORLD_SIZE", default=max(1, world_size // local_world_size)),
                launcher="torchrun" if "TORCHELASTIC_RUN_ID" in variables else "lockstep",
                rendezvous=variables.get(RENDEZVOUS, "env://"),
                run_id=variables.get("LOCKSTEP_RUN_ID", ""),
                run_directory=variables.get("LOCKSTEP_RUN_DIRECTORY", ""),
                restart=read.number("LOCKSTEP_RESTART", default=0),
            )
        if "SLURM_PROCID" in variables and "SLURM_NTASKS" in variables and "SLURM_STEP_ID" in variables:
            return _from_slurm(variables, read)
        if "OMPI_COMM_WORLD_RANK" in variables:
            return _from_open_mpi(variables, read)
        return cls()


def _processes_of_this_host(variables: Mapping[str, str], world_size: int) -> int:
    """The number of ranks on this host, where the launcher does not tell it."""
    rendezvous = variables.get(RENDEZVOUS, "env://")
    if rendezvous == "env://":
        address = variables.get("MASTER_ADDR", "")
    else:
        scheme, _, place = rendezvous.partition("://")
        address = place.rpartition(":")[0] if scheme == "tcp" else ""
    if world_size == 1 or not address or _is_loopback(address):
        return world_size
    if "KUBERNETES_SERVICE_HOST" in variables:
        return 1
    raise ConfigError(
        f"The environment has RANK and WORLD_SIZE={world_size}, and the ranks meet at {address}, but LOCAL_WORLD_SIZE "
        "is missing. The number of ranks on this host cannot be known. Set LOCAL_WORLD_SIZE and LOCAL_RANK (1 and 0 "
        "for one rank on each host), or start the ranks with torchrun or lockstep run."
    )


def _is_loopback(address: str) -> bool:
    """True for localhost and the addresses that never leave a host; a name is not resolved."""
    plain = address.strip("[]")
    return plain in ("localhost", "::1") or plain.startswith("127.")


@dataclass(frozen=True)
class _Reader:
    variables: Mapping[str, str]

    def number(self, name: str, default: int | None = None) -> int:
        text = self.variables.get(name)
        if text is None:
            if default is None:
                raise ConfigError(f"The environment names a rank but not {name}. Start all ranks with one launcher.")
            return default
        if not re.fullmatch(r"\d+", text):
            raise ConfigError(f"The environment variable {name} should be a number and is {text!r}.")
        return int(text)

    def size(self, name: str, default: int | None = None) -> int:
        """A number that counts processes or hosts, so one that is at least 1."""
        value = self.number(name, default)
        if value < 1:
            raise ConfigError(f"The environment variable {name} should be at least 1 and is {value}.")
        return value


def _from_open_mpi(variables: Mapping[str, str], read: _Reader) -> World:
    rank, world_size = read.number("OMPI_COMM_WORLD_RANK"), read.size("OMPI_COMM_WORLD_SIZE")
    local_world_size = read.size("OMPI_COMM_WORLD_LOCAL_SIZE")
    # On one host a file in mpirun's private folder, which goes with the job; else what the user exports
    is_one_host = local_world_size == world_size and "MASTER_ADDR" not in variables
    folder = variables.get("PMIX_SERVER_TMPDIR") if is_one_host else None
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=read.number("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_world_size=local_world_size,
        # Open MPI does not tell the host's number: OMPI_COMM_WORLD_NODE_RANK is a rank within the host.
        node=rank // local_world_size,
        nodes=-(-world_size // local_world_size),
        launcher="mpi",
        rendezvous=variables.get(RENDEZVOUS) or (f"file://{folder}/lockstep-rendezvous" if folder else "env://"),
    )


def _from_slurm(variables: Mapping[str, str], read: _Reader) -> World:
    tasks, nodes = read.size("SLURM_NTASKS"), read.size("SLURM_NNODES", default=1)
    node, local_rank = read.number("SLURM_NODEID", default=0), read.number("SLURM_LOCALID")
    text = variables.get("SLURM_STEP_TASKS_PER_NODE", variables.get("SLURM_TASKS_PER_NODE", ""))
    local_sizes = _tasks_of_nodes(text)
    local = local_sizes[node] if node < len(local_sizes) else max(1, tasks // nodes)
    return World(
        rank=read.number("SLURM_PROCID"),
        world_size=tasks,
        local_rank=local_rank,
        local_world_size=max(local, local_rank + 1),
        node=node,
        nodes=nodes,
        launcher="slurm",
        rendezvous=(variables.get(RENDEZVOUS) or meeting_place(variables)) if tasks > 1 else "",
        run_id=variables.get("SLURM_JOB_ID", ""),
    )


def _tasks_of_nodes(text: str) -> list[int]:
    """The tasks of each host from SLURM's short form: ``4(x2),3`` is 4, 4, 3. Empty where it cannot be read."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            return []
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def host_name() -> str:
    """This host's name, for messages only: nothing is ever resolved or dialled by it."""
    return socket.gethostname()


LOOPBACK = "lo" if os.uname().sysname == "Linux" else "lo0"


@dataclass(frozen=True, kw_only=True)
class HostLayout:
    """The position of one host in the run; ranks are numbered host by host."""

    run_id: str
    world_size: int
    """Ranks of all hosts."""
    node: int = 0
    nodes: int = 1
    first_rank: int = 0
    """The lowest rank of this host."""
    rendezvous: str = ""
    """The rendezvous of all ranks, as ``tcp://HOST:PORT``; empty: a file of the run directory."""
    interface: str = LOOPBACK
    """The network interface for the ranks' data."""
