"""Parameters that ranks hold in parts: their rows, and the whole ones, which are gathered while modules compute.

Tensors are sharded by rows (dim 0), as in FSDP2: ceil(rows / ranks) consecutive rows each, fewer on the last ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from operator import itemgetter
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import _disable_current_modes

from lockstep.checkpoint.state import tensor_state
from lockstep.config.strategy_options import ELEMENTWISE
from lockstep.core.fingerprint import sum_of_bits
from lockstep.core.summation_tree import fold_rows, row_squares
from lockstep.distributed.collectives import all_gather_rows
from lockstep.distributed.rank_exchange import RankExchange
from lockstep.errors import ConfigError
from lockstep.strategies.absent import Absence, AbsentParameter
from lockstep.text import grouped

_Gathered = TypeVar("_Gathered", bound="GatheredParameter")


def has_no_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether a tensor has its elements in consecutive memory, with its dims in any order."""
    expected = 1
    for stride, size in sorted(zip(strides, shape)):
        if size != 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True


def rows_of(rows: int, ranks: int, rank: int) -> slice:
    """The rows of a rank."""
    size = -(-rows // ranks)
    return slice(min(rank * size, rows), min((rank + 1) * size, rows))


def gather_rows(part: Tensor, shape: torch.Size, group: dist.ProcessGroup) -> Tensor:
    """The whole tensor from every rank's rows. Collective."""
    ranks = dist.get_world_size(group)
    most = -(-shape[0] // ranks)
    padded = part.new_zeros(most, *shape[1:])
    padded[: part.shape[0]] = part
    return all_gather_rows(padded.view(-1), group).view(ranks * most, *shape[1:])[: shape[0]]


def squares_of_rows(
    gradients: Sequence[Tensor | None], rows: Sequence[int], device: torch.device, group: dist.ProcessGroup
) -> list[Tensor]:
    """The sum of squares of each whole gradient, float64, 0-dim: as ``sum_of_squares`` gives it. Collective.

    Args:
        gradients: this rank's rows of each; None counts as zeros.
        rows: of each whole gradient.
    """
    ranks = dist.get_world_size(group)
    sizes = [-(-count // ranks) for count in rows]
    mine = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
    for gradient, part in zip(gradients, torch.split(mine, sizes)):
        if gradient is not None and gradient.numel():
            part[: gradient.shape[0]] = row_squares(gradient)
    parts = torch.split(all_gather_rows(mine, group), sizes, dim=1)
    return [fold_rows(part.reshape(-1)[:count]) if count else part.sum() for part, count in zip(parts, rows)]


def require_rows(model: nn.Module, strategy: str, *, permuted: bool = False) -> None:
    """Raises ``ConfigError`` naming a parameter of a model that cannot be shared out by rows.

    Args:
        permuted: whether a parameter may have its dimensions in another order in memory.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ConfigError(
                f"Strategy {strategy!r} shards parameters by rows, and {name!r} is a scalar. Give it the shape (1,), "
                "or use strategy 'ddp'."
            )
        if parameter.is_contiguous() or (permuted and has_no_gaps(parameter.shape, parameter.stride())):
            continue
        found = f"with strides {parameter.stride()}"
        remedy = "Make it of a contiguous copy, nn.Parameter(tensor.contiguous()), before the optimizer"
        if parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last):
            found, remedy = "in channels-last order", "Use channels_last=False"
        raise ConfigError(
            f"Strategy {strategy!r} shards contiguous parameters, and {name!r} of shape {tuple(parameter.shape)} "
            f"is stored {found}. {remedy}, or use strategy 'ddp'."
        )


def require_separate_memory(model: nn.Module, strategy: str) -> None:
    """Raises ``ConfigError`` where a parameter shares memory with another, or with a buffer, so that one moves both.

    So it is where a parameter has no memory of its own.
    """
    if words := quantised(model):
        raise ConfigError(f"{words}, and strategy {strategy!r} shares out plain tensors. Use strategy 'ddp'.")
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kept = {name: each for name, each in named.items() if each.layout is torch.strided and each.numel()}
    extents = sorted((*_extent(each), name) for name, each in kept.items())
    for (memory, _, end, name), (other_memory, start, _, other) in itertools.pairwise(extents):
        is_parameter = any(isinstance(kept[each], nn.Parameter) for each in (name, other))
        if memory == other_memory and start < end and is_parameter:
            raise ConfigError(
                f"{name!r} and {other!r} share memory, so that an update of one changes the other, and strategy "
                f"{strategy!r} keeps each parameter by itself. Make one of a copy (tensor.clone()), tie them as one "
                "parameter, or use strategy 'ddp'."
            )


def quantised(model: nn.Module) -> str:
    """Words for the first parameter of a class that keeps its values in other tensors; empty if there is none."""
    for name, parameter in model.named_parameters():
        if type(parameter).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            words = f"The parameter {name!r} is a {type(parameter).__name__}, which keeps its values"
            return f"{words} in tensors of its own, as quantised ones do"
    return ""


def require_plain_state(model: nn.Module, strategy: str) -> None:
    """Raises ``ConfigError`` where a model's state has names that are none of its parameters and buffers."""
    known = {id(p) for p in model.parameters()} | {id(b) for b in model.buffers()}
    for name, tensor in tensor_state(model).items():
        if id(tensor) not in known:
            raise ConfigError(
                f"The model's state_dict has {name!r}, which is none of its parameters and buffers: a hook adds or "
                f"changes it. Strategy {strategy!r} gathers the state from those. Use get_extra_state and "
                "set_extra_state instead of the hook, or strategy 'ddp'."
            )


def _extent(tensor: Tensor) -> tuple[int, int, int]:
    """Where a tensor lies: its memory, which has an identity even without values, its first byte and its end."""
    storage = tensor.untyped_storage()
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return storage.data_ptr() or storage._cdata, start, start + (steps + 1) * tensor.element_size()


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Returns whether an optimizer's state is a number, or one for each element, as far as is known."""
    known = [getattr(optim, name) for name in ELEMENTWISE]
    return type(optimizer) in known or bool(getattr(optimizer, "elementwise", False))


def value_of(parameter: Tensor) -> tuple[int, int]:
    """How often a parameter was written to, and a sum of its bits: writes to ``.data`` are not counted."""
    with unseen():
        return parameter._version, int(sum_of_bits(parameter))


@contextmanager
def unseen() -> Iterator[None]:
    """A context hidden from selective checkpointing and torch.func, which would take what is computed for theirs."""
    with _disable_current_modes(), torch._C._DisableFuncTorch():
        yield


class GatheredParameter:
    """One parameter: this rank's rows, which stay, and the whole, which has memory only while it is gathered.

    The whole one is the user's own object, so that it is found wherever the user has put it, and hooks on it last.
    While it has no memory it is an ``AbsentParameter``.

    Args:
        name: its first name in the whole model.
        parameter: the user's, in memory of its own.
        rows: of each rank; all of them of one, where an optimizer must see the whole.
        absence: why no process holds it, for messages.
        dtype: to gather and compute in; None for the parameter's own.
        offload: True to keep the rows in the CPU's memory.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        rows: Sequence[slice],
        rank: int,
        absence: Absence,
        dtype: torch.dtype | None = None,
        offload: bool = False,
    ) -> None:
        self.name, self.shape, self.rows, self._absence = name, parameter.shape, rows, absence
        width = prod(self.shape[1:])
        self.counts: list[int] = [(each.stop - each.start) * width for each in rows]
        """Numbers that each rank holds."""
        values, trained = parameter.detach(), parameter.requires_grad
        own = values[rows[rank]].clone(memory_format=torch.contiguous_format)
        self.held = nn.Parameter(own.cpu() if offload else own, requires_grad=trained)
        """An ordinary parameter with this rank's rows, for optimizers."""
        dtype = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        parameter.data = values.to(dtype)
        self.whole, self._class = parameter, type(parameter)
        self.whole_dtype, self._is_contiguous = dtype, parameter.is_contiguous()
        AbsentParameter.describe(parameter, name, self.held, absence, itemgetter(rows[rank]))
        self.values: tuple[int, int] | None = None
        """Of the whole one as it was gathered, where writes are watched."""

    @property
    def owner(self) -> int | None:
        """The rank that holds all of it, alone; None where the ranks share it."""
        holders = [rank for rank, count in enumerate(self.counts) if count]
        return holders[0] if len(holders) == 1 else None

    def take_memory(self) -> None:
        """Gives the whole one memory, without values; ``ConfigError`` as ``show``."""
        self.show()
        self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.element_size())

    def show(self) -> None:
        """Makes the whole one an ordinary parameter; ``ConfigError`` if it was frozen and requires a gradient now."""
        self.whole.__class__ = self._class
        if self.whole.requires_grad and not self.held.requires_grad:
            raise thawed(self.name)

    def hide(self) -> None:
        """Makes the whole one an ``AbsentParameter``, which keeps its memory."""
        self.whole.__class__ = AbsentParameter

    def places(self) -> Sequence[Tensor]:
        """Where each rank's rows go, flat: in the whole one, or in memory of their own if it has its rows elsewhere."""
        whole = self.whole.detach()
        flat = whole.view(-1) if self._is_contiguous else whole.new_empty(whole.numel())
        return flat.split_with_sizes(self.counts)

    def copy_from(self, places: Sequence[Tensor]) -> None:
        """Copies the rows to the whole one where ``places`` were not in it."""
        if not self._is_contiguous:
            self.whole.detach().copy_(torch.cat(list(places)).view(self.shape))

    def free(self) -> None:
        """Takes the whole one's memory back."""
        self.whole.__class__ = self._class
        if not self.whole.untyped_storage().resizable():  # an array of NumPy has the memory
            self.whole.data = torch.empty_like(self.whole.detach())
        self.whole.untyped_storage().resize_(0)
        self.hide()


class GatheredBlock:
    """The parameters that are gathered together."""

    def __init__(self, parameters: Sequence[GatheredParameter], exchange: RankExchange, device: torch.device) -> None:
        self.parameters = parameters
        self._exchange, self._device = exchange, device
        self._all = by_dtype(parameters)
        self.bytes_sent = 0
        self.is_whole = False
        self.is_aside = False
        """True while it has its values and is not used: gathered ahead, or kept for its next use."""
        self.written: set[str] | None = None
        """Collects the names of parameters that were written to while they were whole; None: they are not collected."""

    def gather(self, keep: bool) -> None:
        """Gives every rank the rows of all; one that does not ``keep`` them only takes part. Collective."""
        keep = keep and not self.is_whole and not self.is_aside
        try:
            for each in self.parameters if keep else ():
                each.take_memory()
        except ConfigError:
            for each in self.parameters:
                each.free()
            raise
        for members in self._all.values():
            own = [each.held.detach().view(-1).to(self._device, each.whole_dtype) for each in members]
            places = list(zip(*(each.places() for each in members))) if keep else []
            counts = list(zip(*(each.counts for each in members)))
            self._exchange.gather_parts(own, places, counts)
            self.bytes_sent += max(map(sum, counts)) * own[0].element_size() * self._exchange.copies
            for each, found in zip(members, zip(*places)):
                each.copy_from(found)
            for each in members if keep and self.written is not None else ():
                each.values = value_of(each.whole)
        self.is_whole |= keep

    def set_aside(self) -> None:
        """Keeps the values, and lets nobody use them."""
        for each in self.parameters:
            each.hide()
        self.is_whole, self.is_aside = False, True

    def take_back(self) -> None:
        """Makes what was set aside whole again; ``ConfigError`` as ``GatheredParameter.show``."""
        for each in self.parameters:
            each.show()
        self.is_whole, self.is_aside = True, False

    def free(self) -> None:
        """Frees the whole parameters."""
        if self.is_whole or self.is_aside:
            for each in self.parameters:
                if self.written is not None and each.values not in (None, value_of(each.whole)):
                    self.written.add(each.name)
                each.values = None
                each.free()
            self.is_whole = self.is_aside = False


@contextmanager
def watching_writes(blocks: Sequence[GatheredBlock]) -> Iterator[set[str]]:
    """Collects the names of parameters that are written to while they are whole; see ``Strategy.watching_writes``."""
    written: set[str] = set()
    for block in blocks:
        block.written = written
    yield written
    for block in blocks:
        block.written = None


def by_dtype(parameters: Sequence[_Gathered]) -> dict[torch.dtype, list[_Gathered]]:
    """The parameters of each number type."""
    return grouped((each.held.dtype, each) for each in parameters)


def thawed(name: str) -> ConfigError:
    """The error of a parameter that was frozen when the run was prepared, and requires a gradient."""
    return ConfigError(
        f"{name!r} was frozen at run.prepare and requires a gradient now. Call run.prepare while every "
        "parameter that will be trained requires a gradient, and freeze it afterwards."
    )
