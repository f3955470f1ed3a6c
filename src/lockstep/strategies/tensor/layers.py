"""Layers of which a rank holds some shards, made in place as a plan says, and the sums of their activations.

    x (whole) -> enter -> column: some of the outputs -> activation -> row: from some of the inputs -> sum -> y (whole)

A layer gets another class and keeps its name, its hooks and its position in the model. It is split into P shards, of
which each rank holds as many consecutive ones. Every operator between the two layers runs on one shard at a time, so
nothing but the sum depends on how many shards a rank has; and a sum over shards is one tree over all P:

    add this rank's nodes -> all_to_all of pieces -> add the ranks' nodes in the tree's order -> all_gather

The backend only moves bytes, so the sum depends only on P, and what comes after it on every rank is
computed from equal bits: replicated parameters cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from lockstep.checkpoint.state import tensor_state
from lockstep.core.summation_tree import Node, TreeStack, fold, nodes_within
from lockstep.distributed.rank_exchange import RankExchange
from lockstep.errors import ConfigError
from lockstep.models.transformer import SelfAttention
from lockstep.numerics.hooks import first_hooked, hooked_globally
from lockstep.strategies.absent import Absence, AbsentParameter

_HALVES = (torch.bfloat16, torch.float16)


class Exchange:
    """The ranks of one line of the axis ``tensor``, and the shards of a layer that each of them holds.

    Args:
        between: exchanges of the ranks; None for one.
        shards: P, a multiple of their number.
    """

    def __init__(self, between: RankExchange | None, shards: int) -> None:
        self.between, self.shards = between, shards
        self.ranks = 1 if between is None else between.ranks
        self.rank = 0 if between is None else between.rank
        self.held = shards // self.ranks
        """Shards of this rank."""
        self.first = self.rank * self.held
        """Number of the first of them."""
        self._nodes = [nodes_within(rank * self.held, (rank + 1) * self.held, shards) for rank in range(self.ranks)]
        self.bytes_sent = 0
        """Bytes of activations and their gradients this rank has given to others."""
        self.begin: Callable[[], None] = lambda: None
        """Called before each sum."""

    def enter(self, x: Tensor) -> Sequence[Tensor]:
        """``x`` itself for each shard of this rank, where a split layer begins; its gradient is their sum.

        Collective in backward.

        Raises:
            ConfigError: within a transform of torch.func, which cannot look into the exchange.
        """
        if torch._C._are_functorch_transforms_active():
            raise ConfigError(
                "The forward pass calls a layer within torch.func.vmap, grad, vjp, jvp or jacrev, and strategy "
                "'tensor' splits that layer and exchanges its activations, which torch cannot transform. Leave the "
                "layer whole with tensor.plan, such as ['*.fc1=column', '*.fc2=row'], or use strategy 'ddp'."
            )
        entered: Sequence[Tensor] = _Enter.apply(self, x)  # type: ignore[no-untyped-call]  # torch's stub
        return entered

    def leave(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over all shards, given this rank's, where a split layer ends. Collective in forward."""
        left: Tensor = _Leave.apply(self, *parts)  # type: ignore[no-untyped-call]  # torch's stub
        return left

    def gather(self, values: Tensor) -> Tensor:
        """The values of all ranks, one after the other (dim 0). Collective."""
        if self.between is None:
            return values
        return self.between.all_gather(values.flatten()).view(-1, *values.shape[1:])

    def largest(self, values: Tensor) -> Tensor:
        """The largest of each value over the ranks. Collective."""
        return values if self.between is None else self.gather(values.unsqueeze(0)).amax(0)

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over all shards, of equal bits on each rank; half precision is added in float32. Collective."""
        first = parts[0]
        wide = torch.float32 if first.dtype in _HALVES else first.dtype
        stack = TreeStack[Tensor](self.shards, torch.add)
        for number, part in enumerate(parts, self.first):
            stack.push_leaf(number, part.to(wide))
        own = stack.take()
        if self.between is None:
            return own[Node(0, self.shards)].to(first.dtype).contiguous()  # as it is after an exchange
        return self._sum_over_ranks(list(own.values()), first, self.between)

    def _sum_over_ranks(self, own: Sequence[Tensor], like: Tensor, between: RankExchange) -> Tensor:
        """The sum from this rank's nodes of the tree; all ranks give as many rows as the one with most nodes."""
        self.begin()
        sent = own[0].dtype if self.held > 1 else like.dtype  # a shard is given as it is
        most = max(map(len, self._nodes))
        piece = -(-like.numel() // self.ranks)
        given = torch.zeros(self.ranks, most, piece, dtype=sent, device=like.device)
        for row, node in enumerate(own):
            flat = node.contiguous().view(-1).to(sent)
            for rank, part in enumerate(torch.split(flat, piece)):
                given[rank, row, : part.numel()] = part
        received = between.all_to_all(given.view(self.ranks, -1)).view_as(given)
        mine = fold(self._in_order(received.to(own[0].dtype)), self.shards, torch.add).to(like.dtype)
        whole = between.all_gather(mine).view(-1)
        self.bytes_sent += (self.ranks - 1) * given[0].nbytes + between.copies * mine.nbytes
        return whole[: like.numel()].view(like.shape)

    def _in_order(self, rows: Tensor) -> Iterator[tuple[Node, Tensor]]:
        """Each node with its row, from those of all ranks."""
        for nodes, of_rank in zip(self._nodes, rows):
            yield from zip(nodes, of_rank)


class _Enter(torch.autograd.Function):
    """The input of a split layer; its derivative is ``_Leave``, and that one's is this: both may be taken twice."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, x: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(x.view_as(x) for _ in range(exchange.held))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, _Leave.apply(ctx.exchange, *gradients)  # type: ignore[no-untyped-call]  # torch's stub


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *parts: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.sum(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_Enter.apply(ctx.exchange, gradient)  # type: ignore[no-untyped-call]  # torch's stub


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

    def gather(self, part: Tensor, exchange: Exchange) -> Tensor:
        """The whole on every rank. Collective."""
        return self.join(exchange.gather(part.unsqueeze(0)))


if TYPE_CHECKING:
    _Layer = nn.Linear
else:
    _Layer = object


class _Split:
    """A layer of which this rank holds some shards."""

    exchange: Exchange
    parts: dict[str, nn.Parameter]
    """The part of each parameter on this rank, by its name in the layer."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be copied or pickled."""
        raise ConfigError(
            "The model was copied or pickled, and under strategy 'tensor' each rank has a part of some layers. Copy it "
            "before run.prepare, write the weights with run.save(), or use strategy 'ddp'."
        )


class _Column(_Split, _Layer):
    """Computes some of the outputs from the whole input."""

    blocks: int
    """Equal pieces of the outputs, each of which is split."""

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        held = self.exchange.held
        weights = shards_of(self.parts["weight"], 0, held, self.blocks)
        bias = self.parts.get("bias")
        biases = [None] * held if bias is None else shards_of(bias, 0, held, self.blocks)
        return join_shards([_apply(self, *each) for each in zip(self.exchange.enter(input), weights, biases)])


class _Row(_Split, _Layer):
    """Computes the whole output from some of the inputs, together with the other ranks."""

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        parts, held, weight = split_shards(input), self.exchange.held, self.parts["weight"]
        is_convolution = hasattr(self, "_conv_forward")
        # An image may come without its batch: channels are counted from the end.
        dim = 1 - weight.dim() if is_convolution else -1
        expected = weight.shape[1] // held
        if len(parts) != held or parts[0].shape[dim] != expected:
            raise ConfigError(
                f"tensor.plan splits the inputs of a layer over {self.exchange.shards} shards, {expected} for each, "
                f"and it was given {parts[0].shape[dim]}. Split the layer before it with 'column'."
            )
        weights = shards_of(weight, 1, held)
        total = self.exchange.leave([_apply(self, *each, None) for each in zip(parts, weights)])
        if self.bias is None:
            return total
        bias = self.bias.to(total.dtype)
        return total + (bias.view(-1, *[1] * (weight.dim() - 2)) if is_convolution else bias)


class _Channels(_Split, nn.modules.batchnorm._BatchNorm):
    """Normalises the channels of each shard."""

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        held, parts = self.exchange.held, split_shards(input)
        self._check_input_dim(parts[0])  # type: ignore[no-untyped-call]  # torch's
        factor = 0.0 if self.momentum is None else self.momentum
        tracks = self.training and self.track_running_stats
        if tracks and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        used = not self.training or self.track_running_stats
        statistics = (self.running_mean, self.running_var) if used else (None, None)
        tensors = (*statistics, self.parts.get("weight"), self.parts.get("bias"))
        columns = [[None] * held if each is None else each.chunk(held) for each in tensors]
        normalised = []
        for part, mean, variance, weight, bias in zip(parts, *columns, strict=True):
            normalised.append(F.batch_norm(part, mean, variance, weight, bias, by_batch, factor, self.eps))
        return join_shards(normalised)


class _Part(_Split, nn.modules.dropout._DropoutNd):
    """Draws the mask of the whole activation, as one device does, and applies this rank's part of it."""

    split_dim: int
    """The dim of the activation that is split: -1 for features, 1 for channels."""

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        if not self.training or self.p == 0:
            return input
        parts, exchange = split_shards(input), self.exchange
        first = parts[0]
        shape = list(first.shape)
        shape[self.split_dim] *= exchange.shards
        ones = torch.ones(shape, dtype=first.dtype, device=first.device)
        if first.dim() == 4 and first.is_contiguous(memory_format=torch.channels_last):
            ones = ones.contiguous(memory_format=torch.channels_last)
        # A draw depends only on the shape, so this is the mask of the whole, with 1 / (1 - p) where it keeps.
        mask: Tensor = super().forward(ones)
        masks = mask.chunk(exchange.shards, self.split_dim)[exchange.first : exchange.first + exchange.held]
        return join_shards([part * own for part, own in zip(parts, masks, strict=True)])


def _apply(layer: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The output of a Linear or a convolution with these weights."""
    convolve = getattr(layer, "_conv_forward", None)
    result: Tensor = F.linear(x, weight, bias) if convolve is None else convolve(x, weight, bias)
    return result


def shards_of(part: Tensor, dim: int, held: int, blocks: int = 1) -> Sequence[Tensor]:
    """The shards of a rank's part of a weight, each in memory of its own where the part has several.

    Kernels may add in another order where a matrix begins elsewhere in memory, or lies within a wider one. None is the
    parameter itself, of which autocast keeps one copy: the gradients of several calls would be added in its precision.
    """
    if held == 1:
        return [part.view_as(part)]
    shape = part.shape
    pieces = part.reshape(*shape[:dim], blocks, held, -1, *shape[dim + 1 :])
    of_shards = (piece.flatten(dim, dim + 1) for piece in pieces.unbind(dim + 1))
    return [shard.clone(memory_format=torch.contiguous_format) for shard in of_shards]


def _kinds(split: type, layers: Iterable[type[nn.Module]]) -> dict[type[nn.Module], type[nn.Module]]:
    """By class of layers, a class that computes as ``split`` does, such as ``ColumnLinear`` for ``Linear``."""
    return {layer: type(f"{split.__name__[1:]}{layer.__name__}", (split, layer), {}) for layer in layers}


_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
COLUMNS, ROWS = _kinds(_Column, _LAYERS), _kinds(_Row, _LAYERS)
DROPOUTS = _kinds(_Part, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d))
NORMS = _kinds(_Channels, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))


class Splitter:
    """Splits modules over the ranks of an exchange.

    A split layer computes with its part of a parameter. The whole one stays the user's object, without memory: an
    ``AbsentParameter``.
    """

    def __init__(self, model: nn.Module, exchange: Exchange, device: torch.device, absence: Absence) -> None:
        self._model, self._exchange, self._device, self._absence = model, exchange, device, absence
        self._shards: dict[int, tuple[Tensor, ShardSpec]] = {}
        self._wholes: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._names = first = {p: name for name, p in model.named_parameters()}
        every = nn.Module.named_parameters(model, remove_duplicate=False)
        self._tied = {p for name, p in every if first.get(p) != name}

    def split(self, plan: Mapping[str, str]) -> dict[str, ShardSpec]:
        """Splits every module of the plan, and moves the model to the device.

        Gives the cut of each split entry of the model's state, by name.

        Raises:
            ConfigError: a module cannot be split in this way, or not over this number of ranks.
        """
        modules = {name: self._model.get_submodule(name) for name in plan}
        refuse_hooks(modules)
        sizes = {name: _extent(name, modules[name], kind) for name, kind in plan.items()}
        self._check_sizes({name: size for name, size in sizes.items() if size})
        for name, kind in plan.items():
            self._name = name
            _KINDS[kind](self, modules[name])
        for module, key, _ in self._wholes:
            module._parameters[key] = None
        self._model.to(self._device)
        for module, key, whole in self._wholes:
            module._parameters[key] = whole
        entries = tensor_state(self._model).items()
        return {name: self._shards[id(value)][1] for name, value in entries if id(value) in self._shards}

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        exchange = self._exchange
        wrong = next((name for name, size in sizes.items() if size % exchange.shards), None)
        if wrong is None:
            return
        common = reduce(gcd, sizes.values())
        working = [number for number in range(2, common + 1) if common % number == 0]
        unit = "ranks" if exchange.shards == exchange.ranks else "shards (tensor.shards)"
        advice = "No number of ranks divides all layers: leave some out with tensor.plan"
        if working:
            advice = f"Use {' or '.join(map(str, working[:8]))} {unit}"
        raise ConfigError(
            f"Strategy 'tensor' cannot split the {sizes[wrong]} heads, features or channels of {wrong!r} over "
            f"{exchange.shards} {unit}. {advice}, or use strategy 'fsdp' or 'ddp'."
        )

    def column(self, module: nn.Module, blocks: int = 1) -> None:
        """Keeps some of the outputs of a Linear or a convolution."""
        self._become(module, COLUMNS)
        module.blocks = blocks  # type: ignore[assignment]  # an attribute of the split classes
        self._keep(module, "weight", 0, blocks)
        self._keep(module, "bias", 0, blocks)

    def row(self, module: nn.Module) -> None:
        """Keeps some of the inputs of a Linear or a convolution; the bias stays whole."""
        self._become(module, ROWS)
        self._keep(module, "weight", 1)

    def heads(self, module: nn.Module) -> None:
        """Keeps some of the heads of the built-in attention."""
        assert isinstance(module, SelfAttention)
        self.column(module.inputs, blocks=3)
        self.row(module.output)
        module.heads //= self._exchange.shards

    def channels(self, module: nn.Module, dim: int = 1) -> None:
        """Keeps some of the channels of a BatchNorm; of a dropout, the part of the mask."""
        if type(module) in DROPOUTS:
            self._become(module, DROPOUTS)
            module.split_dim = dim  # type: ignore[assignment]  # an attribute of PartDropout
            return
        self._become(module, NORMS)
        for name in ("weight", "bias", "running_mean", "running_var"):
            self._keep(module, name, 0)

    def features(self, module: nn.Module) -> None:
        """As ``channels``, where the activation is split along its last dim."""
        self.channels(module, dim=-1)

    def _become(self, module: nn.Module, kinds: Mapping[type[nn.Module], type[nn.Module]]) -> None:
        module.__class__ = kinds[type(module)]
        vars(module).update(exchange=self._exchange, parts={})

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
        part = shard.local_shard(whole.detach()).to(self._device)
        if not isinstance(whole, nn.Parameter):
            setattr(module, key, part)
            self._shards[id(part)] = part, shard
            return
        self._shards[id(whole)] = whole, shard
        if self._exchange.ranks == 1:
            vars(module)["parts"][key] = whole
            return
        held = vars(module)["parts"][key] = nn.Parameter(part, requires_grad=whole.requires_grad)
        whole.data = torch.empty_like(whole)  # in memory of its own, which is given back
        whole.untyped_storage().resize_(0)
        described = (whole, self._names[whole], held, self._absence, shard.local_shard)
        AbsentParameter.describe(*described, is_ever_whole=False)
        whole.parameter_device = self._device  # type: ignore[attr-defined]  # one that describe has made
        whole.__class__ = AbsentParameter
        self._wholes.append((module, key, whole))


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


class ShardedActivation(Tensor):
    """Several shards that code between split layers takes for one tensor, of the shape of a shard.

    Any operator of torch runs on one after the other, so it sees the shape of a shard on every number of ranks.
    """

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
