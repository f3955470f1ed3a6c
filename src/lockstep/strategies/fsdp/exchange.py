"""Blocks of parameters that are gathered together, and the exchange of their gradients in the tree's order.

    round j      rank 0 has micro-batch 2j      rank 1 has 2j+1               (2 ranks)
    all_to_all   rank 0 gets its rows of the gradients of 2j and 2j+1, rank 1 its own of both
    stack        each pushes them in order of k on a binary counter, one for each block

Every rank holds the leaves of its own rows one by one, so their sum has the tree's order for any number of ranks. A
parameter has one gradient in a micro-batch, however often its block is called, and it is sent once; what else is sent
of the block in that micro-batch is zeros, which are combined by "or" and so change no bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from math import prod
from operator import itemgetter

import torch
from torch import Tensor, nn

from lockstep.core.summation_tree import merges_after_leaf, push_leaf
from lockstep.distributed.rank_exchange import RankExchange
from lockstep.errors import ConfigError
from lockstep.numerics.blocks import blocks_of
from lockstep.runtime.devices import current_stream, is_gpu
from lockstep.strategies.absent import Absence, AbsentParameter
from lockstep.strategies.gradients import one_dense
from lockstep.strategies.sharding import value_of
from lockstep.strategies.strategy import thawed

_SMALLEST = 1024
"""Parameters below which gathering a module alone costs more than it saves; it is gathered with the rest."""


class ShardedParameter:
    """One parameter: this rank's rows, which stay, and the whole, which has memory only while it is gathered.

    The whole one is the user's own object, so that it is found wherever the user has put it. While it has no memory it
    is an ``AbsentParameter``.

    Args:
        name: its first name in the whole model.
        parameter: the user's, in memory of its own.
        users: the modules that have it, with its name there.
        rows: of each rank; all of them of one, where an optimizer must see the whole.
        rank: this one.
        dtype: to gather and compute in; None for the parameter's own.
        offload: True to keep the rows in the CPU's memory.
        absence: why no process holds it, for messages.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        users: Sequence[tuple[nn.Module, str]],
        rows: Sequence[slice],
        rank: int,
        dtype: torch.dtype | None,
        offload: bool,
        absence: Absence,
    ) -> None:
        self.name, self.shape, self.users, self.rows = name, parameter.shape, users, rows
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
        self._absence = absence
        AbsentParameter.describe(parameter, name, self.held, absence, itemgetter(rows[rank]))
        self.gradient: Tensor | None = None
        """Of the micro-batch, until it is sent."""
        self.was_taken = False
        """True once the micro-batch's backward pass has given a gradient."""
        self.values: tuple[int, int] | None = None
        """Of the whole one as it was gathered, where writes are watched."""
        self.used = 0
        """In how many of the step's micro-batches of this rank it had a gradient."""
        if trained:
            self.whole.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]  # torch's stub

    @property
    def owner(self) -> int | None:
        """The rank that holds all of it, alone; None where the ranks share it."""
        holders = [rank for rank, count in enumerate(self.counts) if count]
        return holders[0] if len(holders) == 1 else None

    def take_memory(self) -> None:
        """Gives the whole one memory, without values; ``ConfigError`` if it was frozen and requires a gradient now."""
        self.show()
        self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.element_size())

    def show(self) -> None:
        """Makes the whole one an ordinary parameter; ``ConfigError`` as ``take_memory``."""
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

    def gradient_parts(self) -> Sequence[Tensor]:
        """Each rank's rows of the gradient, flat; zeros where there is none."""
        if self.gradient is None:
            zeros = torch.zeros(sum(self.counts), dtype=self.held.dtype, device=self.whole.device)
            return zeros.split_with_sizes(self.counts)
        return self.gradient.to(self.held.dtype).reshape(-1).split_with_sizes(self.counts)

    def free(self) -> None:
        """Takes the whole one's memory back."""
        self.whole.__class__ = self._class
        self.whole.untyped_storage().resize_(0)
        self.hide()

    def begin_micro_batch(self) -> None:
        """Forgets the gradient of the one before."""
        self.gradient, self.was_taken = None, False

    def _take(self, whole: Tensor) -> None:
        if not self._absence.is_computing:
            raise ConfigError(
                f"A backward pass outside of run.backward gave {self.name!r} a gradient, and under strategy 'fsdp' no "
                "process holds it whole. Let run.backward compute it, in the loss function, or use strategy 'ddp'."
            )
        gradient, whole.grad = whole.grad, None
        if gradient is None:
            return
        gradient = one_dense(self.name, gradient, is_first=not self.was_taken)
        self.gradient, self.was_taken = gradient, True


