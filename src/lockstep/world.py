"""Who this process is among all processes of the run, read once from the environment."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class World:
    """The place of one process in the run. ``rank`` is always the global rank."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among the processes of this host; picks the device."""
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1
    launcher: str = "python"
    """What started the process: python, lockstep, torchrun, slurm or mpi."""
    rendezvous: str = ""
    """Where the ranks meet: ``file://PATH``, ``tcp://HOST:PORT`` or ``env://``; empty for a world of one."""
    run_id: str = ""
    """Names the run on this host; empty where Lockstep's launcher did not start it."""
    run_directory: str = ""
    """Private folder (0700) shared with the launcher: rendezvous file, heartbeats, error records; empty if none."""

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
        """Whether this is the process that logs, shows progress and writes checkpoints (rank 0)."""
        return self.rank == 0

    @property
    def is_one_host(self) -> bool:
        """Whether every process of the run is on this host."""
        return self.local_world_size == self.world_size

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> World:
        """Reads the variables of the launcher that started this process.

        Known are Lockstep's own launcher and torchrun (``RANK``), SLURM (``SLURM_PROCID``, inside a step) and
        Open MPI (``OMPI_COMM_WORLD_RANK``); none of them means a world of one. ``ConfigError`` names a variable that
        is missing or not a number.
        """
        variables = os.environ if environment is None else environment
        read = _Reader(variables)
        if "RANK" in variables and "WORLD_SIZE" in variables:
            world_size = read.number("WORLD_SIZE")
            local_world_size = read.number("LOCAL_WORLD_SIZE", default=world_size)
            return cls(
                rank=read.number("RANK"),
                world_size=world_size,
                local_rank=read.number("LOCAL_RANK", default=read.number("RANK") % local_world_size),
                local_world_size=local_world_size,
                node=read.number("GROUP_RANK", default=0),
                nodes=read.number("GROUP_WORLD_SIZE", default=max(1, world_size // local_world_size)),
                launcher="torchrun" if "TORCHELASTIC_RUN_ID" in variables else "lockstep",
                rendezvous=variables.get("LOCKSTEP_RENDEZVOUS", "env://"),
                run_id=variables.get("LOCKSTEP_RUN_ID", ""),
                run_directory=variables.get("LOCKSTEP_RUN_DIRECTORY", ""),
            )
        if "SLURM_PROCID" in variables and "SLURM_NTASKS" in variables and "SLURM_STEP_ID" in variables:
            return _from_slurm(variables, read)
        if "OMPI_COMM_WORLD_RANK" in variables:
            return cls(
                rank=read.number("OMPI_COMM_WORLD_RANK"),
                world_size=read.number("OMPI_COMM_WORLD_SIZE"),
                local_rank=read.number("OMPI_COMM_WORLD_LOCAL_RANK"),
                local_world_size=read.number("OMPI_COMM_WORLD_LOCAL_SIZE"),
                node=read.number("OMPI_COMM_WORLD_NODE_RANK", default=0),
                nodes=max(
                    1, read.number("OMPI_COMM_WORLD_SIZE") // read.number("OMPI_COMM_WORLD_LOCAL_SIZE", default=1)
                ),
                launcher="mpi",
                rendezvous="env://",
            )
        return cls()


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


def _from_slurm(variables: Mapping[str, str], read: _Reader) -> World:
    tasks = read.number("SLURM_NTASKS")
    nodes = read.number("SLURM_NNODES", default=1)
    per_node = re.match(r"\d+", variables.get("SLURM_STEP_TASKS_PER_NODE", variables.get("SLURM_TASKS_PER_NODE", "")))
    local = int(per_node.group()) if per_node else max(1, tasks // nodes)
    return World(
        rank=read.number("SLURM_PROCID"),
        world_size=tasks,
        local_rank=read.number("SLURM_LOCALID"),
        local_world_size=max(local, read.number("SLURM_LOCALID") + 1),
        node=read.number("SLURM_NODEID", default=0),
        nodes=nodes,
        launcher="slurm",
        rendezvous="env://" if tasks > 1 else "",
        run_id=variables.get("SLURM_JOB_ID", ""),
    )


def host_name() -> str:
    """This host's name, for messages only: nothing is ever resolved or dialled by it."""
    return socket.gethostname()
