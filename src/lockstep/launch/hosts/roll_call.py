"""The roll-call of hosts: who has come, whether all run the same, and which ranks each gets. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.errors import ConfigError, RankError

_MOST_DIFFERENCES = 6


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a host says of itself when it arrives."""

    node: int
    name: str
    """Its host name, for messages."""
    ranks: int
    """How many ranks it will start."""
    instance: str
    """Drawn anew by each command, so that one which reconnects is told from a second one of the same number."""
    settings: Mapping[str, str]
    """What must be equal on all hosts."""

    @property
    def text(self) -> str:
        """As in ``host 1 (fb)``."""
        return f"host {self.node} ({self.name})"

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Hello:
        """Raises ``ValueError``, ``KeyError`` or ``TypeError`` where the fields are none of a host."""
        node, ranks = fields["node"], fields["ranks"]
        if not (isinstance(node, int) and isinstance(ranks, int)) or node < 0 or not 0 < ranks <= 4096:
            raise ValueError
        settings = {str(name): str(value) for name, value in dict(fields["settings"]).items()}
        return cls(
            node=node,
            name=str(fields["name"])[:64],
            ranks=ranks,
            instance=str(fields["instance"])[:64],
            settings=settings,
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What node 0 decides when every host has come."""

    name: str
    """Host name of node 0."""
    run_id: str
    ranks: Mapping[int, int]
    """Number of ranks of each host, by its number."""
    rendezvous: str
    """Where the ranks meet, as ``tcp://HOST:PORT``."""
    shared: Any = None
    """What all hosts run, where node 0 decides that; JSON."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Plan:
        """What ``asdict`` gave, after its way through JSON."""
        ranks = {int(node): int(count) for node, count in fields["ranks"].items()}
        return cls(**{**fields, "ranks": ranks})


def absent(arrived: Mapping[int, Hello], nodes: int, limit: float) -> RankError:
    """The error after a roll-call that ended too early: who is missing, and who has come."""
    missing = [node for node in range(nodes) if node not in arrived]
    names = ", ".join(f"host {node} (node-rank {node})" for node in missing)
    here = ", ".join(f"{node} ({arrived[node].name})" for node in sorted(arrived))
    return RankError(
        f"Not every host arrived within {limit:g} s. missing: {names}; arrived: {here}. Start the same command "
        "there with its own --node-rank, or give more time with --start-limit."
    )


def compare(hellos: Mapping[int, Hello]) -> None:
    """Refuses hosts that would not run the same.

    Raises:
        ConfigError: names each setting that differs, with the value on each host.
    """
    first = hellos[min(hellos)]
    differences = []
    for name in sorted({name for hello in hellos.values() for name in hello.settings}):
        values: dict[str, list[int]] = {}
        for node, hello in sorted(hellos.items()):
            values.setdefault(hello.settings.get(name, "not set"), []).append(node)
        if len(values) > 1:
            there = ", ".join(f"{value} on {_hosts(nodes)}" for value, nodes in values.items())
            differences.append(f"{name} is {there}")
    if not differences:
        return
    more = (
        f"; and {len(differences) - _MOST_DIFFERENCES} more" if len(differences) > _MOST_DIFFERENCES else ""
    )
    raise ConfigError(
        f"The {len(hellos)} hosts do not run the same: {'; '.join(differences[:_MOST_DIFFERENCES])}{more}. "
        f"Make them alike ({first.text} has node-rank {first.node})."
    )


def first_ranks(hellos: Mapping[int, Hello]) -> dict[int, int]:
    """The first rank of each host: ranks are numbered host by host."""
    found, rank = {}, 0
    for node in sorted(hellos):
        found[node] = rank
        rank += hellos[node].ranks
    return found


def _hosts(nodes: list[int]) -> str:
    return f"host{'' if len(nodes) == 1 else 's'} {', '.join(map(str, nodes))}"