class ShardedBlock:
    """The parameters that are gathered together. Every method but ``free`` and ``take`` is collective, or local.

    Args:
        name: of the module; "" for what belongs to no block.
        parameters: of it, in order.
        exchange: between the ranks that hold rows.
        device: where the whole parameters are.
    """

    def __init__(
        self, name: str, parameters: list[ShardedParameter], exchange: RankExchange, device: torch.device
    ) -> None:
        self.name, self.parameters = name, parameters
        self._exchange, self._device = exchange, device
        self._ranks, self._rank = exchange.ranks, exchange.rank
        self._trained = [each for each in parameters if each.held.requires_grad]
        self._all, self._members = _by_dtype(parameters), _by_dtype(self._trained)
        self._received: dict[torch.dtype, Tensor] = {}
        self._stacks: dict[torch.dtype, list[Tensor]] = {}
        self._merges: Iterator[int] = iter(())
        self._skipped: list[int] = []
        self.bytes_sent = 0
        self.is_whole = False
        self.is_aside = False
        """True while it has its values and is not used: gathered ahead, or kept for its next use."""
        self.written: set[str] | None = None
        """Gets the names of parameters that were written to while they were whole; None: nobody asks."""

    @property
    def has_gradients(self) -> bool:
        """True if some gradient of the micro-batch has not been sent."""
        return any(each.gradient is not None for each in self._trained)

    def gather(self, keep: bool) -> None:
        """Gives every rank the rows of all; one that does not ``keep`` them only takes part. Collective."""
        keep = keep and not self.is_whole and not self.is_aside
        for members in self._all.values():
            own = [each.held.detach().view(-1).to(self._device, each.whole_dtype) for each in members]
            for each in members if keep else ():
                each.take_memory()
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
        """Makes what was set aside whole again; ``ConfigError`` as ``ShardedParameter.take_memory``."""
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

    def begin_step(self, leaves: int) -> None:
        """Starts a step of ``leaves`` micro-batches."""
        self._merges, self._stacks, self._skipped = iter(merges_after_leaf(0, leaves, leaves)), {}, []
        for each in self._trained:
            each.used = 0

    def begin_micro_batch(self) -> None:
        """Starts a round: one micro-batch of every rank."""
        self._received = {}
        for each in self._trained:
            each.begin_micro_batch()

    def exchange(self) -> None:
        """Sends the gradients that are ready to the ranks that hold their rows. Collective."""
        for dtype, members in self._members.items():
            parts = list(zip(*(each.gradient_parts() for each in members)))
            for each in members if is_gpu(self._device) else ():
                if each.gradient is not None:  # computed on another stream than this
                    each.gradient.record_stream(current_stream(self._device))
            counts = list(zip(*(each.counts for each in members)))
            received = self._exchange.exchange_parts(parts, counts)
            self.bytes_sent += max(map(sum, counts)) * received.element_size() * (self._ranks - 1)
            for each in members:
                each.gradient = None
            if dtype in self._received:
                self._received[dtype].view(torch.uint8).bitwise_or_(received.view(torch.uint8))
            else:
                self._received[dtype] = received

    def end_micro_batch(self, counts: bool) -> None:
        """Pushes the leaves of the round on the stacks, in order of k; a round without gradients gives zeros."""
        for each in self._trained if counts else ():
            each.used += each.was_taken
        merges = list(islice(self._merges, self._ranks))
        if not self._received and not self._stacks:
            self._skipped += merges  # their leaves are made once a gradient comes
            return
        for dtype, members in self._members.items():
            received = self._received.get(dtype)
            if received is None:
                numbers = sum(each.counts[self._rank] for each in members)
                received = torch.zeros(self._ranks, numbers, dtype=dtype, device=self._device)
            stack = self._stacks.setdefault(dtype, [])
            for count in self._skipped:
                push_leaf(stack, torch.zeros_like(received[0]), count)
            for leaf, count in zip(received, merges):
                push_leaf(stack, leaf, count)
            # What stays must not keep the other ranks' leaves alive.
            memory = received.untyped_storage().data_ptr()
            self._stacks[dtype] = [
                node.clone() if node.untyped_storage().data_ptr() == memory else node for node in stack
            ]
        self._received, self._skipped = {}, []

    def take(self) -> dict[str, Tensor]:
        """The sums over the step's micro-batches, of this rank's rows by name; none if no gradient came."""
        found: dict[str, Tensor] = {}
        for dtype, stack in self._stacks.items():
            (total,) = stack
            members = self._members[dtype]
            for each, rows in zip(members, torch.split(total, [each.counts[self._rank] for each in members])):
                found[each.name] = rows.view(each.held.shape)
        self._stacks = {}
        return found


def large_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by name, in order, that hold enough parameters to be gathered for themselves.

    A module that shares a parameter with another place is left to the rest, which is gathered with the whole model.
    """
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in blocks_of(model).items()}
    blocks = {name: module for name, module in blocks_of(model).items() if sizes[name] >= _SMALLEST}
    owners: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = next((block for block in blocks if name.startswith(f"{block}.")), "")
        owners.setdefault(parameter, set()).add(owner)
    shared = {owner for names in owners.values() if len(names) > 1 for owner in names}
    return {name: module for name, module in blocks.items() if name not in shared}


def _by_dtype(parameters: Sequence[ShardedParameter]) -> dict[torch.dtype, list[ShardedParameter]]:
    found: dict[torch.dtype, list[ShardedParameter]] = {}
    for each in parameters:
        found.setdefault(each.held.dtype, []).append(each)
    return found
