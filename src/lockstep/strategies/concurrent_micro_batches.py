"""``single`` and ``ddp`` whose micro-batches run side by side and meet at every BatchNorm, for ``sync_batch_norm``.

    rank 0   k0   conv |           | relu conv |           | ...         | one thread for each micro-batch,
             k1        | conv      |           | relu conv | ...         | of which one runs at a time
                            meet                    meet
    rank 1   k2   conv |           | relu conv |           | ...
             k3        | conv      |           | relu conv | ...

A micro-batch runs until it reaches a BatchNorm, hands over its moments, and waits; then the next one runs. When all of
this rank's wait, the ranks exchange the moments of each micro-batch, and every micro-batch adds up those of all K in
the summation tree. The backward pass meets there again, in reverse. So a micro-batch computes what it would compute in
a process of its own, and the bits depend only on K.

A micro-batch that waits keeps its activations: a rank holds those of its whole share. What a forward pass draws, the
buffers and the settings of BatchNorms that it changes, and the gradients it gives are set aside while it waits. What
user code keeps on the model is not; the rehearsal of the first steps runs the micro-batches in two orders to find it.

A rank that a ragged step leaves without a micro-batch runs micro-batch 0 as padding, so that the others need not wait:
it counts for neither the statistics, the gradients nor the loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import replace
from threading import Semaphore
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.core.plan import Share, share
from lockstep.data.batch import Batch, MicroBatch
from lockstep.errors import ConfigError
from lockstep.numerics.running_buffers import RunningBuffers
from lockstep.numerics.sync_batch_norm import RankRows, synchronise
from lockstep.reduce import Reducer
from lockstep.runtime.devices import current_stream, is_gpu, on_stream, selected
from lockstep.runtime.events import StepEvents
from lockstep.strategies.ddp import Replicated
from lockstep.strategies.gradients import StepSums, run_backward
from lockstep.strategies.strategy import Compute, StepResult

_SETTINGS = ("training", "track_running_stats", "momentum")
"""Of a BatchNorm, which a forward pass may change for some of its calls, as for adversarial examples."""
_STEPS_COMPARED = 4
"""Backward passes, with those of rehearsals, in which a GPU is asked whether all ranks meet at the same BatchNorm."""


class _Abandoned(BaseException):
    """Ends a task whose companions have failed."""


class Task(ABC):
    """A function that runs in a thread, and waits for others like it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.place: str | None = None
        """Where it waits; None where it does not."""
        self.offered: Tensor | None = None
        self.received: Tensor | None = None
        self.error: BaseException | None = None
        self.may_run = Semaphore(0)

    @abstractmethod
    def run(self) -> None:
        """Does the work."""

    @abstractmethod
    def explain(self, error: BaseException) -> None:
        """Adds to an error that ``run`` raised."""

    @abstractmethod
    def pause(self) -> Callable[[], None]:
        """Called when it begins to wait; what is returned is called when it continues."""


class TaskThreads:
    """Runs functions in threads of their own, one at a time and in a fixed order, that wait for each other."""

    def __init__(self, threads: int, device: torch.device) -> None:
        self._threads, self._device = threads, device
        self._pool: ThreadPoolExecutor | None = None
        self._most = 0
        self._handed_back = Semaphore(0)
        self._is_abandoned = False
        self.current: Task | None = None
        """The task that runs; None outside of ``run``."""

    def run(self, tasks: Sequence[Task], meet: Callable[[str, Sequence[Task]], Tensor]) -> None:
        """Runs the tasks to their ends.

        Args:
            tasks: in the order in which they take turns.
            meet: called in the caller's thread when all tasks wait at one place; gives what each receives.

        Raises:
            ConfigError: some wait where others do not.
            BaseException: whatever a task raised first.
        """
        if self._pool is None or self._most < len(tasks):
            self.close()  # each task needs a thread, since all of them are under way at once
            self._most = len(tasks)
            self._pool = ThreadPoolExecutor(
                *(self._most, "lockstep-micro-batch", torch.set_num_threads, (self._threads,))
            )
        pool, settings = self._pool, self._settings()
        self._handed_back, self._is_abandoned = Semaphore(0), False
        futures = [pool.submit(copy_context().run, self._thread, task, settings) for task in tasks]
        try:
            while True:
                for task in tasks:
                    self._give_turn(task)
                places = [task.place for task in tasks]
                if any(place != places[0] for place in places):
                    raise _other_way(tasks)
                if places[0] is None:
                    return
                received = meet(places[0], tasks)
                for task in tasks:
                    task.received = received
        finally:
            self.current, self._is_abandoned = None, True
            self._end(tasks, futures)

    def wait(self, place: str, row: Tensor) -> Tensor:
        """Hands over a row of the current task, and waits until all tasks have; gives what ``meet`` made of them."""
        task = self.current
        assert task is not None, "only a task waits"
        go_on = task.pause()
        task.place, task.offered, task.received = place, row, None
        self._hand_back(task)
        if self._is_abandoned or task.received is None:
            raise _Abandoned
        task.place = task.offered = None
        go_on()
        return task.received

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool, self._most = None, 0

    def _give_turn(self, task: Task) -> None:
        self.current = task
        task.may_run.release()
        self._handed_back.acquire()
        self.current = None
        if task.error is not None:
            raise task.error

    def _hand_back(self, task: Task) -> None:
        self._handed_back.release()
        task.may_run.acquire()

    def _thread(self, task: Task, settings: Callable[[], ExitStack]) -> None:
        task.may_run.acquire()
        if self._is_abandoned:
            return
        try:
            with settings():
                task.run()
                # Leaving autocast in any thread empties torch's one cache of cast weights: all leave it together.
                self._hand_back(task)
        except _Abandoned:
            pass
        except BaseException as error:  # raised again where the tasks were begun
            task.explain(error)
            task.error = error
            self._handed_back.release()

    def _settings(self) -> Callable[[], ExitStack]:
        """The settings that torch keeps for each thread, as the caller has them, for the threads of the tasks."""
        kind, default = self._device.type, torch.get_default_device()
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        cached = torch.is_autocast_cache_enabled()
        stream = current_stream(self._device) if is_gpu(self._device) else None

        def enter() -> ExitStack:
            stack = ExitStack()
            # A thread of autograd's own, as it has for a GPU, could not wait for several backward passes.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            if default.type != "cpu":
                stack.enter_context(default)
            if stream is not None:
                stack.enter_context(selected(self._device))
                stack.enter_context(on_stream(stream))
            return stack

        return enter

    @staticmethod
    def _end(tasks: Sequence[Task], futures: Sequence[Future[None]]) -> None:
        """Lets every thread come to its end, one after the other."""
        for task, future in zip(tasks, futures):
            task.may_run.release()
            wait([future])


