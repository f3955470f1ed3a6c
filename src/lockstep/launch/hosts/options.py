"""What a user says about the hosts of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from lockstep.errors import ConfigError

_MASTER = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.%\w]+)\]|(?P<host>[^:\s\[\]]+)):(?P<port>\d{1,5})")
_LARGEST_PORT = 65534  # the store takes the next one


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """One command's view of a run on several hosts."""

    nodes: int
    node: int
    """Number of this host; node 0 keeps the others together."""
    master: str
    """``HOST:PORT`` of node 0; the ranks meet on the next port."""
    token: bytes = field(repr=False)
    """Shared by the hosts of this run and known to nobody else."""
    interface: str = ""
    """For the ranks' data; empty: the one that leads to node 0."""
    start_limit: float = 60.0
    """Seconds within which every host must arrive."""
    silence_limit: float = 13.0
    """Seconds after which a host that is not heard of is lost. A glitch of 10 s heals within them."""

    def __post_init__(self) -> None:
        if self.nodes < 2:
            raise ConfigError(f"nnodes={self.nodes} was asked for; several hosts are at least 2.")
        if not 0 <= self.node < self.nodes:
            raise ConfigError(
                f"node-rank {self.node} was asked for, and {self.nodes} hosts have the numbers 0 to {self.nodes - 1}."
            )
        if self.start_limit <= 0:
            raise ConfigError(
                f"start_limit={self.start_limit:g} was asked for; it is a number of seconds above 0."
            )
        if not 1 <= self.port <= _LARGEST_PORT:
            raise ConfigError(
                f"--master {self.master} names port {self.port}; use one from 1 to {_LARGEST_PORT}. "
                "The ranks meet on the port after it."
            )

    @property
    def host(self) -> str:
        """The host of ``master``."""
        return self._parts[0]

    @property
    def port(self) -> int:
        """The port of ``master``, on which the supervisors talk."""
        return self._parts[1]

    @property
    def _parts(self) -> tuple[str, int]:
        found = _MASTER.fullmatch(self.master)
        if found is None:
            raise ConfigError(
                f"--master {self.master!r} was given; it is the address and a free port of the host of node-rank 0, "
                "as in 10.0.0.1:29500."
            )
        return found["six"] or found["host"], int(found["port"])
