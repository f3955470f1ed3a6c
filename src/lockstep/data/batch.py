"""The micro-batches that one rank computes in a step, and helpers for nested data such as collate functions return."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lockstep.core.plan import Indices, StepPlan
from lockstep.errors import ConfigError

DeviceTransform = Callable[[Tensor], Tensor]
"""Changes a whole input on the device, before the model, as a data set asks for."""


def map_leaves(data: Any, change: Callable[[Any], Any]) -> Any:
    """The same data with each leaf changed; a leaf is anything but a list, a mapping or a tuple.

    A ``PackedSequence`` is a leaf.
    """
    if isinstance(data, dict):
        return {name: map_leaves(value, change) for name, value in data.items()}
    if isinstance(data, Mapping):
        entries = {name: map_leaves(value, change) for name, value in data.items()}
        if not isinstance(data, MutableMapping):
            return entries
        changed = copy.copy(data)  # a BatchEncoding of transformers has attributes and methods of its own
        changed.update(entries)
        return changed
    if isinstance(data, list):
        return [map_leaves(value, change) for value in data]
    if isinstance(data, tuple) and not hasattr(data, "pin_memory"):
        values = [map_leaves(value, change) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else tuple(values)
    return change(data)


def tensors_in(data: Any) -> list[Tensor]:
    """The tensors in nested data, in order."""
    return [leaf for leaf in tree_leaves(data) if isinstance(leaf, Tensor)]


def pinned(data: Any) -> Any:
    """The same tensors in page-locked memory, in tuples, lists and dicts of any depth; others stay where they are."""
    return map_leaves(data, _pinned)


def _pinned(value: Any) -> Any:
    if isinstance(value, Tensor) and (value.device.type != "cpu" or value.layout is not torch.strided):
        return value
    return value.pin_memory() if hasattr(value, "pin_memory") else value


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one micro-batch, collated."""

    k: int
    """Position among the micro-batches of the step, or of the whole set where it is evaluated. One that is not below
    their number is a spare (see ``lockstep.core.plan.Share.rounds``)."""
    indices: Indices
    """The samples' numbers in the data set, in the order of the rows of ``data``."""
    data: Any
    """The pair ``(input, target)``, or the dict, of tensors on the CPU."""

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True)
class Batch:
    """One step of one rank. A rank that has no micro-batch in a ragged step still gets its ``Batch``."""

    plan: StepPlan
    """The whole step, the same on every rank."""
    micro_batches: tuple[MicroBatch, ...]
    """This rank's micro-batches, in order of ``k``."""
    apart: Sequence[Any] = ()
    """In a first step: the data of some of its samples, collated together, and then of each alone."""

    def __len__(self) -> int:
        """Samples of the whole step, over all processes: the weight of its loss in an average over steps."""
        return self.plan.samples

    def __iter__(self) -> Iterator[Any]:
        raise ConfigError(f"A batch cannot be unpacked into inputs and targets. {_IN_PARTS}")

    def __getitem__(self, key: Any) -> Any:
        raise ConfigError(f"A batch has no entry {key!r}. {_IN_PARTS}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"A batch has no attribute {name!r}. {_IN_PARTS}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses to be an input, as in ``model(batch)``."""
        name = getattr(func, "__name__", "a function of torch")
        raise ConfigError(f"A batch was given to {name}, which takes tensors. {_IN_PARTS}")


_IN_PARTS = (
    "It is one step of all ranks, in micro-batches that run.backward moves to the device and computes one by one: "
    "run.backward(batch, loss), where the loss is a function of (output, target). If the model needs more than its "
    "input, add forward=lambda data: model(data['a'], data['b']). The data of this rank: "
    "[part.data for part in batch.micro_batches]."
)
