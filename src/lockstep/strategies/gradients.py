"""Gradients of micro-batches, added along the gradient tree, and what ranks exchange beside them.

Autograd alone would add micro-batches as they come, and so in another order on every number of ranks. Here a hook takes
a parameter's gradient as soon as it is complete, pushes it on the parameter's stack, and merges the nodes of the tree
that are now whole. During a rank's last micro-batch the finished nodes go to the reducer's staging memory; a bucket
whose parameters are complete is reduced while backward continues with the others. ``StepSums`` adds losses and running
statistics to that, for a model or one stage of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.core.plan import Share
from lockstep.core.summation_tree import TreeStack, fold_rows, merges_after_leaf, push_leaf, push_leaves
from lockstep.data.reader import ALIGNMENT, gap_after
from lockstep.errors import ConfigError
from lockstep.numerics.hooks import hooks_made
from lockstep.numerics.precision import all_finite
from lockstep.numerics.running_buffers import RunningBuffers
from lockstep.reduce import BucketShape, Reducer
from lockstep.reduce.reducer import most_slots
from lockstep.runtime.devices import is_gpu
from lockstep.runtime.events import NO_EVENTS, StepEvents
from lockstep.strategies.sharding import has_no_gaps
from lockstep.strategies.strategy import StepResult

_BUCKET_BYTES, _CUDA_BUCKET_BYTES = 8 << 20, 25 << 20
"""On a GPU an exchange costs launches, and fewer and larger ones are faster."""
_FIRST_BUCKET_BYTES = 1 << 20
_PASSES_WATCHED = 4
"""Backward passes in which gradients are taken by hooks where they might be collected afterwards."""


class StepHeader:
    """[losses, weights] of the holder's micro-batches, uses of each parameter, advances of each counter, flags.

    Args:
        share: which micro-batches a holder computes.
        parameters: how many are counted.
        counters: of the running buffers.
        flags: how many; the first is why a holder was asked to stop.
    """

    def __init__(
        self, share: Share, micro_batches: int, parameters: int = 0, counters: int = 0, flags: int = 0
    ) -> None:
        self._share, self._longest = share, share.longest(micro_batches)
        self._counts, self._flags = [parameters, counters], flags
        self.size = 2 * self._longest + parameters + counters + flags
        """Size of a row."""

    def pack(
        self,
        losses: Sequence[Tensor],
        weights: Sequence[Tensor],
        used: Sequence[int],
        advanced: Tensor,
        flags: Sequence[float],
    ) -> Tensor:
        """This holder's row, float64, where ``advanced`` is.

        Args:
            losses: of its micro-batches, 0-dim.
            weights: of them, 0-dim.
            used: in how many of them each parameter was.
            advanced: by how much each counter advanced.
            flags: numbers whose largest over the holders counts.
        """
        row = torch.zeros(self.size, dtype=torch.float64)
        start = 2 * self._longest
        row[start : start + len(used)] = torch.tensor(used, dtype=torch.float64)
        row[self.size - len(flags) :] = torch.tensor(flags, dtype=torch.float64)
        if advanced.device.type != "cpu":
            row = row.pin_memory()  # the copy of pageable memory would be waited for
        row = row.to(advanced.device, non_blocking=True)
        if losses:
            row[: len(losses)] = torch.stack(list(losses))
            row[self._longest : self._longest + len(weights)] = torch.stack(list(weights))
        row[start + len(used) : self.size - len(flags)] = advanced
        return row

    def unpack(self, rows: Tensor, leaves: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The sums over all holders, from their rows.

        Returns:
            Losses of all micro-batches in order of k, shape (leaves,); their weight, 0-dim; uses of each parameter;
            advances of each counter.
        """
        start = 2 * self._longest
        used, advanced = torch.split(rows[:, start : start + sum(self._counts)].sum(0), self._counts)
        parts = torch.split(rows[:, :start], self._longest, 1)
        losses, weights = (self._share.in_order(each, leaves) for each in parts)
        return losses, fold_rows(weights), used, advanced

    def flag(self, rows: Tensor, number: int = 0) -> Tensor:
        """The largest over the holders of a flag, 0-dim."""
        return rows[:, self.size - self._flags + number].max()


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter: its stack of tree nodes, and its place in a bucket."""

    name: str
    parameter: nn.Parameter
    held: nn.Parameter
    """The parameter that gets the sum, or this rank's part of it."""
    stack: list[Tensor] = field(default_factory=list)
    pushed: int = 0
    early: dict[int, Tensor] = field(default_factory=dict)
    """Leaves that came before one to the left of them."""
    used: int = 0
    bucket: int = -1
    staging: list[list[Tensor]] = field(default_factory=list)
    total: Tensor | None = None

    @property
    def gap(self) -> int:
        """How many numbers lie unused after its own in the bucket; none where a rank gets a part of the sum."""
        return gap_after(self.parameter) if self.held is self.parameter else 0


