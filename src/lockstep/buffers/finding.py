"""Which buffers of a model a forward pass changes, and where its modules hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lockstep.errors import ConfigError

_COUNTING = (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)
"""Forward passes that advance ``num_batches_tracked`` whenever they change the statistics."""


@dataclass(frozen=True, eq=False)
class Place:
    """A buffer, and the module's dictionary that holds it."""

    name: str
    buffer: Tensor
    holder: dict[str, Tensor | None]
    key: str


@dataclass(frozen=True, eq=False)
class Group:
    """Buffers that are used together, and what tells whether they were."""

    places: list[Place]
    counter: Place | None = None
    """A counter that advances exactly when they change; otherwise their values are compared."""

    @property
    def numel(self) -> int:
        """How many values they have together."""
        return sum(place.buffer.numel() for place in self.places)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a model computes statistics over the rows of a micro-batch, which needs at least two of them."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def find(model: nn.Module, declared: Sequence[str]) -> tuple[list[Group], list[Place]]:
    """The groups of buffers that are averaged, and the integer counters.

    Raises:
        ConfigError: a pattern of ``declared`` matches nothing, or the types of the buffers differ.
    """
    groups: list[Group] = []
    counters: list[Place] = []
    buffers = {place.name: place for place in _buffers(model)}
    for prefix, module in model.named_modules():
        path = f"{prefix}." if prefix else ""
        keys = ("running_mean", "running_var", "num_batches_tracked")
        mean, variance, counter = (buffers.get(path + key) for key in keys)
        if isinstance(module, _NormBase) and mean is not None and variance is not None:
            counters += [counter] if counter is not None else []
            groups.append(Group([mean, variance], counter if type(module).forward in _COUNTING else None))
    found = names(groups, counters)
    for pattern in declared:
        matched = [name for name in buffers if fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigError(f"running_buffers names {pattern!r}, which no buffer of the model matches.")
        groups += [Group([buffers[name]]) for name in matched if name not in found]
        found.update(matched)
    averaged = [place for group in groups for place in group.places]
    wide = torch.float64 if averaged and averaged[0].buffer.dtype == torch.float64 else torch.float32
    for place in averaged:
        if place.buffer.dtype != wide:
            raise ConfigError(
                f"The running buffer {place.name!r} is {place.buffer.dtype}; running buffers can be averaged if all "
                "are float32, or all float64."
            )
    return groups, counters


def names(groups: Sequence[Group], counters: Sequence[Place]) -> set[str]:
    """The names of what ``find`` gave."""
    return {place.name for group in groups for place in group.places} | {place.name for place in counters}


def _buffers(model: nn.Module) -> Iterator[Place]:
    """Every buffer once, under its first name, as ``named_buffers`` has it."""
    seen: set[Tensor] = set()
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer not in seen:
                seen.add(buffer)
                yield Place(f"{prefix}.{key}" if prefix else key, buffer, module._buffers, key)
