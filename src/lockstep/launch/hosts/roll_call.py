"""The roll-call of hosts, as pure values: the options of each, and what hosts say when they connect.

``HostOptions`` come from the command; a ``Hello`` from each host is compared, and answered by a ``Plan``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import ConfigError, RankError
from lockstep.text import grouped, numbered

_MASTER = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.%\w]+)\]|(?P<host>[^:\s\[\]]+)):(?P<port>\d{1,5})")
_LARGEST_PORT = 65534  # the store takes the next one


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """The options of one host's command for a run on several hosts."""

    nodes: int
    node: int
    """Number of this host; node 0 coordinates the others."""
    master: str
    """``HOST:PORT`` of node 0; the ranks meet on the next port."""
    token: bytes = field(repr=False)
    """The secret that the hosts of this run share."""
    interface: str = ""
    """For the ranks' data; empty: the one that leads to node 0."""
    start_limit: float = 60.0
    """Seconds within which every host must connect."""
    silence_limit: float = 13.0
    """Seconds without a message after which a host is lost. A network failure of 10 s heals within them."""
    shares_terminal: bool = False
    """True if all hosts write to one terminal, so that only node 0 says what all know."""

    def __post_init__(self) -> None:
        if self.nodes < 2:
            raise ConfigError(f"nnodes={self.nodes} was given; a run on several hosts has at least 2.")
        if not 0 <= self.node < self.nodes:
            raise ConfigError(
                f"node-rank {self.node} was given; {self.nodes} hosts have the numbers 0 to {self.nodes - 1}."
            )
        if self.start_limit <= 0:
            raise ConfigError(f"start_limit={self.start_limit:g} was given; it must be a number of seconds above 0.")
        if not 1 <= self.port <= _LARGEST_PORT:
            raise ConfigError(
                f"--master {self.master} names port {self.port}; use one from 1 to {_LARGEST_PORT}. "
                "The ranks meet on the port after it."
            )

    @property
    def host(self) -> str:
        """The host of ``master``."""
        return parse_master(self.master)[0]

    @property
    def port(self) -> int:
        """The port of ``master``, on which the supervisors communicate."""
        return parse_master(self.master)[1]


def parse_master(text: str) -> tuple[str, int]:
    """Returns host and port of ``--master``; ``ConfigError`` if it is not ``HOST:PORT``."""
    found = _MASTER.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--master {text!r} was given; it must be the address and a free port of the host of "
            "node-rank 0, as in 10.0.0.1:29500."
        )
    return found["six"] or found["host"], int(found["port"])


_MOST_DIFFERENCES = 6


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The first message of a host."""

    node: int
    name: str
    """Its host name, for messages."""
    ranks: int
    """How many ranks it will start."""
    instance: str
    """Random for each command, so that a reconnection is distinguished from a second host with the same number."""
    settings: Mapping[str, str]
    """Settings that must be equal on all hosts."""
    run_id: str = ""
    """The run that it belongs to; empty before its roll-call."""

    @property
    def text(self) -> str:
        """As in ``host 1 (fb)``."""
        return f"host {self.node} ({self.name})"

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Hello:
        """Raises ``ValueError``, ``KeyError`` or ``TypeError`` where the fields are invalid."""
        node, ranks = fields["node"], fields["ranks"]
        if not (isinstance(node, int) and isinstance(ranks, int)) or node < 0 or not 0 < ranks <= 4096:
            raise ValueError
        settings = {str(name): str(value) for name, value in dict(fields["settings"]).items()}
        name, instance = str(fields["name"])[:64], str(fields["instance"])[:64]
        run_id = str(fields.get("run_id", ""))[:64]
        return cls(node=node, name=name, ranks=ranks, instance=instance, settings=settings, run_id=run_id)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decision of node 0 when every host has connected."""

    name: str
    """Host name of node 0."""
    run_id: str
    ranks: Mapping[int, int]
    """Number of ranks of each host, by its number."""
    rendezvous: str
    """Where the ranks meet, as ``tcp://HOST:PORT``."""
    shared: Any = None
    """A value that node 0 has decided for all hosts; JSON."""


def absent(arrived: Mapping[int, Hello], nodes: int, limit: float) -> RankError:
    """Returns the error of an incomplete roll-call: which hosts are missing, and which connected."""
    missing = [node for node in range(nodes) if node not in arrived]
    names = ", ".join(f"host {node} (node-rank {node})" for node in missing)
    here = ", ".join(f"{node} ({arrived[node].name})" for node in sorted(arrived))
    return RankError(
        f"Not every host connected within {limit:g} s. missing: {names}; connected: {here}. Start the same command "
        "there with its own --node-rank, or raise --start-limit."
    )


def compare(hellos: Mapping[int, Hello]) -> None:
    """Checks that all hosts would run the same; ``ConfigError`` names each setting that differs, and its values."""
    first = hellos[min(hellos)]
    differences: list[str] = []
    for name in sorted({name for hello in hellos.values() for name in hello.settings}):
        values = grouped((hello.settings.get(name, "not set"), node) for node, hello in sorted(hellos.items()))
        if len(values) > 1:
            there = ", ".join(f"{value} on {numbered('host', nodes)}" for value, nodes in values.items())
            differences.append(f"{name} is {there}")
    if not differences:
        return
    left_out = len(differences) - _MOST_DIFFERENCES
    more = f"; and {left_out} more" if left_out > 0 else ""
    raise ConfigError(
        f"The {len(hellos)} hosts have different settings: {'; '.join(differences[:_MOST_DIFFERENCES])}{more}. "
        f"Make them equal ({first.text} has node-rank {first.node})."
    )