class GradientTree:
    """The gradients of one rank's micro-batches, added in the tree's order.

    Args:
        parameters: trainable parameters by name; the same on every rank.
        reducer: sums over ranks; None on one device.
        held: where a reducer gives each rank a part of every sum, the parameters that get it, by name; by default the
            parameters themselves.
        events: whose callbacks are told of buckets that start.
        may_collect: tells whether gradients may be taken after each backward pass, of which none begins before another
            has ended. Hooks of Python make autograd's thread wait for other threads, such as those of a loader.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        reducer: Reducer | None,
        held: Mapping[str, nn.Parameter] | None = None,
        events: StepEvents = NO_EVENTS,
        *,
        may_collect: Callable[[], bool] = lambda: False,
    ) -> None:
        held = parameters if held is None else held
        self.slots = [Slot(name, parameter, held[name]) for name, parameter in parameters.items()]
        self._reducer, self._events = reducer, events
        self._prior: list[tuple[nn.Parameter, Tensor]] = []
        self._merges: tuple[int, ...] = ()
        self._leaf = 0
        self._waiting: list[int] = []
        self._members: list[list[Slot]] = _fill_buckets(self.slots)
        self._own_references: list[int] = []
        """To the memory of each bucket's sum, of which the gradients are views."""
        self._may_collect, self._hooks_seen = may_collect, 0
        self._watched = _PASSES_WATCHED
        """Passes in which hooks take gradients still: a second one in a pass is seen by them alone."""
        self._register()

    def _register(self) -> None:
        """Lets hooks take the gradients."""
        self._handles = [
            after_accumulation(slot.parameter, self._take, number) for number, slot in enumerate(self.slots)
        ]

    @property
    def bucket_shapes(self) -> list[BucketShape]:
        """The buckets, in the order in which backward fills them."""
        return [
            BucketShape(
                sum(slot.parameter.numel() + slot.gap for slot in members),
                members[0].parameter.dtype,
                tuple(shape for slot in members for shape in (tuple(slot.parameter.shape), (slot.gap,))),
            )
            for members in self._members
        ]

    def connect(self, slots: int) -> None:
        """Makes the views of the reducer's memory, once it has been allocated with ``slots`` nodes per rank."""
        if self._reducer is None:
            return
        self._slots = slots
        buckets = range(len(self._members))
        for bucket in buckets:
            self._connect(bucket, self._reducer)
        self._own_references = [_references(self._reducer.total(bucket)) for bucket in buckets]

    def _connect(self, bucket: int, reducer: Reducer) -> None:
        offset = held = 0
        for slot in self._members[bucket]:
            slot.bucket = bucket
            place = slice(offset, offset + slot.parameter.numel())
            slot.staging = [
                [
                    _shaped_like(slot.parameter, reducer.staging(bucket, node, turn)[place])
                    for node in range(self._slots)
                ]
                for turn in range(reducer.turns)
            ]
            slot.total = _shaped_like(slot.held, reducer.total(bucket)[held : held + slot.held.numel()])
            offset += slot.parameter.numel() + slot.gap
            held += slot.held.numel() + slot.gap

    def _leave_to_user_code(self) -> None:
        """Gives memory of their own to buckets whose last gradients, or views of them, user code keeps.

        So it does where they were sent to another process, which reads them whenever it likes.
        """
        if self._reducer is None:
            return
        for bucket, own in enumerate(self._own_references):
            total = self._reducer.total(bucket)
            is_sent = total.device.type == "cpu" and total.untyped_storage().is_shared()
            if is_sent or _references(total) > own:
                self._reducer.renew(bucket)
                self._connect(bucket, self._reducer)

    def begin(self, start: int, stop: int, leaves: int) -> None:
        """Starts a step in which this rank runs the micro-batches ``start <= k < stop`` of ``leaves``.

        They run one after the other, unless ``go_on_with`` says which one runs.
        """
        if not self._handles:
            self.abandon()  # where the last step was left by an interrupt
            if self._hooks_seen != hooks_made():
                self._hooks_seen = hooks_made()
                if not self._may_collect():
                    self._register()
        self._merges = merges_after_leaf(start, stop, leaves)
        self._leaf = 0
        self._waiting = [len(members) for members in self._members]
        self._started = 0
        self._prior = []
        for slot in self.slots:
            slot.stack, slot.pushed, slot.used, slot.early = [], 0, 0, {}
            if slot.held.grad is not None:
                self._prior.append((slot.held, slot.held.grad))
                slot.held.grad = None
        self._leave_to_user_code()

    def go_on_with(self, number: int) -> None:
        """Makes the gradients that come next those of this rank's micro-batch ``number``, counted from 0."""
        self._leaf = number

    def begin_backward(self) -> None:
        """Raises ``ConfigError`` where a forward pass or a loss has computed gradients itself."""
        if not self._handles:
            for slot in self.slots:
                if slot.parameter.grad is not None:
                    raise _second(slot.name)

    def end_micro_batch(self) -> None:
        """Ends the backward pass of one micro-batch: a parameter it did not reach gets a leaf of zeros."""
        if not self._handles:
            self._collect()
        for slot in self.slots:
            if self._lacks_leaf(slot):
                if slot.parameter.grad is not None:
                    raise _unseen(slot.name)
                self._add_leaf(slot, torch.zeros_like(slot.parameter))
        self._leaf += 1
        self._watched -= 1
        if self._watched == 0 and self._may_collect():
            for handle in self._handles:
                handle.remove()
            self._handles, self._hooks_seen = [], hooks_made()

    def _collect(self) -> None:
        """Takes all gradients of a backward pass."""
        found = [(slot, slot.parameter.grad) for slot in self.slots]
        reached = [slot for slot, gradient in found if gradient is not None]
        gradients = [one_dense(slot.name, each, is_first=True) for slot, each in found if each is not None]
        for slot, gradient in zip(reached, gradients):
            require_own_memory(slot.name, gradient, slot.stack)
        push_leaves([slot.stack for slot in reached], gradients, self._merges[self._leaf])
        for slot in reached:
            slot.parameter.grad = None
            slot.used += 1
            slot.pushed += 1

    def used(self) -> list[int]:
        """In how many of this rank's micro-batches each parameter had a gradient."""
        return [slot.used for slot in self.slots]

    def start_all(self) -> None:
        """Starts the buckets that are not under way: all of them on a rank that had no micro-batch."""
        if self._reducer is not None:
            while self._started < len(self._members):
                self._start_next(self._reducer)

    def finish(self, used: list[int], weight: Tensor, losses: Tensor | None = None) -> Tensor:
        """Divides the sums by ``weight`` (0-dim) and sets them as the parameters' gradients.

        A parameter that no micro-batch of the step used (``used`` 0) gets none, on every rank alike. A gradient that
        was there before the step is added to, as autograd does.

        Returns:
            Whether every gradient of the step, and every one of ``losses``, is finite, 0-dim bool.
        """
        reducer, buckets = self._reducer, range(len(self._members))
        totals = [reducer.total(bucket) for bucket in buckets] if reducer is not None else []
        totals += [slot.stack[0] for slot, count in zip(self.slots, used) if count and slot.total is None]
        for device in {total.device for total in totals}:
            torch._foreach_div_([total for total in totals if total.device == device], weight.to(device))
        finite = all_finite(totals if losses is None else [*totals, losses], weight.device)
        for slot, count in zip(self.slots, used):
            if count:
                total = aligned_gradient(slot.stack[0]) if slot.total is None else slot.total
                # Not detach(): a write to one gradient would count as one to all of the bucket, for autograd.
                slot.held.grad = total.to(slot.held.device).data
        self.end()
        add_prior(self._prior)
        return finite

    def end(self) -> None:
        """Ends a step: gradients of other backward passes are left where they are."""
        for slot in self.slots:
            slot.stack, slot.early = [], {}
        self._merges = ()

    def abandon(self) -> None:
        """Leaves a step whose backward pass has raised: gradients are what they were before it."""
        if self._merges:
            for slot in self.slots:
                slot.parameter.grad = None
            for parameter, before in self._prior:
                parameter.grad = before
            self.end()

    def _take(self, number: int, parameter: Tensor) -> None:
        slot, gradient = self.slots[number], parameter.grad
        if gradient is None or not self._merges or parameter is not slot.parameter:
            return
        gradient = one_dense(slot.name, gradient, is_first=self._lacks_leaf(slot))
        parameter.grad = None
        slot.used += 1
        self._add_leaf(slot, gradient)

    def _lacks_leaf(self, slot: Slot) -> bool:
        return slot.pushed <= self._leaf and self._leaf not in slot.early

    def _add_leaf(self, slot: Slot, gradient: Tensor) -> None:
        """Pushes the current micro-batch's gradient, in order: at once, or when those to the left of it are there."""
        require_own_memory(slot.name, gradient, (*slot.stack, *slot.early.values()))
        slot.early[self._leaf] = gradient
        while slot.pushed in slot.early:
            self._push(slot, slot.early.pop(slot.pushed))

    def _push(self, slot: Slot, gradient: Tensor) -> None:
        merges = self._merges[slot.pushed]
        slot.pushed += 1
        if self._reducer is None or slot.pushed < len(self._merges):
            push_leaf(slot.stack, gradient, merges)
            return
        place = slot.staging[self._reducer.turn][len(slot.stack) - merges] if merges else None
        is_alike = place is not None and (place.dtype, place.device) == (gradient.dtype, gradient.device)
        push_leaf(slot.stack, gradient, merges, place if is_alike else None)
        self._hand_over(slot, self._reducer)

    def _hand_over(self, slot: Slot, reducer: Reducer) -> None:
        for place, node in zip(slot.staging[reducer.turn], slot.stack):
            if node is not place:
                place.copy_(node)
        slot.stack = []
        self._waiting[slot.bucket] -= 1
        while self._started < len(self._waiting) and self._waiting[self._started] == 0:
            self._start_next(reducer)

    def _start_next(self, reducer: Reducer) -> None:
        for call in self._events.bucket_start:
            call(self._started)
        reducer.start(self._started)
        self._started += 1


