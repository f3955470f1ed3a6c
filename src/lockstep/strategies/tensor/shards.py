"""An activation as separate shards, from the layer that splits it to the layer that sums it up.

Any operator of torch runs on one shard after the other, so it sees the shape of a shard on every number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lockstep.errors import ConfigError


class ShardedActivation(Tensor):
    """Several shards that code between split layers takes for one tensor, of the shape of a shard."""

    shards: Sequence[Tensor]

    def __new__(cls: type[ShardedActivation], shards: Sequence[Tensor]) -> ShardedActivation:
        """Holds the shards, which have one shape and type."""
        first = shards[0]
        made: ShardedActivation = Tensor._make_wrapper_subclass(
            cls, first.shape, dtype=first.dtype, device=first.device
        )
        made.shards = tuple(shards)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch on each shard, and holds what it gives."""
        leaves, spec = tree_flatten((args, kwargs or {}))
        given = next(leaf.shards for leaf in leaves if isinstance(leaf, cls))
        if given[0].requires_grad and not torch.is_grad_enabled():
            raise _no_function_of_torch(func)  # a torch.autograd.Function would lose the gradient
        results = []
        for number in range(len(given)):
            own = [leaf.shards[number] if isinstance(leaf, cls) else leaf for leaf in leaves]
            positional, named = tree_unflatten(own, spec)
            results.append(tree_flatten(func(*positional, **named)))
        columns = zip(*(values for values, _ in results))
        return tree_unflatten([_joined(func, column) for column in columns], results[0][1])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's stub
        """Refuses what reaches for the tensor itself."""
        raise _no_function_of_torch(func)


def join_shards(shards: Sequence[Tensor]) -> Tensor:
    """An activation of these shards; a single one is what it is."""
    return shards[0] if len(shards) == 1 else ShardedActivation(shards)


def split_shards(activation: Tensor) -> Sequence[Tensor]:
    """The shards of an activation."""
    return activation.shards if isinstance(activation, ShardedActivation) else [activation]


def _no_function_of_torch(func: Any) -> ConfigError:
    return ConfigError(
        f"{getattr(func, '__name__', func)} was given an activation that strategy 'tensor' has split, within a "
        "torch.autograd.Function, under torch.no_grad(), or in another way that it cannot run on each shard. Leave the "
        "layers around it whole with tensor.plan."
    )


def _joined(func: Any, column: Sequence[Any]) -> Any:
    if isinstance(column[0], Tensor):
        return ShardedActivation(column)
    if any(value != column[0] for value in column):
        name = getattr(func, "__name__", str(func))
        raise ConfigError(
            f"{name} was called on an activation that strategy 'tensor' has split, and gives another value for each "
            "shard. Leave the layers around it whole with tensor.plan."
        )
    return column[0]
