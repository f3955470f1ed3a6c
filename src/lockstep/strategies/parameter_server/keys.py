"""Which server holds which parameter, or which rows of a large one: a pure function of their sizes.

sizes       embedding 60 (6 rows)   head 25   norm 5          two servers: 45 would be fair
pieces      rows 0-2   rows 3-5     head      norm            only what is more than fair is cut
server 0    rows 0-2 (30), head (25)
server 1    rows 3-5 (30), norm (5)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lockstep.plan import share


class Size(NamedTuple):
    """How large a parameter is."""

    rows: int
    """Of dim 0; 1 for a single number."""
    bytes: int


@dataclass(frozen=True)
class Key:
    """A parameter, or some of its rows."""

    name: str
    rows: tuple[int, int] | None = None
    """The first row and the one after the last; None for the whole parameter."""

    def of(self, tensor: Tensor) -> Tensor:
        """Its part of a tensor that is shaped like the parameter; a view."""
        return tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]


def spread(sizes: Mapping[str, Size], servers: int) -> list[list[Key]]:
    """The keys of each server: the largest first, each to the server that has the least so far.

    A parameter that is larger than a fair share is cut into runs of rows, one for each server at most.

    Args:
        sizes: of each parameter, in the order of the model.
        servers: how many there are.

    Returns:
        Keys by server, each list in the order of the model; no server has two keys of one parameter.
    """
    loads = [0.0] * servers
    held: list[dict[str, Key]] = [{} for _ in range(servers)]
    for key, size in sorted(_pieces(sizes, servers), key=lambda piece: -piece[1]):
        free = (number for number in range(servers) if key.name not in held[number])
        server = min(free, key=lambda number: (loads[number], number))
        loads[server] += size
        held[server][key.name] = key
    return [[each[name] for name in sizes if name in each] for each in held]


def _pieces(sizes: Mapping[str, Size], servers: int) -> list[tuple[Key, float]]:
    """Every key with its bytes."""
    fair = sum(size.bytes for size in sizes.values()) / servers
    found: list[tuple[Key, float]] = []
    for name, size in sizes.items():
        parts = min(servers, size.rows) if size.bytes > fair else 1
        if parts == 1:
            found.append((Key(name), size.bytes))
        else:
            runs = [share(size.rows, parts, number) for number in range(parts)]
            row = size.bytes / size.rows
            found += [(Key(name, (run.start, run.stop)), row * len(run)) for run in runs]
    return found