class StepSums:
    """The sums over the micro-batches of a step: gradients, running statistics, losses and weights.

    Args:
        parameters: trainable parameters by name; the same on every holder.
        reducer: sums over the holders; None for one.
        share: which micro-batches this holder runs.
        held, may_collect: see ``GradientTree``.
        events: whose callbacks are told of buckets and exchanges.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: RunningBuffers,
        reducer: Reducer | None,
        share: Share,
        micro_batches: int,
        device: torch.device,
        held: Mapping[str, nn.Parameter] | None = None,
        events: StepEvents = NO_EVENTS,
        *,
        may_collect: Callable[[], bool] = lambda: False,
    ) -> None:
        self.tree = GradientTree(parameters, reducer, held, events, may_collect=may_collect)
        self._buffers, self._reducer, self._events = buffers, reducer, events
        self._header = StepHeader(share, micro_batches, len(parameters), buffers.counters, flags=1)
        self._no_advance = torch.zeros(buffers.counters, dtype=torch.int64, device=device)
        self._no_stop = torch.zeros((), dtype=torch.float64, device=device)
        if reducer is not None:
            shapes = self.tree.bucket_shapes
            self._buffer_bucket = len(shapes)
            if buffers.numel:
                shapes = [*shapes, BucketShape(buffers.numel, buffers.dtype)]
            reducer.allocate(shapes, self._header.size, micro_batches)
            self.tree.connect(most_slots(micro_batches, share.holders))

    def begin(self, mine: range, leaves: int) -> None:
        """Starts a step in which this holder runs the micro-batches ``mine`` of ``leaves``."""
        if self._reducer is not None:
            self._reducer.begin(leaves)
        self.tree.begin(mine.start, mine.stop, leaves)
        self._buffers.begin_step()
        self._buffers.remember_others()
        self._leaves = leaves
        self._running = TreeStack[Tensor](leaves, lambda left, right: left.add_(right))
        self._advanced = self._no_advance

    def begin_forward(self) -> None:
        """Puts the step's old buffers in place before a forward pass."""
        self._buffers.begin_micro_batch()

    def end_forward(self, k: int) -> None:
        """Takes what the forward pass of micro-batch ``k`` left in the buffers; see ``GradientTree.begin_backward``."""
        self.tree.begin_backward()
        if self._buffers.numel:
            self.add_running(k, *self._buffers.take())

    def add_running(self, k: int, values: Tensor, advanced: Tensor) -> None:
        """Adds what ``RunningBuffers.take`` gave for micro-batch ``k``."""
        self._running.push_leaf(k, values)
        self._advanced = self._advanced + advanced

    def reduce(self, losses: Sequence[Tensor], weights: Sequence[Tensor], stop: int) -> StepResult:
        """Reduces over the holders, and sets the gradients of the mean and the new buffers. Collective.

        Args:
            losses: sums of this holder's micro-batches, 0-dim.
            weights: of them, 0-dim.
            stop: see ``Strategy.backward``.
        """
        running = list(self._running.take().values())
        used, advanced = self.tree.used(), self._advanced
        if self._reducer is None:
            sums, weight = _in_float64(losses), fold_rows(_in_float64(weights))
            flag = self._no_stop if not stop else torch.full_like(self._no_stop, stop)
        else:
            header = self._header.pack(losses, weights, used, advanced, [stop])
            headers = self._exchange(self._reducer, header, running)
            running = [self._reducer.total(self._buffer_bucket)] if self._buffers.numel else []
            sums, weight, uses, advanced = self._header.unpack(headers, self._leaves)
            if not all(used):  # only then the host waits for what the others say
                used = [int(count) for count in uses.tolist()]
            flag = self._header.flag(headers)
        if running:
            self._buffers.finish_step(running[0], self._leaves, advanced)
        finite = self.tree.finish(used, weight.float(), sums)
        self._buffers.refuse_changed_others()
        return StepResult(fold_rows(sums) / weight, sums, weight, flag, finite)

    def _exchange(self, reducer: Reducer, header: Tensor, running: Sequence[Tensor]) -> Tensor:
        self.tree.start_all()
        if self._buffers.numel:
            for slot, value in enumerate(running):
                reducer.staging(self._buffer_bucket, slot).copy_(value)
            for call in self._events.bucket_start:
                call(self._buffer_bucket)
            reducer.start(self._buffer_bucket)
        for waits in self._events.exchange_begin:
            waits()
        headers = reducer.finish(header)
        for ends in self._events.exchange_end:
            ends()
        return headers


