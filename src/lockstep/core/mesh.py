"""The layout of ranks when training is parallel in more than one way: a pure function of the sizes.

    data=2,pipeline=3 over 6 ranks          pipeline ->
                                     data   0  1  2
                                      |     3  4  5

The axis named last runs fastest, so its ranks are neighbours: put the one that talks most there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

from lockstep.errors import ConfigError, nearest

AXES = ("data", "fsdp", "pipeline", "tensor", "layers")
OF_DEVICES = ("layers",)
"""Axes over the devices of one process: they take no ranks."""
HYBRIDS = (("data", "layers"), ("data", "pipeline"), ("data", "tensor"), ("fsdp", "pipeline"))
"""The axes that go together, in any order."""


@dataclass(frozen=True)
class Mesh:
    """Named axes, the outermost first, and their sizes."""

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def single(cls, axis: str, size: int) -> Mesh:
        """All ranks along one axis."""
        return cls(((axis, size),))

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Reads ``data=2,pipeline=2``; ``ConfigError`` says what is wrong with any other text."""
        if not isinstance(text, str):
            raise ConfigError(f"mesh is {text!r}; write its axes as text, for example mesh='data=2,pipeline=2'.")
        axes: list[tuple[str, int]] = []
        for part in text.split(","):
            name, _, size = (word.strip() for word in part.partition("="))
            if name not in AXES:
                raise ConfigError(f"mesh {text!r} names the axis {name!r}.{nearest(name, AXES)}")
            if not size.isdecimal() or int(size) < 1:
                raise ConfigError(
                    f"mesh {text!r} gives the axis {name!r} the size {size!r}; write for example {name}=2."
                )
            if name in dict(axes):
                raise ConfigError(f"mesh {text!r} names the axis {name!r} twice.")
            axes.append((name, int(size)))
        return cls(tuple(axes))

    @property
    def ranks(self) -> int:
        """Ranks that the mesh takes."""
        return prod(size for _, size in self._of_ranks)

    def size(self, axis: str) -> int:
        """The size of an axis; 1 for one that the mesh does not have."""
        return dict(self.axes).get(axis, 1)

    def check_world(self, world_size: int) -> None:
        """Raises ``ConfigError`` naming the factors that fit where the mesh does not take exactly this many ranks."""
        if self.ranks != world_size:
            names = [name for name, _ in self._of_ranks]
            fitting = [
                ",".join(f"{name}={size}" for name, size in zip(names, sizes))
                for sizes in _factors(world_size, len(names))
            ]
            raise ConfigError(
                f"The mesh {self} takes {self.ranks} processes and {world_size} were started. Start {self.ranks}, or "
                f"use one of: {'; '.join(fitting)}."
            )

    def coordinate(self, axis: str, rank: int) -> int:
        """The coordinate of a rank along an axis; 0 on one that the mesh does not have."""
        return self._coordinates(rank).get(axis, 0)

    def ranks_along(self, axis: str, rank: int) -> list[int]:
        """The ranks that differ from ``rank`` along this axis only, in order, itself among them."""
        mine = self._coordinates(rank)
        return [self._rank({**mine, axis: place}) for place in range(self.size(axis))]

    def lines(self, axis: str) -> list[list[int]]:
        """All lines of ranks along an axis, each in order; every rank is in one of them."""
        first = [rank for rank in range(self.ranks) if self.coordinate(axis, rank) == 0]
        return [self.ranks_along(axis, rank) for rank in first]

    @property
    def _of_ranks(self) -> list[tuple[str, int]]:
        return [(name, size) for name, size in self.axes if name not in OF_DEVICES]

    def _coordinates(self, rank: int) -> dict[str, int]:
        found = {}
        for name, size in reversed(self._of_ranks):
            rank, found[name] = divmod(rank, size)
        return found

    def _rank(self, coordinates: dict[str, int]) -> int:
        rank = 0
        for name, size in self._of_ranks:
            rank = rank * size + coordinates[name]
        return rank

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)


def hybrid_mesh(text: str) -> Mesh:
    """Reads the mesh of strategy ``hybrid``; ``ConfigError`` where its axes do not go together."""
    mesh = Mesh.parse(text)
    axes = [name for name, _ in mesh.axes]
    if set(axes) in map(set, HYBRIDS):
        return mesh
    known = "; ".join(",".join(f"{name}=N" for name in each) for each in HYBRIDS)
    alone = "ddp" if axes == ["data"] else axes[0]
    other = f", or strategy {alone!r} without a mesh" if len(axes) == 1 else ""
    raise ConfigError(f"strategy 'hybrid' cannot lay out the mesh {mesh}. Use one like {known}{other}.")


def _factors(number: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to write a number as a product of ``parts`` factors, in order."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return [choice for choice in product(divisors, repeat=parts) if prod(choice) == number]
