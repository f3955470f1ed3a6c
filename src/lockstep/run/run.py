"""The user's handle on a run: its methods are the calls around an ordinary training loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lockstep.config.options import RunOptions
from lockstep.config.strategy_options import devices_per_process
from lockstep.core.fingerprint import checksums, combine, digest_tensors
from lockstep.core.world import World
from lockstep.data.batch import Batch
from lockstep.data.images.decoding import decoded_as
from lockstep.distributed.collectives import drop_process_groups
from lockstep.errors import ConfigError
from lockstep.numerics.compilation import fix_graphs
from lockstep.numerics.initial_values import InitialValues
from lockstep.numerics.portable import make_portable
from lockstep.numerics.precision import Precision
from lockstep.profile import timeline
from lockstep.run import save
from lockstep.run.checks import agreement
from lockstep.run.checks.rehearsal import Rehearsals
from lockstep.run.epoch_loop import EpochLoop, EpochSteps, Position
from lockstep.run.evaluation import evaluate, evaluation, predict
from lockstep.run.loaders import LoaderCache, counting_skipped, smallest_micro_batch
from lockstep.run.metrics import Metric, SetMetric, StepMetrics
from lockstep.run.optimizer_step import GradientState
from lockstep.run.prepare import Parts, context_of_run, prepare_model, stepped_before
from lockstep.run.resumption import Resumption, mention_nothing_left, resume
from lockstep.run.save import CheckpointWriter
from lockstep.run.session import RunSession, seed_unless_seeded, warn_if_begun, warn_if_unseeded, world_of_process
from lockstep.run.state import PreparedRun, RunState
from lockstep.run.step import (
    BackwardPass,
    DeferredResults,
    ForwardPass,
    StepCompute,
    code_of,
    required_loss,
    with_exact_mean,
    with_step,
)
from lockstep.run.step_errors import note_data
from lockstep.run.whole_batch import require_whole_models, stand_in
from lockstep.runtime.events import Callback, CallbackHandle, options_of_new_run
from lockstep.runtime.lazy_compiler import apart_from_graphs
from lockstep.strategies import IndependentStrategy, StepResult, Strategy, open_strategy

_OWN_EVERY = 100
"""Steps between two checks of the parameters of a process that is compared with no other."""


class Run:
    """One training run, seen from one process. Made by ``lockstep.init``; every rank must make the same calls.

    Args:
        options: the recipe, and how it is carried out.
        world: the place of this process among the ranks; read from the environment by default.
    """

    def __init__(self, options: RunOptions, world: World | None = None) -> None:
        world = world or world_of_process()
        if not isinstance(options, RunOptions):
            raise ConfigError("Call lockstep.init(...), or give Run the options RunOptions.of(...).")
        self.options = options = timeline.as_launched(options_of_new_run(options), world)
        options = replace(options, timeout=world.patience(options.timeout))
        self._session = RunSession(world, options.threads, options.timeout, devices_per_process(options.mesh))
        self.world, self.device, self._events = world, self._session.device, self._session.events
        self._events.add_observers_of_new_runs()
        group = self._session.group
        agreement.require_equal_settings(options.as_text(), group, self.device)
        if options.directory is not None:  # from here on the script may go to another folder
            self.options = replace(self.options, directory=save.require_readable(Path(options.directory).absolute()))
        self._precision = Precision.of(options, self.device)
        self._precision.configure_backend()
        self.is_portable = make_portable(options, world, self.device)
        """True if the bits do not depend on the CPU; see the option ``portable``."""
        self.strategy: Strategy = open_strategy(options, group, self.device, self._events)
        options.shape.check_holders(self.strategy.share.holders)
        self.extra: dict[str, Any] = {}
        """Stored in checkpoints and given back on resume; must survive JSON."""
        self.rehearsals = Rehearsals(options, self.strategy, self._events, is_main=self.is_main)
        self._loop = EpochLoop(self._events, is_alone=group is None)
        self._loaders = LoaderCache(options, self.strategy, warns=self.is_main)
        self._prepared: PreparedRun | None = None
        self._initial_values = InitialValues(options.seed)
        self._writer, self._resumption = CheckpointWriter(options, world), Resumption(self._loop)
        self._results = DeferredResults(self.device, self._precision.scaler is not None, warns=self.is_main)
        self._agreed_data = agreement.AgreedData(self.strategy, self.position, options, warns=self.is_main)
        self._is_first_step = options.checks != "off" and self.strategy.all_ranks is not None
        """True until the first step of this process: replicas that drift from the start are not left to later."""
        self._session.before_close = self._release
        self._unseeded = seed_unless_seeded(options.seed)
        self._session.heartbeat.will_poll()

    @property
    def is_main(self) -> bool:
        """True for the process that logs, prints and writes."""
        return self.world.is_main

    @property
    def position(self) -> Position:
        """The place of the run: its epoch, the steps done in it, and all steps so far."""
        return self._loop.position

    def add_callback(self, callback: Callback) -> CallbackHandle:
        """Calls the methods of ``callback`` from the next event on, until ``remove()`` of the returned handle."""
        return self._events.add(callback)

    def empty_model(self) -> AbstractContextManager[None]:
        """A context in which a model is built without values, which it gets in ``prepare``.

        Build and initialise the model inside. Under ``fsdp`` a process then never holds more than its part of the model
        and one whole parameter, so the model may be larger than the memory of a process. The values follow from
        ``seed``, the same under every strategy and on any number of processes. They differ from those of a model that
        is built outside.
        """
        return self._initial_values.recording()

    def prepare(self, model: nn.Module, *others: Any, values_from_main: bool = False) -> Any:
        """Sets up the model and takes charge of optimizers and schedulers. Collective.

        The ranks' settings and models are compared (``ConfigError`` names what differs), rank 0's values are given to
        all, and with ``resume`` the checkpoint is loaded.

        Args:
            model: the model; on the CPU, or where it will be trained.
            others: optimizers, learning-rate schedulers, and modules such as an ``AveragedModel``.
            values_from_main: only rank 0 has loaded weights; differences are expected and not reported.

        Returns:
            The model and the wrapped others, in the order of the arguments; the model alone if it was alone.
        """
        self._session.require_open()
        if self._prepared is not None:
            raise ConfigError(
                "run.prepare was called twice. Put several models into one nn.ModuleDict. For another training, write "
                "run.close(), and begin again with lockstep.init."
            )
        parts = Parts.of(model, others, self._initial_values, keep_empty=self.strategy.fills_model)
        self._session.heartbeat.mark("prepare")
        stepped = stepped_before(parts)
        if self.is_main:
            save.clean_up(self.options.directory)
            timeline.make_file(self.options)
        self._prepared = prepared = self._prepare_parts(parts, values_from_main)
        prepared_model = prepared.state.model
        self._writer.open_group(self.strategy)
        resumption, self._resumption.run = self._resumption, prepared.state
        self._loop.attach(
            prepared.state.loop, prepared_model.randomness.key_loop, resumption.check_start, resumption.note_end
        )
        if not self._resume(prepared) and self.is_main:
            warn_if_unseeded(parts.model, self._unseeded)
            warn_if_begun(stepped)
        if isinstance(self.strategy, IndependentStrategy):
            self.strategy.leave_process_group(self.position.step, self.world)
            self._session.leave_process_group(is_expendable=self.strategy.is_expendable)
        if self.options.profile:
            profiled = timeline.open_timeline(self.options, self.world, self.device)
            self._loaders.traces = profiled.traces
            profiled.handle = self.add_callback(profiled)
        for call in self._events.prepare_end:
            call(self)
        returned = {**prepared.wrapped_optimizers, **prepared_model.averages}
        if not others:
            return prepared_model.module
        return prepared_model.module, *(returned.get(id(each), each) for each in others)

    def _prepare_parts(self, parts: Parts, values_from_main: bool) -> PreparedRun:
        """Compares the parts over the ranks, and sets them up as the strategy needs them. Collective."""
        context = context_of_run(self.options, self._session, parts.optimizers, portable=self.is_portable)
        if (group := self._session.group) is not None:
            agreement.agree(parts, context, group, self.device, values_from_main)
        self.strategy.initial_values = self._initial_values
        conditions = context, agreement.made_with(parts.model)
        prepared_model = prepare_model(parts, self.options, self.strategy, self._precision)
        state = RunState(
            parts, prepared_model, self.strategy, self._precision, self.position, *conditions, self.world, self._events
        )
        forward_pass = ForwardPass(
            prepared_model.module, self._precision, self.device, self.options.channels_last, self._events
        )
        gradients = GradientState(
            parts.optimizers, self.strategy, self._precision, prepared_model.parameters, parts.frozen
        )
        wrapped = gradients.wrap(prepared_model.members, prepared_model.parameters)
        state.extra, state.add_group = self.extra, [each.add_param_group for each in wrapped.values()]
        return PreparedRun(state, forward_pass, gradients, wrapped)

    def _resume(self, prepared: PreparedRun) -> bool:
        """Loads the checkpoint that the options name, if there is one; returns whether there was. Collective."""
        state, gradients = prepared.state, prepared.gradients
        how = {"restarted": self.world.restart > 0, "is_main": self.is_main}
        with gradients.setting_values():
            if not resume(state, self.options, self.fingerprint, **how):
                return False
        self.extra.clear()  # it may have a name in the script
        self.extra.update(state.extra)
        state.extra = self.extra
        gradients.resume()
        self._resumption.begin()
        self._agreed_data.resume(state.data)
        return True

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs from where the run stands (0, or where it resumed) to ``count - 1``. Collective."""
        self._resumption.begin_epochs(count)
        if self.is_main and self._loop.is_resumed and not self._loop.position.inside:
            mention_nothing_left(count, self.position.epoch)
        return self._loop.epochs(count, lambda: save.end_epoch(self, self._results.stop))

    def batches(
        self, data: Any, *, shuffle: bool = True, drop_last: bool = False, workers: int | None = None
    ) -> EpochSteps:
        """The steps of one epoch, each the batch of one optimizer step. Collective.

        Order and augmentation follow from the seed and the epoch; outside of ``epochs`` every call is the next epoch.

        Args:
            data: a data set or stream, a DataLoader, whose settings but the batch size are used, or a tuple of these.
            shuffle: visit the samples in a keyed order; a DataLoader's own setting counts, also for ``drop_last``.
            drop_last: leave out the last, smaller batch.
            workers: processes that read ahead; by default those of the DataLoader, or none.

        Returns:
            An iterator. Its ``len()`` is the number of steps that are left, without those done before a resume.
        """
        prepared = self.require_prepared()
        self.strategy.require_no_failure()
        self.strategy.require_no_calls()
        has_changed = self._loaders.refresh(data, "training")
        source = self._loaders.source(data)
        fix_graphs()
        smallest, photos = prepared.state.model.smallest_micro_batch, decoded_as(source.dataset)
        self.synchronize()
        plan = self._loaders.plan(data, shuffle, drop_last, smallest)
        self._agreed_data.require_freezing(prepared.forward_pass.model)
        compared = self._loaders.compared(data, workers)
        self._agreed_data.require(plan, photos, compared, prepared.state.loop, has_changed=has_changed)
        self._agreed_data.require_equal_changes(prepared.state.loop)
        prepared.state.reads_photos(photos)
        loader = self._loaders.training(data, plan, workers)
        prepared.forward_pass.device_transform = source.device_transform
        self._session.heartbeat.note_thread()
        self._session.heartbeat.mark("data", epoch=self.position.epoch, step=self.position.step)
        at_end = self._loaders.at_last_step(data, loader, prepared.state.loop, self._loop)
        batches = partial(loader.batches, at_end=at_end)
        read = counting_skipped(batches, source.dataset, self.strategy, self.options.seed, says=self.is_main)
        left = self._loop.steps_left(plan.steps_per_epoch)
        return EpochSteps(self._loop.steps(read, self._between_steps), left)

    @apart_from_graphs
    def backward(
        self,
        batch: Batch,
        loss: Callable[..., Any] | None = None,
        *,
        forward: Callable[[Any], Any] | None = None,
        also: Mapping[str, Metric] | Collection[str] | None = None,
        whole_batch: bool = False,
    ) -> Any:
        """Sets the gradient of the mean loss over the global batch on the parameters. Collective.

        Args:
            batch: from ``batches``.
            loss: function of (output, target). It returns the mean over the micro-batch (a 0-dim tensor), one value
                per sample or token, or the pair (sum, weight).
            forward: gives the output from a micro-batch's data, if ``model(input)`` does not; ``loss`` is then called
                with (output, data).
            also: functions like those of ``evaluate``, by name, which are computed from the same outputs without
                gradients, such as an accuracy; or names of entries beside "loss" of the dict that ``loss`` returns
                (with ``whole_batch`` they are of the whole batch).
            whole_batch: ``loss`` compares the samples of the global batch with each other, as contrastive losses do.
                It is called once, on every rank, with the outputs and targets of all samples in their order (with
                ``forward``, or a dict as a batch, the target is None). The model runs twice on each micro-batch, first
                without gradients. Parameters that the loss needs, such as a learned temperature, must be in the output.

        Returns:
            The mean loss over the global batch, float64, 0-dim, equal on every rank, on the device. With ``also``, the
            pair of it and a dict of such means.

        Raises:
            ConfigError: ``batch`` or ``loss`` is something else, or gradients are switched off.
            NonFiniteError: a loss or gradient is NaN or infinite; names the step and the samples.
        """
        if also is None:
            return self.backward_by(self.strategy.backward, batch, loss, forward, whole_batch=whole_batch)
        loss = required_loss(batch, loss)
        metrics = StepMetrics.of(also, loss, self.rehearsals.new_metrics, whole_batch=whole_batch)
        compute = self.strategy.backward
        with metrics.explained():
            value = self.backward_by(compute, batch, loss, forward, metrics, whole_batch=whole_batch)
        means = metrics.means(self.strategy, batch.plan, is_main=self.is_main)
        self.rehearsals.note_checked(metrics.checked)
        return value, means

    def backward_by(
        self,
        compute_gradients: Callable[..., StepResult],
        batch: Batch,
        loss: Callable[..., Any] | None,
        forward: Callable[[Any], Any] | None = None,
        metrics: StepMetrics | None = None,
        *,
        whole_batch: bool = False,
    ) -> Tensor:
        """As ``backward``, with gradients computed by a function like ``Strategy.backward``. Collective."""
        with self.backward_pass(batch, loss, forward, metrics, whole_batch=whole_batch) as opened:
            opened.result = compute_gradients(batch, opened.compute, scale=opened.scale, stop=opened.stop)
        return opened.result.loss

    @contextmanager
    def backward_pass(
        self,
        batch: Batch,
        loss: Callable[..., Any] | None,
        forward: Callable[[Any], Any] | None = None,
        metrics: StepMetrics | None = None,
        *,
        whole_batch: bool = False,
        rehearse: bool = True,
    ) -> Iterator[BackwardPass]:
        """Surrounds the computation of a batch's gradients, which sets ``result``. Collective; see ``backward``."""
        prepared, loss = self.require_prepared(), required_loss(batch, loss, forward)
        if whole_batch:
            require_whole_models(self.strategy, sync_batch_norm=self.options.sync_batch_norm)
        gradients, randomness = prepared.gradients, prepared.state.model.randomness
        self._precision.require_settings()
        self._precision.require_repeatable("The loss function", loss)
        gradients.begin_backward()
        plan, heartbeat, events = batch.plan, self._session.heartbeat, self._events
        prepared.forward_pass.require_samples(plan)
        key = self._loop.begin_backward(plan, gradients) * self.options.micro_batches
        rows, own = len(plan.indices[0]), len(batch.micro_batches)
        heartbeat.begin_step(plan.epoch, plan.step, plan.packed, rows, own)
        function = with_exact_mean(loss) if metrics is None else metrics.loss_of(loss)
        compute = StepCompute(
            prepared.forward_pass, randomness, heartbeat, events, plan, function, forward, key, metrics
        )
        code = with_step(int(heartbeat.stop_reason), plan.step, is_alone=self._session.group is None)
        opened = BackwardPass(compute, gradients.scale, code)
        due = self.rehearsals.due.get(code_of(loss))
        is_due = due is None or (plan.epoch > due.after_epoch and plan.step >= due.from_step)
        if due is not None and due.at_latest is not None:
            is_due |= plan.step >= due.at_latest or self._loop.is_last_step(plan)
        rehearses = rehearse and is_due
        try:
            if rehearses:
                rehearsed = replace(compute, function=stand_in) if whole_batch else compute
                with events.span("rehearsal"):
                    self.rehearsals.begin(prepared, rehearsed, batch, loss, opened.scale)
            if whole_batch:
                opened.compute = self.rehearsals.of_whole_batch(compute, batch, looks=rehearses)
            for begins in events.backward_begin:
                begins(batch, opened.scale)
            yield opened
        except BaseException as error:
            randomness.interrupt()
            if self._session.group is None:
                self.strategy.abandon()
            elif isinstance(error, Exception):
                self.strategy.fail(f"run.backward of step {plan.step}", error)
            if isinstance(error, Exception):
                note_data(error, batch, prepared.forward_pass.model)
            raise
        for ends in events.backward_end:
            ends(batch, opened.result)
        randomness.end_step(plan.step)
        self._results.add(opened.result, plan)
        gradients.end_backward()
        self._loop.end_backward(plan)
        opened.compute.end()
        for are_ready in events.gradients_ready:
            are_ready(batch, opened.result.loss)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their total norm is at most ``max_norm``; returns the norm before, 0-dim.

        The sum of squares is taken in float64 per parameter row and folded in a fixed order. Collective.

        Raises:
            ConfigError: ``max_norm`` is not a number of 0 or more, or no gradients have been computed.
        """
        is_number = isinstance(max_norm, Real) or (isinstance(max_norm, Tensor) and max_norm.numel() == 1)
        if not is_number or not max_norm >= 0:
            raise ConfigError(f"run.clip_gradients takes a norm of 0 or more, and was given {max_norm!r}.")
        return self.require_prepared().gradients.clip(max_norm)

    def evaluate(
        self,
        data: Any,
        metric: Metric | SetMetric | Mapping[str, Metric | SetMetric],
        *,
        model: nn.Module | None = None,
        forward: Callable[[Any], Any] | None = None,
        workers: int | None = None,
        repeatable: bool = False,
    ) -> Any:
        """The mean of a metric over every sample, each counted once. Collective.

        Args:
            data: a map-style data set or a DataLoader.
            metric: a function of (output, target), or several by name; see ``backward`` for what it may return. An
                object with ``update(output, target)``, ``compute()`` and ``reset()``, such as a metric of torchmetrics,
                is given all samples in their order on the main process.
            model: another model than the trained one, such as a moving average of its weights.
            forward: as in ``backward``.
            workers: as in ``batches``.
            repeatable: a request to stop ends the evaluation early, and a resumed run repeats everything after the
                last step of the epoch; not if something there has changed what a checkpoint holds, such as a
                schedule. By default the evaluation runs to its end, and the run stops at the next step.

        Returns:
            A float, or floats by name. If ``compute()`` of the metric ``iou`` gives a dict or a list of numbers, one
            for each class, they are ``iou_KEY`` or ``iou_0``, ``iou_1``, ...; those of a single metric are ``KEY``.

        Raises:
            ConfigError: a metric is neither a mean over samples nor such an object.
        """
        self._precision.require_settings()
        loop = self.require_prepared().state.loop
        with self.span("evaluate"), loop.reading():
            results = evaluate(self, metric, data, model, forward, workers, repeatable)
        loop.note_results(results)
        for call in self._events.evaluation:
            call(self.position.step, results)
        return results

    def predict(
        self,
        data: Any,
        keep: Callable[[Any], Tensor] | None = None,
        *,
        model: nn.Module | None = None,
        forward: Callable[[Any], Any] | None = None,
        workers: int | None = None,
        everywhere: bool = False,
    ) -> Tensor | None:
        """The model's output for every sample, each once, in the order of the data set. Collective.

        Every output has the same bits on any number of devices, as far as the strategy promises level A. ``model``,
        ``forward`` and ``workers`` are those of ``evaluate``.

        Args:
            data: a map-style data set or a DataLoader; its samples are those of ``evaluate``, or only inputs.
            keep: a function from the output for a micro-batch to the tensor that is kept, with a row for each sample,
                such as ``lambda output: output.argmax(1)``; by default the output itself is kept.
            everywhere: give the result to every process, as for a loop that chooses samples or labels by it.

        Returns:
            A tensor of shape (samples, ...) on the CPU of the main process, or of every one with ``everywhere``; None
            on the others.

        Raises:
            ConfigError: there is no row for each sample, as when some are drawn, or rows differ in shape or dtype.
            RankError: a worker of an asynchronous parameter server was lost, and its outputs with it.
        """
        self._precision.require_settings()
        alone = self.options.directory is None  # then a request to stop need not wait for the end of a step
        reading = self.require_prepared().state.loop.reading()
        with self.span("predict"), reading, evaluation(self, data, model, forward, workers, alone, keep) as opened:
            return predict(opened, everywhere=everywhere)

    def save(self, *given: Any, wait: bool = False, directory: Path | str | None = None) -> Path | None:
        """Writes a checkpoint of the run as it stands, after checking that all ranks agree. Collective.

        Inside the loop over ``batches``, call it at the end of the loop's body: the step counts as done. The state is
        copied, and training continues while the copy is written. A ``CheckpointError``, as of a full disk, is raised on
        the main process at the end of the next step, by the next save, or at the end of the program.

        Args:
            wait: return only when the checkpoint is on the disk; always so with ``save_in_background=False``.
            directory: a folder other than the run's.

        Returns:
            The folder of the checkpoint, which may not be there yet, on the main process; None on the others.
        """
        if given:
            raise ConfigError(f"run.save({given[0]!r}): give a folder, directory=, or save run.state_dict().")
        prepared, directory = self.require_prepared(), directory or self.options.directory
        if directory is None:
            raise ConfigError("run.save() needs the run folder: lockstep.init(..., directory='runs/NAME').")
        prepared.gradients.require_stepped()
        prepared.state.parts.require_all_saved(prepared.wrapped_optimizers.values())
        with self.span("save"):
            self._results.read()
            self._loop.count_step()
            self._resumption.begin_save()
            prepared.gradients.update_scale()
            self._session.heartbeat.mark("save", epoch=self.position.epoch, step=self.position.step)
            for begins in self._events.save_begin:
                begins(self.position.step)
            fingerprint, prepared.state.extra = self.fingerprint(), self.extra
            prepared.state.data = self._agreed_data.stored
            folder = self._writer.write(directory, prepared.state, fingerprint, wait=wait)
            self._resumption.note()
        for call in self._events.save:
            call(self.position.step, folder)
        return folder

    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, over all parameters and buffers, after checking that ranks agree. Collective."""
        return combine(self._agreed_digests(digest_tensors))

    def _agreed_digests(self, digests: Callable[..., dict[str, str]]) -> dict[str, str]:
        """The digests of the model's state, after checking that all ranks agree on them. Collective."""
        prepared, of_all = self.require_prepared(), self.strategy.share.holders == self.world.world_size
        calls = prepared.gradients.calls()
        with self.span("fingerprint"):
            return agreement.agreed_digests(prepared.state, digests, of_all_modules=of_all, more=calls)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the whole model on the CPU, by name, on the main process; empty elsewhere. Collective."""
        if not self.strategy.replicated:  # otherwise they are one process's
            self.compare_replicas()
        return self.require_prepared().state.model_state(keep=self.is_main)

    def load_state_dict(self, weights: Mapping[str, Any]) -> None:
        """Sets parameters and buffers to what ``state_dict`` gave, under every strategy. Collective.

        The weights are the main process's. Every process has all of them for a moment. Optimizers stay as they are.

        Raises:
            ConfigError: they are of another model, or the parameter server is asynchronous.
        """
        prepared, group = self.require_prepared(), self._session.group
        if isinstance(self.strategy, IndependentStrategy):
            raise ConfigError("With an asynchronous server, load weights before run.prepare.")
        self.strategy.require_no_calls()
        whole = save.weights_of_main(weights, prepared.state.model, group, self.device)
        with prepared.gradients.setting_values():
            self.strategy.load_state(whole)

    def print(self, *values: object, **options: Any) -> None:
        """Prints on the main process only, with the options of Python's own ``print``; flushed at once by default."""
        if self.is_main:
            print(*values, **{"flush": True, **options})

    def span(self, name: str) -> AbstractContextManager[None]:
        """Shows what is done inside as ``name`` in the timeline that ``profile`` asks for, and tells callbacks."""
        return self._events.span(name)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Closes the run, unless an error left the block: closing waits for processes that may not come."""
        if kind is None:
            self.close()

    def close(self) -> None:
        """Ends loader workers and leaves the process group; called by itself at the end of the program. Collective."""
        for call in self._events.close:
            call(self)
        self._loaders.close()
        self._session.close()

    def _release(self) -> None:
        if self._prepared is not None and self.is_main:
            self._prepared.gradients.tell_if_never_stepped()
        if self._writer.background.busy:
            self._session.heartbeat.mark("save", epoch=self.position.epoch, step=self.position.step)
        self._writer.release()
        self.strategy.release()
        drop_process_groups(self.strategy)

    @property
    def skipped_steps(self) -> int:
        """Steps that fp16 skipped because a scaled gradient was not finite, including those before a resume."""
        return self._precision.skipped_steps

    def steps_per_epoch(self, data: Any, *, drop_last: bool = False, model: nn.Module | None = None) -> int:
        """The number of steps that ``batches(data)`` gives, the same on every number of devices.

        Args:
            data: as for ``batches``.
            drop_last: as for ``batches``.
            model: the model, where it has not been prepared yet.
        """
        if model is not None:
            smallest = smallest_micro_batch(model)
        elif self._prepared is None:
            raise ConfigError("Before run.prepare, give the model: run.steps_per_epoch(loader, model=model).")
        else:
            smallest = self._prepared.state.model.smallest_micro_batch
        return self._loaders.plan(data, True, drop_last, smallest).steps_per_epoch

    def _between_steps(self) -> None:
        """Compares the replicas now and then, and stops if all ranks agreed to and no gradient would be lost."""
        gradients = self.require_prepared().gradients
        self._resumption.require_nothing_since("body")
        gradients.begin_batch()
        gradients.update_scale()
        self._writer.background.check()
        position, strategy = self.position, self.strategy
        save_every = strategy.save_every if isinstance(strategy, IndependentStrategy) else 0
        is_telling = self._loop.is_after_last_step or self._is_first_step
        self._is_first_step = False
        if is_telling or position.step % (self.options.fingerprint_every or _OWN_EVERY) == 0:
            self.compare_replicas()
        is_due = save_every and position.step % save_every == 0
        if is_due and not gradients and self.options.directory is not None:
            self.save()
            self._resumption.forget()
        if self._results.stop and not gradients.anywhere():
            save.stop_after_step(self, self._results.stop)
        self._session.heartbeat.await_data(position.epoch, position.step)

    def compare_replicas(self) -> None:
        """Raises ``ReplicaError`` where ranks hold other values, unless ``fingerprint_every`` is 0. Collective."""
        self._precision.tell_shortages()
        if self._session.group is None:
            self.require_prepared().state.model.require_own_parameters()
        elif self.options.fingerprint_every:
            self._agreed_digests(partial(checksums, device=self.device))

    def synchronize(self) -> None:
        """Brings processes that train without a process group to the same state; else does nothing. Collective."""
        if isinstance(self.strategy, IndependentStrategy):
            self.strategy.synchronize()

    def require_prepared(self) -> PreparedRun:
        """Everything that ``prepare`` made; ``ConfigError`` before it was called."""
        if self._prepared is None:
            raise ConfigError("Call model, optimizer = run.prepare(model, optimizer) first.")
        if self._session.is_closed:  # asked here: a step runs through no file of the session
            self._session.require_open()
        return self._prepared