def run_backward(loss: Tensor, scale: float) -> None:
    """Runs the backward pass from the sum of a micro-batch's losses, 0-dim, whose gradients are scaled."""
    (loss if scale == 1.0 else loss * scale).backward()  # type: ignore[no-untyped-call]  # torch's own stub


def after_accumulation(parameter: Tensor, method: Callable[..., None], *arguments: Any) -> RemovableHandle:
    """Calls ``method(*arguments, parameter)`` after a gradient was added; holds the object of the method weakly.

    Python's garbage collector does not see what such a hook of torch holds: nothing in a circle would ever be freed. So
    ``arguments`` must hold neither the object nor the parameter.
    """
    weak = WeakMethod(method)

    def call(summed: Tensor) -> None:
        if (alive := weak()) is not None:
            alive(*arguments, summed)

    return parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call,no-any-return]  # torch's stub


def _in_float64(numbers: Sequence[Tensor]) -> Tensor:
    """Several numbers, 0-dim, in one tensor of float64."""
    wide = [number.to(torch.float64, copy=True) for number in numbers]  # a loss may reuse its own
    return torch.stack(wide) if len(wide) > 1 else wide[0].view(1)


def require_own_memory(name: str, gradient: Tensor, kept: Iterable[Tensor]) -> None:
    """Raises ``ConfigError`` where a gradient was written over one that is still to be added."""
    place = gradient.data_ptr()
    if place and any(place == each.data_ptr() for each in kept):
        raise ConfigError(
            f"The gradient of {name!r} was written over that of the micro-batch before, which is still to be added: "
            "its memory is used again, as an autograd.Function with a buffer of its own, CUDA graphs and "
            "make_graphed_callables do. Return a new tensor from backward (.clone()), or leave the graphs out."
        )


