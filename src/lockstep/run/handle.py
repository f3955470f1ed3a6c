"""The user's handle: seven calls around an ordinary training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep.collectives import let_go_of_groups
from lockstep.data.batch import Batch
from lockstep.data.decoding import decoded_as
from lockstep.errors import ConfigError
from lockstep.fingerprint import combine, digest_tensor
from lockstep.launch.beat import STEP, place_in_step
from lockstep.launch.control import Stopped
from lockstep.precision import Precision
from lockstep.run import profiling, resuming, saving, start
from lockstep.run.agreed_data import AgreedData
from lockstep.run.clipping import clip_gradients
from lockstep.run.compute import Compute, StepCompute, note
from lockstep.run.context import describe
from lockstep.run.course import Course
from lockstep.run.evaluation import Evaluation, Metric
from lockstep.run.feeding import Feeder, smallest_micro_batch
from lockstep.run.leaving import EvaluationLeft, Leaving
from lockstep.run.loss import exact
from lockstep.run.optimizer import PreparedOptimizer
from lockstep.run.options import RunOptions
from lockstep.run.parts import Parts
from lockstep.run.pending import Pending
from lockstep.run.placing import place
from lockstep.run.position import Position
from lockstep.run.scaling import ScaledStep
from lockstep.run.session import Session
from lockstep.run.skipping import SkippedSamples
from lockstep.run.unread import Unread
from lockstep.run.writing import Writer
from lockstep.strategies import Strategy, open_strategy
from lockstep.strategy_options import devices_per_process
from lockstep.timeline.timeline import Timeline
from lockstep.world import World

_LOOK_EVERY = 16
_DATA = place_in_step("data")


class Run:
    """One training run, seen from one process. Made by ``lockstep.init``; every rank must make the same calls.

    Args:
        options: recipe and manner of the run.
        world: who this process is; read from the environment by default.
    """

    def __init__(self, options: RunOptions, world: World | None = None) -> None:
        world = world or World.from_environment()
        self.options = options = profiling.as_launched(options, world)
        options = dataclasses.replace(options, timeout=world.patience(options.timeout))
        devices = devices_per_process(options.mesh)
        self._session = Session(world, options.threads, options.timeout, devices)
        self.world, self.device = self._session.world, self._session.device
        if self._session.group is not None:
            start.require_equal_settings(options.as_text(), self._session.group, self.device)
        self._precision = Precision(options.precision, self.device, options.shape.micro_batch_size)
        self._precision.configure_backend()
        self.strategy: Strategy = open_strategy(options, self._session.group, self.device)
        options.shape.check_holders(self.strategy.share.holders)
        self._course = Course()
        self.extra: dict[str, Any] = {}
        """Stored in checkpoints and given back on resume; must survive JSON."""
        self._feeder = Feeder(options, self.strategy)
        self._scaled_step = ScaledStep(self._precision, self.strategy)
        self._saved: saving.Saved | None = None
        self._timeline: Timeline | None = None
        self._pending = Pending()
        look_every = 1 if self.device.type == "cpu" else _LOOK_EVERY
        self._writer = Writer(options, world)
        self._unread = Unread(look_every, overflow_expected=self._precision.scaler is not None)
        self._agreed_data = AgreedData(self._session.group, self.device, self.position)
        self._skipped = SkippedSamples(self._session.group, self.device, options.seed, self.is_main)
        self._session.before_close = self._let_go
        self._session.heartbeat.will_poll()

    @property
    def is_main(self) -> bool:
        """Whether this process logs, prints and writes."""
        return self.world.is_main

    @property
    def position(self) -> Position:
        """Where the run stands."""
        return self._course.position

    def prepare(self, model: nn.Module, *others: Any, values_from_main: bool = False) -> Any:
        """Places the model and takes charge of optimizers and schedulers. Collective.

        The ranks' settings and models are compared (``ConfigError`` names what differs), rank 0's values are given to
        all, and with ``resume`` the checkpoint is taken up.

        Args:
            model: the model; on the CPU, or where it will be trained.
            others: optimizers and learning-rate schedulers.
            values_from_main: rank 0 alone has loaded weights, so other ranks' values differ and that is no news.

        Returns:
            The model, and what stands for the others, in the order of the arguments; the model alone if it was.
        """
        parts = Parts.of(model, others)
        if self._saved is not None:
            raise ConfigError("run.prepare was called twice. Put several models into one nn.ModuleDict.")
        self._session.heartbeat.mark("prepare")
        if self.is_main:
            resuming.settle(self.options.directory)
            profiling.make_file(self)
        context, group = describe(self.options, self._session, parts.optimizers), self._session.group
        if group is not None:
            start.agree(parts, context, group, self.device, values_from_main)
        placed = place(parts, self.options, self.strategy, self._precision, self.device)
        self._randomness = placed.randomness
        self._compute = Compute(placed.model, self._precision, self.device, self.options.channels_last)
        self._evaluation = Evaluation(self._compute, self._randomness, self.strategy)
        self._parts, self._pending = parts, Pending(parts.optimizers)
        self._saved = saving.Saved(
            parts, placed, self.strategy, group, self._precision, self.position, context, self.world.run_id
        )
        self._writer.join(self._saved)
        if resuming.take_up(self._saved, self.options, self.fingerprint, restarted=self.world.restart > 0):
            self.extra = self._saved.extra
            self._agreed_data.resume()
        if self.strategy.independent:
            self._part_ways()
        step, forget = partial(self._pending.step, take=self._scaled_step.step), self._pending.forget
        self._stand_ins = {id(o): PreparedOptimizer(o, step, forget) for o in parts.optimizers}
        stand_ins = (self._stand_ins.get(id(each), each) for each in others)
        self._timeline = profiling.watch(self) if self.options.profile else None
        return (placed.model, *stand_ins) if others else placed.model

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs from where the run stands (0, or where it was resumed) up to ``count``."""
        return self._course.epochs(count)

    def batches(
        self, data: Any, *, shuffle: bool = True, drop_last: bool = False, workers: int | None = None
    ) -> Iterator[Batch]:
        """The steps of one epoch, each the batch of one optimizer step. Collective.

        Order and augmentation follow from the seed and the epoch; outside of ``epochs`` every call is the next epoch.

        Args:
            data: a map-style data set, or a DataLoader whose data set, collate function and workers are taken over.
            shuffle: visit the samples in a keyed order.
            drop_last: leave out the last, smaller batch.
            workers: processes that read ahead; by default those of the DataLoader, or none.
        """
        saved = self.require_prepared()
        smallest, photos = saved.placed.smallest_micro_batch, decoded_as(self._feeder.source(data).dataset)
        self.strategy.settle()
        self._agreed_data.require(self._feeder.plan(data, shuffle, drop_last, smallest), photos)
        saved.reads_photos(photos)
        loader = self._feeder.training(data, shuffle, drop_last, workers, smallest)
        self._compute.finish = self._feeder.source(data).finish
        note(self._session.heartbeat, "data", self.position.epoch, self.position.step)
        batches = partial(
            loader.batches, at_end=lambda: self._feeder.read_ahead(loader, self._course.next_epoch)
        )
        read = self._skipped.counted(batches, self._feeder.source(data).dataset)
        return self._course.steps(read, self._between_steps)

    def backward(
        self, batch: Batch, loss: Callable[..., Any], *, forward: Callable[[Any], Any] | None = None
    ) -> Tensor:
        """Sets the gradient of the mean loss over the global batch on the parameters. Collective.

        Args:
            batch: from ``batches``.
            loss: function of (output, target). It returns the mean over the micro-batch (a 0-dim tensor), one value
                per sample or token, or the pair (sum, weight).
            forward: gives the output from a micro-batch's data, if ``model(input)`` does not; ``loss`` is then called
                with (output, data).

        Returns:
            The mean loss over the global batch, float64, 0-dim, equal on every rank, on the device.

        Raises:
            NonFiniteError: a loss or gradient is NaN or infinite; names the step and the samples.
        """
        self.require_prepared().require_accumulable(bool(self._pending))
        self._parts.require_frozen()
        self._scaled_step.settle()
        plan, heartbeat = batch.plan, self._session.heartbeat
        key = self._course.turn * self.options.micro_batches
        short = heartbeat.begin_step(plan.step, plan.packed, len(plan.indices[0]), len(batch.micro_batches))
        compute = StepCompute(
            self._compute, self._randomness, heartbeat, plan, exact(loss), forward, short, key
        )
        stop = int(heartbeat.stop_reason)
        result = self.strategy.backward(batch, compute, scale=self._scaled_step.scale, stop=stop)
        self._randomness.end_step(plan.step)
        self._unread.add(result, plan)
        self._scaled_step.unscale(self._parts.optimizers)
        self._pending.take_reduced()
        self._course.end_backward()
        compute.end()
        return result.loss

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their total norm is at most ``max_norm``; returns the norm before, 0-dim.

        The sum of squares is taken in float64 per parameter row and folded in a fixed order. Collective.
        """
        return clip_gradients(self.strategy, max_norm)

    def evaluate(
        self,
        data: Any,
        metric: Metric | Mapping[str, Metric],
        *,
        model: nn.Module | None = None,
        forward: Callable[[Any], Any] | None = None,
        workers: int | None = None,
        repeatable: bool = False,
    ) -> Any:
        """The mean of a metric over every sample, each counted once. Collective.

        Args:
            data: a map-style data set or a DataLoader.
            metric: a function of (output, target), or several by name; see ``backward`` for what it may return.
            model: another model than the trained one, such as a moving average of its weights.
            forward: as in ``backward``.
            workers: as in ``batches``.
            repeatable: a request to stop ends the evaluation, and a resumed run does again all that came after the last
                step of the epoch. For loops in which nothing since then changes what a checkpoint holds, such as a
                schedule; otherwise the evaluation goes on to its end, and the run stops at the next step.

        Returns:
            A float, or floats by name.
        """
        self.require_prepared()
        self.strategy.settle()
        epoch, step = self.position.epoch, self.position.step
        noted = partial(note, self._session.heartbeat, "evaluate", epoch, step)
        noted()
        loader, finish = self._feeder.evaluation(data, workers), self._feeder.source(data).finish
        leaving = Leaving(self.strategy, self._session.heartbeat) if repeatable and self._can_leave else None
        try:
            return self._evaluation.run(
                *(loader, metric),
                step=step,
                model=model,
                forward=forward,
                finish=finish,
                note=noted,
                leaving=leaving,
            )
        except EvaluationLeft as left:
            if self.options.directory is not None:
                self._course.go_back()
                self.save(wait=True)
            raise Stopped(left.reason) from None

    @property
    def _can_leave(self) -> bool:
        """Whether the run as it stands can be saved so that a resumed one does again what it is at."""
        return self.options.directory is None or (self._course.can_go_back and not self._pending)

    def save(self, *, wait: bool = False) -> Path | None:
        """Writes a checkpoint of the run as it stands, after checking that all ranks agree. Collective.

        Inside the loop over ``batches`` it belongs to the end of the loop's body: the step counts as done. The state is
        copied and training goes on while the copy is written. What goes wrong with that, such as a full disk, is raised
        on the main process at the end of the next step, by the next save, or at the end of the program.

        Args:
            wait: come back only when the checkpoint is on the disk; always so with ``save_in_background=False``.

        Returns:
            The folder that the checkpoint has, or will have, on the main process; None on the others.
        """
        saved = self.require_prepared()
        if self.options.directory is None:
            raise ConfigError("run.save() needs the run folder: lockstep.init(..., directory='runs/NAME').")
        if self._pending:
            raise ConfigError("run.save() between run.backward and optimizer.step() would lose gradients.")
        saved.parts.require_all_saved(self._stand_ins.values())
        self._unread.look()
        self._course.count_step()
        self._scaled_step.settle()
        self._session.heartbeat.mark("save", epoch=self.position.epoch, step=self.position.step)
        fingerprint, saved.extra = self.fingerprint(), self.extra
        return self._writer.write(self.options.directory, saved, fingerprint, wait=wait)

    def fingerprint(self) -> str:
        """SHA-256 over the bits of all parameters and buffers, after checking that all ranks agree. Collective."""
        parts = self.require_prepared().parts
        digests = {name: digest_tensor(tensor) for name, tensor in self.strategy.state()}
        if (group := self._session.group) is not None:
            everything, step = {**digests, **parts.digests()}, self.position.step
            start.require_equal_replicas(everything, step, group, self.device)
        return combine(digests)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's parameters and buffers by name, on the main process; empty on the others. Collective.

        The tensors may be the model's own.
        """
        return self.require_prepared().model_state(keep=self.is_main)

    def print(self, *values: object) -> None:
        """Prints on the main process only."""
        if self.is_main:
            print(*values, flush=True)

    def span(self, name: str) -> AbstractContextManager[None]:
        """Shows what is done inside as ``name`` in the timeline that ``profile`` asks for; without one, nothing."""
        return nullcontext() if self._timeline is None else self._timeline.span(name)

    def close(self) -> None:
        """Ends loader workers and leaves the process group. Called by itself when the program ends. Collective."""
        if self._timeline is not None:
            self._timeline.finish()
        self._feeder.close()
        self._session.close()

    def _let_go(self) -> None:
        if self._writer.busy:
            self._session.heartbeat.mark("save", epoch=self.position.epoch, step=self.position.step)
        self._writer.finish()
        self._writer.release()
        self.strategy.release()
        let_go_of_groups(
            self._agreed_data, self._skipped, *([self._saved] if self._saved is not None else [])
        )

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because a scaled gradient was not finite."""
        return self._scaled_step.skipped

    def steps_per_epoch(self, data: Any, *, drop_last: bool = False, model: nn.Module | None = None) -> int:
        """Optimizer steps that ``batches(data)`` makes, equal on every number of devices.

        Args:
            data: as for ``batches``.
            drop_last: as for ``batches``.
            model: the model, where it has not been prepared yet.
        """
        smallest = (
            smallest_micro_batch(model)
            if model is not None
            else self.require_prepared().placed.smallest_micro_batch
        )
        return self._feeder.plan(data, True, drop_last, smallest).steps_per_epoch

    def _between_steps(self) -> None:
        """Compares the replicas now and then, and stops if all ranks agreed to and no gradient would be lost."""
        self._pending.begin_batch()
        self._scaled_step.settle()
        self._writer.check()
        position, strategy = self.position, self.strategy
        every = 0 if strategy.independent else self.options.fingerprint_every
        if every and position.step % every == 0:
            self.fingerprint()
        if strategy.save_every and position.step % strategy.save_every == 0 and not self._pending:
            self._save_snapshot()
        if self._unread.stop and not self._pending:
            if self.options.directory is not None:
                self.save(wait=True)
            raise Stopped(self._unread.stop)
        heartbeat = self._session.heartbeat
        if position.step < heartbeat.marked_from:
            heartbeat.place[0] = position.step * STEP + _DATA
        else:
            note(heartbeat, "data", position.epoch, position.step)

    def _save_snapshot(self) -> None:
        if self.options.directory is not None:
            self.save()

    def _part_ways(self) -> None:
        """Leaves the process group for good: from here on the strategy's own exchange is all there is."""
        self.strategy.part_ways(self.position.step)
        let_go_of_groups(self._agreed_data, self._skipped, self.require_prepared())
        self._session.part(is_spare=self.strategy.is_spare)

    def require_prepared(self) -> saving.Saved:
        """All that a checkpoint of the run covers; ``ConfigError`` before ``prepare``."""
        if self._saved is None:
            raise ConfigError("Call model, optimizer = run.prepare(model, optimizer) first.")
        return self._saved
