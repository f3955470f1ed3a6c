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

import torch
from torch import Tensor, nn

from lockstep.core.summation_tree import merges_after_leaf, push_leaf
from lockstep.distributed.rank_exchange import RankExchange
from lockstep.errors import ConfigError
from lockstep.numerics.blocks import blocks_of
from lockstep.runtime.devices import current_stream, is_gpu
from lockstep.strategies.gradients import after_accumulation, one_dense
from lockstep.strategies.sharding import GatheredBlock, GatheredParameter, by_dtype

_SMALLEST = 1024
"""Parameters below which gathering a module alone costs more than it saves; it is gathered with the rest."""


class ShardedParameter(GatheredParameter):
    """A parameter that is gathered, and its gradient of a micro-batch; see ``GatheredParameter`` for the arguments."""

    gradient: Tensor | None = None
    """Of the micro-batch, until it is sent."""
    was_taken = False
    """True once the micro-batch's backward pass has given a gradient."""
    used = 0
    """In how many of the step's micro-batches of this rank it had a gradient."""

    def gradient_parts(self) -> Sequence[Tensor]:
        """Each rank's rows of the gradient, flat; zeros where there is none."""
        if self.gradient is None:
            zeros = torch.zeros(sum(self.counts), dtype=self.held.dtype, device=self.whole.device)
            return zeros.split_with_sizes(self.counts)
        return self.gradient.to(self.held.dtype).reshape(-1).split_with_sizes(self.counts)

    def take(self, whole: Tensor) -> None:
        """Takes the gradient of the whole one, which a backward pass has given it."""
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


class ShardedBlock(GatheredBlock):
    """A block whose gradients are exchanged. Every method but ``free`` and ``take`` is collective, or local."""

    def __init__(
        self, name: str, parameters: Sequence[ShardedParameter], exchange: RankExchange, device: torch.device
    ) -> None:
        super().__init__(parameters, exchange, device)
        self.name = name
        """Of the module; "" for what belongs to no block."""
        self._ranks, self._rank = exchange.ranks, exchange.rank
        self._trained = [each for each in parameters if each.held.requires_grad]
        for each in self._trained:
            after_accumulation(each.whole, each.take)
        self._members = by_dtype(self._trained)
        self._received: dict[torch.dtype, Tensor] = {}
        self._stacks: dict[torch.dtype, list[Tensor]] = {}
        self._merges: Iterator[int] = iter(())
        self._skipped: list[int] = []

    @property
    def has_gradients(self) -> bool:
        """True if some gradient of the micro-batch has not been sent."""
        return any(each.gradient is not None for each in self._trained)

    def begin_step(self, leaves: int) -> None:
        """Starts a step of ``leaves`` micro-batches."""
        self._merges, self._stacks, self._skipped = iter(merges_after_leaf(0, leaves, leaves)), {}, []
        for each in self._trained:
            each.used = 0

    def begin_micro_batch(self) -> None:
        """Starts a round: one micro-batch of every rank."""
        self._received = {}
        for each in self._trained:
            each.gradient, each.was_taken = None, False

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
    for name, parameter in nn.Module.named_parameters(model, remove_duplicate=False):
        owner = next((block for block in blocks if name.startswith(f"{block}.")), "")
        owners.setdefault(parameter, set()).add(owner)
    shared = {owner for names in owners.values() if len(names) > 1 for owner in names}
    return {name: module for name, module in blocks.items() if name not in shared}
