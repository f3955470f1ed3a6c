"""Layers of which a rank holds a part, made in place as a plan says, and the sums of their activations.

    x (whole) -> enter -> column: some of the outputs -> activation -> row: from some of the inputs -> sum -> y (whole)

A layer gets another class and keeps its name, its hooks and its position in the model. A sum has the same bits on
every rank that shares the layer:

    all_to_all of pieces -> add the ranks' pieces in the tree's order -> all_gather

The backend only moves bytes, so the sum depends on the number of ranks alone, and what comes after it on every rank is
computed from equal bits: replicated parameters cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.checkpoint.state import tensor_state
from lockstep.core.summation_tree import fold_rows
from lockstep.distributed.collectives import all_gather_flat, all_gather_rows
from lockstep.errors import ConfigError
from lockstep.models.transformer import SelfAttention
from lockstep.numerics.hooks import first_hooked, hooked_globally

_HALVES = (torch.bfloat16, torch.float16)


class Exchange:
    """The ranks of one line of the axis ``tensor``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.bytes_sent = 0
        """Bytes of activations and their gradients this rank has given to others."""

    def enter(self, x: Tensor) -> Tensor:
        """``x`` itself, where a split layer begins; in backward, its gradient is summed. Collective in backward."""
        entered: Tensor = _Enter.apply(x, self)  # type: ignore[no-untyped-call]  # torch's stub
        return entered

    def leave(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, where a split layer ends. Collective in forward."""
        left: Tensor = _Leave.apply(x, self)  # type: ignore[no-untyped-call]  # torch's stub
        return left

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, of equal bits on each; half precision is added in float32. Collective."""
        flat = x.contiguous().view(-1)
        piece = -(-flat.numel() // self.ranks)
        given = flat.new_zeros(self.ranks * piece)
        given[: flat.numel()] = flat
        received = torch.empty_like(given)
        dist.all_to_all_single(received, given, group=self.group)
        rows = received.view(self.ranks, piece)
        mine = fold_rows(rows.float() if rows.dtype in _HALVES else rows).to(x.dtype)
        all_gather_flat(given, mine.contiguous(), self.group)
        self.bytes_sent += 2 * (self.ranks - 1) * piece * x.element_size()
        return given[: flat.numel()].view(x.shape)


class _Enter(torch.autograd.Function):
    """What a split layer takes; its derivative is ``_Leave``, and that one's is this: both may be taken twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Leave.apply(gradient, ctx.exchange), None  # type: ignore[no-untyped-call]  # torch's stub


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.sum(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Enter.apply(gradient, ctx.exchange), None  # type: ignore[no-untyped-call]  # torch's stub


@dataclass(frozen=True)
class ShardSpec:
    """A tensor split into equal parts along one dim.

    The queries, keys and values of attention lie one after the other in one dim; a rank holds its part of each:

        blocks=3, 2 ranks     q q q q k k k k v v v v     rank 0:  q q k k v v     rank 1:  q q k k v v
    """

    dim: int
    ranks: int
    rank: int
    blocks: int = 1
    """Equal pieces of the dim, each of which is split."""

    def local_shard(self, whole: Tensor) -> Tensor:
        """This rank's part, as a tensor of its own."""
        shape = whole.shape
        pieces = whole.reshape(*shape[: self.dim], self.blocks, self.ranks, -1, *shape[self.dim + 1 :])
        mine = pieces.select(self.dim + 1, self.rank)
        return mine.flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def join(self, parts: Tensor) -> Tensor:
        """The whole from all parts, shape (ranks, *shape of a part)."""
        shape = parts.shape
        pieces = parts.reshape(*shape[: self.dim + 1], self.blocks, -1, *shape[self.dim + 2 :])
        return pieces.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2)

    def gather(self, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The whole on every rank. Collective."""
        return self.join(all_gather_rows(part.flatten(), group).view(self.ranks, *part.shape))


if TYPE_CHECKING:
    _Layer = nn.Linear
else:
    _Layer = object


class _Column(_Layer):
    """Computes some of the outputs from the whole input."""

    exchange: Exchange

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        return super().forward(self.exchange.enter(input))


class _Row(_Layer):
    """Computes the whole output from some of the inputs, together with the other ranks."""

    exchange: Exchange

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        convolve = getattr(self, "_conv_forward", None)
        # An image may come without its batch: channels are counted from the end.
        dim = 1 - self.weight.dim() if convolve is not None else -1
        if input.shape[dim] != self.weight.shape[1]:
            raise ConfigError(
                f"tensor.plan splits the inputs of a layer over {self.exchange.ranks} ranks, "
                f"{self.weight.shape[1]} for each, and it was given {input.shape[dim]}. "
                "Split the layer before it with 'column'."
            )
        if convolve is not None:
            total = self.exchange.leave(convolve(input, self.weight, None))
        else:
            total = self.exchange.leave(F.linear(input, self.weight))
        if self.bias is None:
            return total
        bias = self.bias.to(total.dtype)
        return total + (bias.view(-1, *[1] * (self.weight.dim() - 2)) if convolve is not None else bias)


class _Part(nn.modules.dropout._DropoutNd):
    """Draws the mask of the whole activation, as one device does, and applies this rank's part of it."""

    exchange: Exchange
    split_dim: int
    """The dim of the activation that is split: -1 for features, 1 for channels."""

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        if not self.training or self.p == 0:
            return input
        shape = list(input.shape)
        shape[self.split_dim] *= self.exchange.ranks
        ones = torch.ones(shape, dtype=input.dtype, device=input.device)
        if input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last):
            ones = ones.contiguous(memory_format=torch.channels_last)
        # A draw depends on the shape alone, so this is the mask of the whole, with 1 / (1 - p) where it keeps.
        mask: Tensor = super().forward(ones)
        return input * mask.chunk(self.exchange.ranks, self.split_dim)[self.exchange.rank]


def _kinds(split: type, layers: Iterable[type[nn.Module]]) -> dict[type[nn.Module], type[nn.Module]]:
    """A class for each class of layers, which computes as ``split`` does: ``ColumnLinear`` for ``Linear``."""
    return {layer: type(f"{split.__name__[1:]}{layer.__name__}", (split, layer), {}) for layer in layers}


_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
COLUMNS, ROWS = _kinds(_Column, _LAYERS), _kinds(_Row, _LAYERS)
DROPOUTS = _kinds(_Part, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d))
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Splitter:
    """Splits modules over the ranks of an exchange."""

    def __init__(self, model: nn.Module, exchange: Exchange) -> None:
        self._model, self._exchange = model, exchange
        self._shards: dict[int, tuple[Tensor, ShardSpec]] = {}
        first = {p: name for name, p in model.named_parameters()}
        self._tied = {p for name, p in model.named_parameters(remove_duplicate=False) if first[p] != name}

    def split(self, plan: Mapping[str, str]) -> dict[str, ShardSpec]:
        """Splits every module of the plan. Gives the cut of each split entry of the model's state, by name.

        Raises:
            ConfigError: a module cannot be split in this way, or not over so many ranks.
        """
        modules = {name: self._model.get_submodule(name) for name in plan}
        refuse_hooks(modules)
        sizes = {name: _extent(name, modules[name], kind) for name, kind in plan.items()}
        self._check_sizes({name: size for name, size in sizes.items() if size})
        for name, kind in plan.items():
            self._name = name
            _KINDS[kind](self, modules[name])
        entries = tensor_state(self._model).items()
        return {name: self._shards[id(value)][1] for name, value in entries if id(value) in self._shards}

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        ranks = self._exchange.ranks
        wrong = next((name for name, size in sizes.items() if size % ranks), None)
        if wrong is None:
            return
        common = reduce(gcd, sizes.values())
        working = [number for number in range(2, common + 1) if common % number == 0]
        advice = (
            f"Use {' or '.join(map(str, working[:8]))} ranks"
            if working
            else "No number of ranks divides all layers: leave some out with tensor.plan"
        )
        raise ConfigError(
            f"Strategy 'tensor' cannot split the {sizes[wrong]} heads, features or channels of {wrong!r} over {ranks} "
            f"ranks. {advice}, or use strategy 'fsdp' or 'ddp'."
        )

    def column(self, module: nn.Module, blocks: int = 1) -> None:
        """Keeps some of the outputs of a Linear or a convolution."""
        self._become(module, COLUMNS)
        self._keep(module, "weight", 0, blocks)
        self._keep(module, "bias", 0, blocks)
        self._shrink(module, "out_features", "out_channels")

    def row(self, module: nn.Module) -> None:
        """Keeps some of the inputs of a Linear or a convolution; the bias stays whole."""
        self._become(module, ROWS)
        self._keep(module, "weight", 1)
        self._shrink(module, "in_features", "in_channels")

    def heads(self, module: nn.Module) -> None:
        """Keeps some of the heads of the built-in attention."""
        assert isinstance(module, SelfAttention)
        self.column(module.inputs, blocks=3)
        self.row(module.output)
        module.heads //= self._exchange.ranks

    def channels(self, module: nn.Module, dim: int = 1) -> None:
        """Keeps some of the channels of a BatchNorm; of a dropout, the part of the mask."""
        if type(module) in DROPOUTS:
            self._become(module, DROPOUTS)
            module.split_dim = dim  # type: ignore[assignment]  # an attribute of PartDropout
            return
        for name in ("weight", "bias", "running_mean", "running_var"):
            self._keep(module, name, 0)
        self._shrink(module, "num_features")

    def features(self, module: nn.Module) -> None:
        """As ``channels``, where the activation is split along its last dim."""
        self.channels(module, dim=-1)

    def _become(self, module: nn.Module, kinds: Mapping[type[nn.Module], type[nn.Module]]) -> None:
        module.__class__ = kinds[type(module)]
        module.exchange = self._exchange  # type: ignore[assignment]  # an attribute of the split classes

    def _keep(self, module: nn.Module, key: str, dim: int, blocks: int = 1) -> None:
        whole = getattr(module, key)
        if whole is None:
            return
        if whole in self._tied:
            raise ConfigError(
                f"Strategy 'tensor' cannot split {self._name!r}, whose {key} is tied to another layer. Untie it, or "
                "name the layers to be split in tensor.plan, such as ['*.fc1=column', '*.fc2=row'], but not this one."
            )
        shard = ShardSpec(dim, self._exchange.ranks, self._exchange.rank, blocks)
        part = shard.local_shard(whole.detach())
        if isinstance(whole, nn.Parameter):
            part = nn.Parameter(part, requires_grad=whole.requires_grad)
        setattr(module, key, part)
        self._shards[id(part)] = part, shard

    def _shrink(self, module: nn.Module, *names: str) -> None:
        for name in names:
            if hasattr(module, name):
                setattr(module, name, getattr(module, name) // self._exchange.ranks)


def refuse_hooks(modules: Mapping[str, nn.Module]) -> None:
    """Raises ``ConfigError`` for a hook of the user on a split module, which would see one rank's part."""
    if hooked_globally():
        raise ConfigError(
            "Hooks are registered for all modules (torch.nn.modules.module.register_module_forward_hook or one like "
            "it), and strategy 'tensor' splits some, so the hooks would see the part of one rank. Register them on the "
            "modules that they are for, or use strategy 'fsdp' or 'ddp'."
        )
    for prefix, module in modules.items():
        hooked = first_hooked(module)
        if hooked is not None:
            name = prefix if hooked == "the model" else f"{prefix}.{hooked}"
            raise ConfigError(
                f"{name!r} has a hook, and strategy 'tensor' splits that layer, so the hook would see the part of one "
                "rank. Leave the layer whole with tensor.plan, such as ['*.fc1=column', '*.fc2=row'], take the hook "
                "away, or use strategy 'fsdp' or 'ddp'."
            )


def _extent(name: str, module: nn.Module, kind: str) -> int:
    """Returns the number of heads, features or channels to split; 0 where another module's decide."""
    if kind == "heads" and type(module) is SelfAttention:
        return module.heads
    layer = type(module) in COLUMNS and getattr(module, "groups", 1) == 1
    if kind == "column" and layer:
        return int(module.weight.shape[0])  # type: ignore[index]  # a Linear or a convolution
    if kind == "row" and layer:
        return int(module.weight.shape[1])  # type: ignore[index]  # a Linear or a convolution
    if kind in ("channels", "features") and type(module) in NORMS:
        return int(module.num_features)  # type: ignore[arg-type]  # a BatchNorm
    if kind in ("channels", "features") and type(module) in DROPOUTS:
        return 0
    takes = {"heads": "the built-in SelfAttention", "channels": "BatchNorm and dropout"}
    takes |= dict.fromkeys(("column", "row"), "Linear and Conv layers without groups")
    raise ConfigError(
        f"tensor.plan gives {name or 'the model'!r}, a {type(module).__name__}, the kind {kind!r}, which is for "
        f"{takes.get(kind, takes['channels'])}. Leave it out of the plan."
    )


_KINDS: dict[str, Callable[[Splitter, nn.Module], None]] = {
    "column": Splitter.column,
    "row": Splitter.row,
    "heads": Splitter.heads,
    "channels": Splitter.channels,
    "features": Splitter.features,
}