def one_dense(name: str, gradient: Tensor, *, is_first: bool) -> Tensor:
    """A parameter's gradient, dense; ``ConfigError`` for a second one in a backward pass."""
    if not is_first:
        raise _second(name)
    return gradient.to_dense() if gradient.is_sparse else gradient


def _second(name: str) -> ConfigError:
    return ConfigError(
        f"{name!r} got two gradients in one backward pass, as re-entrant activation checkpointing does: use "
        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False). A loss function must not call backward() "
        "itself: return the loss, or use torch.autograd.grad."
    )


def _unseen(name: str) -> ConfigError:
    return ConfigError(
        f"The gradient of {name!r} did not pass through Lockstep's hooks: after run.prepare the parameter was "
        "swapped for another tensor (torch.utils.swap_tensors, set_swap_module_params_on_conversion), or its gradient "
        "was set by hand in the backward pass. Copy values in place, and return gradients from Function.backward."
    )


def add_prior(prior: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Adds the new gradients to those that parameters had before the step, as autograd does."""
    for parameter, before in prior:
        parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)


def _references(tensor: Tensor) -> int:
    """How many tensors share the memory of this one; those of an array of NumPy's and a kept graph count, too."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def _fill_buckets(slots: list[Slot]) -> list[list[Slot]]:
    """Groups the parameters in the reverse order of their registration, about the order in which backward reaches
    them: a small first bucket that can start early, then larger ones, each of one number type."""
    buckets: list[list[Slot]] = []
    size = 0
    for slot in reversed(slots):
        limit = _CUDA_BUCKET_BYTES if is_gpu(slot.parameter.device) else _BUCKET_BYTES
        limit = _FIRST_BUCKET_BYTES if len(buckets) == 1 else limit
        full = bool(buckets) and size + slot.parameter.nbytes > limit
        if not buckets or full or buckets[-1][0].parameter.dtype != slot.parameter.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(slot)
        size += slot.parameter.nbytes
    return buckets


def aligned_gradient(gradient: Tensor) -> Tensor:
    """The gradient itself, or a copy that begins where memory of its own does, as products in optimizers need it.

    Autograd gives views, too, as when parameters are joined by ``torch.cat``.
    """
    return gradient.clone() if gradient.data_ptr() % ALIGNMENT else gradient


def _shaped_like(parameter: Tensor, flat: Tensor) -> Tensor:
    """A view of ``flat`` with the shape and strides of the parameter (which may be ``channels_last``)."""
    if parameter.is_contiguous() or not has_no_gaps(parameter.shape, parameter.stride()):
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