def _other_way(tasks: Sequence[Task]) -> ConfigError:
    first = tasks[0]
    other = next(task for task in tasks if task.place != first.place)
    places = [f"is at {task.place}" if task.place else "has ended" for task in (first, other)]
    return ConfigError(
        f"With sync_batch_norm all micro-batches meet at every BatchNorm, and two of them take different ways through "
        f"the model: one {places[0]} when another {places[1]}. Call each BatchNorm equally often and in one order for "
        "every micro-batch, or leave sync_batch_norm out."
    )


class MicroBatchRows:
    """Gathers a row of each micro-batch of a step, on whichever rank it runs.

    Outside of ``run.backward`` a row is that of one call, and all ranks must make it. A model's copies share this.
    """

    def __init__(self, tasks: TaskThreads, ranks: RankRows, holders: Share, micro_batches: int) -> None:
        self._tasks, self._ranks, self._share = tasks, ranks, holders
        self._longest = holders.longest(micro_batches)
        self.names: Sequence[str] = ()
        """Of the BatchNorms, in an order that all ranks have."""
        self._leaves = 0
        self._begun = 0

    def begin(self, leaves: int) -> None:
        """Starts a step of ``leaves`` micro-batches."""
        self._leaves = leaves
        self._begun += 1

    def gather(self, row: Tensor, name: str) -> Tensor:
        """The rows of all micro-batches of the step in order of k, shape (leaves, n), at the BatchNorm of this name."""
        if self._tasks.current is None:
            return self._ranks.gather(row)
        # There is a count beside two numbers of each channel
        kind = "forward" if row.numel() % 2 else "backward"
        numbered = torch.cat([row, row.new_full((1,), self.names.index(name))])
        return self._tasks.wait(f"the {kind} pass of {name or 'the model'!r}", numbered)

    def meet(self, place: str, tasks: Sequence[Task]) -> Tensor:
        """The rows of all ranks' micro-batches, from those of this rank's. Collective."""
        rows = [task.offered for task in sorted(tasks, key=lambda task: task.number)]
        own = torch.stack([row for row in rows if row is not None])
        if self._ranks.ranks == 1:
            return own[:, :-1]
        padded = own.new_zeros(self._longest, own.shape[1])
        padded[: len(own)] = own
        gathered = self._ranks.gather(padded.view(-1)).view(self._ranks.ranks, *padded.shape)
        if own.device.type == "cpu" or self._begun <= _STEPS_COMPARED:
            self._compare(place, gathered[:, 0, -1])
        return self._share.in_order(gathered, self._leaves)[:, :-1]

    def _compare(self, place: str, numbers: Tensor) -> None:
        """Raises ``ConfigError`` on every rank where one is at another BatchNorm."""
        if bool((numbers != numbers[0]).any()):
            raise ConfigError(
                f"With sync_batch_norm all ranks meet at every BatchNorm, and this one is at {place} when others "
                "are at another one. Call each BatchNorm equally often and in one order for every micro-batch, or "
                "leave sync_batch_norm out."
            )

    def release(self) -> None:
        """Ends the threads, and releases the process group."""
        self._tasks.close()
        self._ranks.release()

    def __deepcopy__(self, memo: dict[int, object]) -> MicroBatchRows:
        return self

    def __reduce__(self) -> tuple[type[RankRows], tuple[None]]:
        """Pickled, as in ``torch.save(model)``, it is that of one process alone."""
        return RankRows, (None,)


class _MicroBatchTask(Task):
    """The forward and backward pass of one micro-batch.

    Args:
        micro_batch: one of this rank's, or padding.
        norms: the model's BatchNorms, as they are before a forward pass.
        scale: factor on its gradients; 0 for padding.
    """

    loss: Tensor
    weight: Tensor
    running: tuple[Tensor, Tensor] | None = None
    """The values that the forward pass left in the buffers."""

    def __init__(
        self,
        micro_batch: MicroBatch,
        number: int,
        compute: Compute,
        sums: StepSums,
        buffers: RunningBuffers,
        norms: Sequence[nn.Module],
        events: StepEvents,
        scale: float,
    ) -> None:
        super().__init__(number)
        self._settings = _settings_of(norms)
        self.micro_batch, self._compute, self._norms, self._scale = micro_batch, compute, norms, scale
        self._sums, self._buffers, self._events = sums, buffers, events

    def run(self) -> None:
        """Computes the loss, and its gradients."""
        self._sums.tree.go_on_with(self.number)
        self._sums.begin_forward()
        self._set_norms(self._settings)
        loss, self.weight = self._compute(self.micro_batch)
        if self._buffers.numel:
            self.running = self._buffers.take()
        run_backward(loss, self._scale)
        self.loss = loss.detach()
        if self._scale:
            self._sums.tree.end_micro_batch()
            for call in self._events.micro_batch_end:
                call(self.micro_batch)

    def explain(self, error: BaseException) -> None:
        """Says that the micro-batch was not alone."""
        error.add_note(
            f"Raised in micro-batch {self.micro_batch.k}. With sync_batch_norm the micro-batches of a process are "
            "under way at the same time, and what one keeps on the model for later, another one replaces."
        )

    def pause(self) -> Callable[[], None]:
        """Sets aside what the other micro-batches would change."""
        go_on, values = self._compute.pause(self.micro_batch), self._buffers.leave()
        settings = _settings_of(self._norms)

        def resume() -> None:
            self._buffers.resume(values)
            self._set_norms(settings)
            self._sums.tree.go_on_with(self.number)
            go_on()

        return resume

    def _set_norms(self, settings: Sequence[dict[str, Any]]) -> None:
        for norm, each in zip(self._norms, settings):
            vars(norm).update(each)  # without the checks of a module's attributes: at each BatchNorm, for all of them


def _settings_of(norms: Sequence[nn.Module]) -> list[dict[str, Any]]:
    return [{name: vars(norm)[name] for name in _SETTINGS} for norm in norms]


class SynchronizedReplicas(Replicated):
    """Replicas with the statistics of every BatchNorm over the micro-batches of all ranks.

    Args:
        ranks: exchanges the statistics between the processes.
        reducer: see ``Replicated``; None for one process, which is the reference of several.
    """

    def __init__(
        self,
        device: torch.device,
        micro_batches: int,
        ranks: RankRows,
        reducer: Reducer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(device, micro_batches, reducer, group)
        self.name = "single"
        if group is not None:
            self.name, self.evaluation_share = "ddp", self.share
            self.share = replace(self.share, spare=True)
        self._ranks, self._tasks = ranks, TaskThreads(torch.get_num_threads(), self.device)
        self._rows = MicroBatchRows(self._tasks, ranks, self.share, self._micro_batches)

    def setup_model(self, model: nn.Module) -> nn.Module:
        """Converts every BatchNorm, and places the model. Collective.

        Raises:
            ConfigError: the model has no BatchNorm, or one whose forward pass is not torch's.
        """
        self._norms = synchronise(model, self._rows)
        self._rows.names = [*self._norms]
        return super().setup_model(model)

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs this process's micro-batches side by side and reduces. See ``Strategy.backward``."""
        leaves = batch.plan.leaves
        mine = share(leaves, self.share.holders, self.share.holder or 0)
        self._sums.begin(mine, leaves)
        self._rows.begin(leaves)
        for norm in self._norms.values():
            norm.counts = bool(mine)
        norms = [*self._norms.values()]
        shared = (compute, self._sums, self._buffers, norms, self.events, scale if mine else 0.0)
        tasks = [_MicroBatchTask(each, each.k - mine.start, *shared) for each in batch.micro_batches]
        self._tasks.run(tasks, self._rows.meet)
        if not mine:
            for parameter in self._trainable.values():
                parameter.grad = None
        counted = sorted(tasks if mine else [], key=lambda task: task.number)
        for task in counted:
            if task.running is not None:
                self._sums.add_running(task.micro_batch.k, *task.running)
        compute.exchange()
        return self._sums.reduce([task.loss for task in counted], [task.weight for task in counted], stop)

    @property
    def all_bytes_sent(self) -> int:
        """See ``Strategy.all_bytes_sent``: gradients, and the statistics of every BatchNorm."""
        return super().all_bytes_sent + self._ranks.bytes_sent

    def release(self) -> None:
        """See ``Strategy.release``."""
        super().release()
        self._rows.release()
