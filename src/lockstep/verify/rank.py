"""Entry points of a rank of ``lockstep verify``: some steps of a job or of a user's script, observed.

``main`` trains a job, ``watch_script`` runs a script, and ``watch_micro_batches`` does either for one step. A run, of
the job or of a script with ``lockstep.init``, is observed by a callback that does not change it and writes nothing to
the user's folders; any other loop writes its own records with a ``Recorder``. All stop after the last requested step.
With ``"stop_after"`` a run is asked to save and stop instead, as by a signal, and another resumes there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

from lockstep.config.job import JobConfig
from lockstep.core.fingerprint import digest_tensor, digest_tensors
from lockstep.core.world import World
from lockstep.data.batch import Batch, MicroBatch, tensors_in
from lockstep.errors import ConfigError, ReplicaError
from lockstep.job.assemble import assemble
from lockstep.launch import ScriptTarget
from lockstep.launch.rank_process import run_script
from lockstep.numerics.randomness import draws_in_forward
from lockstep.numerics.running_buffers import normalises_by_batch
from lockstep.run import Run, RunOptions
from lockstep.run.prepare import hyperparameters
from lockstep.runtime import Callback
from lockstep.runtime.control import Stopped, StopReason
from lockstep.runtime.devices import peak_memory
from lockstep.runtime.events import observe_new_runs
from lockstep.strategies import IndependentStrategy, StepResult
from lockstep.trainer import Trainer
from lockstep.trainer.gradient_record import whole_gradients
from lockstep.verify.layouts import RUN_FOLDER
from lockstep.verify.micro_batches import AS_IT_IS, EVALUATING, WITHOUT_BATCH_NORM, FirstStep, Pass
from lockstep.verify.plain.checks import by_name
from lockstep.verify.plain.recorder import RecordingRequest, StopRecording, attributes, innermost, requested
from lockstep.verify.trace import FINAL, StepTrace, Trace, keep_refusal

_REHEARSED = 2
"""Steps that may be computed several times, by ``checks = "first"``."""


def settled(seconds: Sequence[float]) -> float:
    """The median of the steps after the checked ones; of all, where there are no more."""
    return statistics.median(seconds[_REHEARSED:] or seconds)


class Observer(Callback):
    """Records the steps of a prepared run, and raises ``StopRecording`` at the end of the last one.

    Collective: every rank must create one.

    Args:
        run: prepared, and resumed where it is.
        label: of the trace.
        steps: of the run, those before it was resumed among them.
    """

    def __init__(self, run: Run, label: str, steps: int) -> None:
        self.run, self._saved, self._steps = run, run.require_prepared().state, steps
        self.model = self._saved.parts.model
        self._seconds: dict[int, float] = {}
        self._observing = 0.0
        self._noted: dict[str, Any] = {}
        self._loss: Tensor | None = None
        self._in_body = -1
        """The step in whose body the loop is; -1 between two."""
        self._unrecorded: tuple[int, Tensor] | None = None
        self._outputs: dict[str, str] = {}
        self._kept = attributes({"": self.model})
        strategy, context = run.strategy, self._saved.context.as_dict()
        self._gather = strategy.gather_records
        self.trace = Trace(
            label=label,
            strategy=strategy.name,
            first=run.position.step,
            ranks=run.world.world_size,
            level=strategy.level.value,
            independent=isinstance(strategy, IndependentStrategy),
            context={key: str(value) for key, value in context.items()},
            start=self._state()[0],
            unit=torch.finfo(coarsest_type(run.options)).eps,
            draws=draws_in_forward(self.model),
        )
        self._names = [name for each in self._saved.model.members for group in each for name in group]
        self._trained = {*self._names, *(a for a, n in self._saved.model.aliases.items() if n in self._names)}
        for optimizer in self._saved.parts.optimizers:
            optimizer.register_step_pre_hook(self._note_settings)
        run.add_callback(self)

    def on_step_begin(self, batch: Batch) -> None:
        """Starts the clock of a step, after the end of one whose body was left by ``break``."""
        self._end_body()
        self._in_body = batch.plan.step
        self._began, self._observing = time.perf_counter(), 0.0

    def on_gradients_ready(self, batch: Batch, loss: Tensor) -> None:
        """Keeps the loss of the step; the end of its body has come before where the batch was taken ahead."""
        if self._in_body == batch.plan.step:
            self._loss = loss
        else:
            self._end(batch.plan.step, loss)

    def on_step_end(self, batch: Batch) -> None:
        """Records the step, unless the loop has left out its backward pass. Collective.

        A loop that takes a batch before it updates the parameters with the gradients of the last has not ended its step
        yet; that is recorded later.
        """
        if not self._end_body():
            return
        if self.trace.independent or not self.run.require_prepared().gradients.anywhere():
            self._record()
        if batch.plan.step + 1 >= self._steps:
            raise StopRecording

    def _end_body(self) -> bool:
        """Ends the step in whose body the loop is; False without a backward pass there."""
        step, loss, self._in_body, self._loss = self._in_body, self._loss, -1, None
        if loss is not None:
            self._end(step, loss)
        return loss is not None

    def _end(self, step: int, loss: Tensor) -> None:
        took = time.perf_counter() - self._began - self._observing
        self._seconds[step] = self._seconds.get(step, 0.0) + took
        self._unrecorded = step, loss

    def _record(self, *, but: int = -1) -> None:
        if self._unrecorded is None or self._unrecorded[0] == but:  # of which another pass comes
            return
        (step, loss), self._unrecorded = self._unrecorded, None
        model, apart = self._state()
        captured = self._saved.capture("", keep=self.run.is_main)
        trained = self._trained
        now = attributes({"": self.model}).items()
        changed = {name: value for name, value in now if self._kept.get(name) != value}
        self.trace.steps.append(
            StepTrace(
                step=step,
                loss=float(loss).hex(),
                parameters={name: digest for name, digest in model.items() if name in trained},
                buffers={name: digest for name, digest in model.items() if name not in trained},
                optimizer=digest_tensors(captured.compared),
                kept=by_name(self._gather(changed)),
                apart=apart,
                **self._noted,
            )
        )

    @property
    def has_steps(self) -> bool:
        """True after the first backward pass."""
        return bool(self._seconds) or self._loss is not None

    def finish(self, final: Path) -> Trace:
        """Returns the trace and writes parameters and buffers to ``final``. Collective."""
        run = self.run
        self._end_body()
        self._record()
        self.trace.milliseconds = 1000 * settled([*self._seconds.values()])
        memory = peak_memory(run.strategy.device)
        everyone = self._gather((memory, run.strategy.bytes_sent))
        self.trace.memory = [int(memory) for memory, _ in everyone]
        self.trace.sent = max(sent for _, sent in everyone) / len(self._seconds)
        state = run.state_dict()
        if run.is_main:
            real = {n: torch.view_as_real(t) if t.is_complex() else t for n, t in state.items()}
            save_file({name: t.detach().clone().contiguous() for name, t in real.items()}, final)
        return self.trace

    def on_backward_begin(self, batch: Batch, scale: float) -> None:
        """Records the hyperparameters of the step, and the step before where that has not ended until now."""
        self._record(but=batch.plan.step)
        if batch.plan.step >= self._steps:
            raise StopRecording
        if self._in_body != batch.plan.step:
            self._began, self._observing = time.perf_counter(), 0.0
        self._noted, self._outputs = {}, {}
        self._note_settings()

    def _note_settings(self, *_: object) -> None:
        """Records the hyperparameters; again before the update, since a loop may set them after the backward pass."""
        self._noted["settings"] = hyperparameters(self._saved.parts.optimizers)

    def on_output(self, micro_batch: MicroBatch, output: Any, target: Any) -> None:
        """Notes the output of the model for a micro-batch."""
        if not self.trace.independent:
            self._outputs[str(micro_batch.k)] = _digest(output)

    def on_backward_end(self, batch: Batch, result: StepResult) -> None:
        """Records samples, inputs, losses and gradients of all ranks. Collective."""
        if self.trace.independent:  # a collective would come between a gradient and its push
            return
        began = time.perf_counter()
        own = [
            (part.k, digest_tensor(torch.as_tensor(part.indices)), _digest(part.data))
            for part in batch.micro_batches
            if part.k < batch.plan.leaves
        ]
        parts = sorted((part for each in self._gather(own) for part in each), key=lambda part: part[0])
        outputs = {k: digest for each in self._gather(self._outputs) for k, digest in each.items()}
        modules = {name: "eval" for each, name in innermost(self.model).items() if not each.training}
        evaluating = by_name(self._gather(modules))
        self._noted |= {
            "outputs": outputs,
            "evaluating": {name: list(ranks) for name, ranks in evaluating.items()},
            "samples": {str(k): samples for k, samples, _ in parts},
            "inputs": {str(k): inputs for k, _, inputs in parts},
            "losses": [float(value).hex() for value in result.losses.tolist()],
            "gradients": self._gradients(),
        }
        self._observing += time.perf_counter() - began

    def _gradients(self) -> dict[str, tuple[str, float]]:
        whole = whole_gradients(self.run)
        found = {name: (digest_tensor(gradient), float(gradient.double().norm())) for name, gradient in whole}
        return {name: found[name] for name in self._names if name in found}

    def _state(self) -> tuple[dict[str, str], list[str]]:
        """Digests of the whole model, and the names whose bits differ between ranks. Collective."""
        digests = {name: digest_tensor(tensor) for name, tensor in self.run.strategy.state()}
        everyone = self._gather(digests)
        return digests, [name for name in digests if any(each[name] != digests[name] for each in everyone)]


def _digest(data: Any) -> str:
    """One digest of all tensors in a micro-batch's data."""
    return " ".join(digest_tensor(tensor)[:16] for tensor in tensors_in(data))


_COARSE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def coarsest_type(options: RunOptions) -> torch.dtype:
    """The coarsest type that some layout of a run rounds to, in its forward pass or in the sum of gradients."""
    names = (options.precision, options.reduce, options.fsdp.mixed_precision)
    types = [torch.float32, *(_COARSE[name] for name in names if name in _COARSE)]
    return max(types, key=lambda kind: torch.finfo(kind).eps)


_MIXES = -0x61C8864680B583EB
"""2^64 divided by the golden ratio, as a signed number: the high bits of a product with it depend on all bits."""


def nudge(model: nn.Module, kind: torch.dtype, number: int = 1) -> None:
    """Changes a model's inputs and the outputs of its layers by one unit in the last place of ``kind``, up or down.

    Which of the two is taken from the bits of each value, so that a micro-batch that is computed again is the same, and
    from the ``number`` of the change, 1 to 60. A model without a floating-point input, such as one of tokens, gets its
    parameters changed in place of inputs, once.
    """

    def nudged(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        bits = value.detach().double().view(torch.int64) * _MIXES >> 63 - number & 1
        signs = 2 * bits.to(value.dtype) - 1
        return value * (1 + signs * torch.finfo(kind).eps)

    def before(module: nn.Module, arguments: Any, keywords: Any) -> Any:
        given = (arguments, keywords)
        if any(tensor.is_floating_point() for tensor in tensors_in(given)):
            return tree_map(nudged, given)
        handle.remove()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(nudged(parameter))
        return given

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
    for layer in model.modules():
        if layer is not model and not any(layer.children()):
            layer.register_forward_hook(lambda module, given, output: tree_map(nudged, output))


def main(payload: Any) -> None:
    """Trains some steps of a job on this rank; rank 0 writes the trace.

    Args:
        payload: ``{"config": JSON of the job, "steps": number, "label": of the layout, "folder": for the trace}``, and
            ``"nudge"``, the number of a change with ``nudge``, or 0. ``"stop_after"`` is the number of steps after
            which the run saves and stops, or 0.
    """
    config, world = JobConfig.from_json(payload["config"]), World.from_environment()
    folder = Path(payload["folder"])
    with _quiet() as warnings:
        try:
            trainer = assemble(config, world)
        except ConfigError as error:
            strategy = config.training.strategy
            refused = Trace(payload["label"], strategy, world.world_size, "", refused=str(error))
            _write(refused, warnings, folder)
            return
        observer = _observe(trainer.run, payload)
        with contextlib.suppress(StopRecording, Stopped), _keeping_refusals(folder):
            _train(trainer, config)
        _write(observer.finish(folder / FINAL), warnings, folder)
        trainer.run.close()


def _observe(run: Run, payload: Any) -> Observer:
    """Observes a prepared run, which may be nudged, and may be asked to stop. Collective."""
    observer = Observer(run, payload["label"], payload["steps"])
    if number := payload.get("nudge", 0):
        nudge(observer.model, coarsest_type(run.options), number)
    if steps := payload.get("stop_after", 0):
        run.add_callback(_Stop(run, steps))
    return observer


def _write(trace: Trace, warnings: Sequence[logging.LogRecord], folder: Path) -> None:
    trace.warnings = [warning.getMessage() for warning in warnings]
    if World.from_environment().is_main:
        trace.write(folder / "trace.json")


def _train(trainer: Trainer, config: JobConfig) -> None:
    for _ in trainer.run.epochs(config.training.epochs):
        for batch in trainer.batches():
            trainer.train_step(batch)


class _Stop(Callback):
    """Asks a run to save and stop at the end of a step, as a signal would."""

    def __init__(self, run: Run, after: int) -> None:
        self._run, self._after = run, after

    def on_step_begin(self, batch: Batch) -> None:
        """Asks where the last step begins; on every rank in the same step."""
        if self._run.position.step + 1 >= self._after:
            self._run._session.heartbeat.own_reason = StopReason.PREEMPTED


@contextlib.contextmanager
def _quiet() -> Iterator[list[logging.LogRecord]]:
    """Shows nothing but errors; gives what Lockstep warns of, and shows it before an error."""
    logging.basicConfig()
    levels = {handler: handler.level for handler in logging.getLogger().handlers}
    for handler in levels:
        handler.setLevel(logging.ERROR)
    kept, own = BufferingHandler(sys.maxsize), logging.getLogger("lockstep")
    kept.setLevel(logging.WARNING)
    own.addHandler(kept)
    try:
        yield kept.buffer
    except Exception:
        sys.stderr.writelines(f"{record.getMessage()}\n" for record in kept.buffer)
        raise
    finally:
        own.removeHandler(kept)
        for handler, level in levels.items():
            handler.setLevel(level)


@contextlib.contextmanager
def _keeping_refusals(folder: Path) -> Iterator[None]:
    """Keeps the sentence with which Lockstep refuses what the block does."""
    try:
        yield
    except (ConfigError, ReplicaError) as error:
        keep_refusal(folder, World.from_environment().rank, str(error))
        raise


RECORDS = "records"
"""Folder of a Recorder's files, beside the trace of an observed run."""


def watch_script(payload: Any) -> None:
    """Runs a script on this rank; rank 0 writes the trace.

    Args:
        payload: ``{"script": path, "arguments": list, "steps": number, "label": of the world, "folder": for files}``,
            ``"nudge"`` and ``"stop_after"`` as in ``main``, and ``"resume"``, the folder of a run that has stopped, or
            an empty text.
    """
    folder = Path(payload["folder"])
    watch = _Watch(payload, folder)
    token = requested.set(RecordingRequest(folder / RECORDS, payload["steps"]))
    try:
        with _quiet() as warnings, observe_new_runs(watch, options=watch.redirect):
            _run_script(payload, folder)
    finally:
        requested.reset(token)
    if (trace := watch.finish()) is not None:
        _write(trace, warnings, folder)


def _run_script(payload: Any, folder: Path) -> None:
    """Runs a script without its output, until it ends or a callback ends it."""
    target = ScriptTarget(**payload["script"] | {"arguments": tuple(payload["script"]["arguments"])})
    try:
        with (
            Path(os.devnull).open("w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            _keeping_refusals(folder),
        ):
            run_script(target)
    except (StopRecording, Stopped):
        pass
    except SystemExit as ending:
        if ending.code:
            raise


class _Watch(Callback):
    """Observes the first run that a script prepares."""

    def __init__(self, payload: Any, folder: Path) -> None:
        self._payload, self._folder = payload, folder
        self._resume = payload.get("resume", "")
        self._observer: Observer | None = None
        self._trace: Trace | None = None
        self._further_runs = 0

    def redirect(self, options: RunOptions) -> RunOptions:
        """The options of a run that writes into the folder of verify, and resumes only what verify has stopped."""
        is_first = self._observer is None
        is_resumed = bool(self._payload.get("stop_after", 0) or self._resume)
        has_folder = options.directory is not None or (is_first and is_resumed)
        directory = self._folder / RUN_FOLDER if has_folder else None
        return dataclasses.replace(options, directory=directory, resume=self._resume if is_first else "")

    def finish(self) -> Trace | None:
        """The trace, if a run was observed. Collective."""
        if self._trace is None and self._observer is not None and self._observer.has_steps:
            self._trace = self._observer.finish(self._folder / FINAL)
        if self._trace is not None:
            self._trace.further_runs = self._further_runs
        return self._trace

    def on_prepare_end(self, run: Run) -> None:
        """Observes the first run."""
        if self._observer is None:
            self._observer = _observe(run, self._payload)
        elif run is not self._observer.run:
            self._further_runs += 1

    def on_close(self, run: Run) -> None:
        """Ends the observation while the process group is still open."""
        if self._observer is not None and run is self._observer.run:
            self.finish()


def watch_micro_batches(payload: Any) -> None:
    """Computes the first step of a job or a script in a given number of micro-batches, and writes what it found.

    Args:
        payload: ``{"micro_batches": number, "variant": of VARIANTS, "folder": for files}``, and ``"config"`` or
            ``"script"`` and ``"arguments"``, as in ``main`` and ``watch_script``.
    """
    logging.basicConfig(level=logging.CRITICAL)
    folder = Path(payload["folder"])
    watch = _FirstStepWatch(payload["micro_batches"], payload["variant"], folder)
    with observe_new_runs(watch, options=watch.redirect):
        if "config" in payload:
            config = JobConfig.from_json(payload["config"])
            with contextlib.suppress(StopRecording), _keeping_refusals(folder):
                _train(assemble(config, World.from_environment()), config)
        else:
            _run_script(payload, folder)
    if watch.found.passes:
        watch.found.write(folder / "step.json")


class _FirstStepWatch(Callback):
    """Records the first step of the first run that is prepared, and raises ``StopRecording`` at its end."""

    def __init__(self, micro_batches: int, variant: str, folder: Path) -> None:
        self.found, self._variant, self._folder = FirstStep(micro_batches), variant, folder
        self._run: Run | None = None
        self._scale = 1.0

    def redirect(self, options: RunOptions) -> RunOptions:
        """The options of a run that starts from the beginning, is checked, and writes into the folder of verify."""
        directory = None if options.directory is None else self._folder / RUN_FOLDER
        number = self.found.micro_batches
        return dataclasses.replace(
            options, micro_batches=number, checks="always", directory=directory, resume="", profile=""
        )

    def on_prepare_end(self, run: Run) -> None:
        """Watches the first run."""
        if self._run is None:
            self._run = run
            self.found.tolerance = max(1e-4, 4 * torch.finfo(coarsest_type(run.options)).eps)

    def on_step_begin(self, batch: Batch) -> None:
        """Switches off what the variant does without, and notes how the batch is cut."""
        self._switch_off()
        self.found.samples = len(batch.plan.indices[0])
        shapes = {str(tuple(tensor.shape[1:])) for part in batch.micro_batches for tensor in tensors_in(part.data)}
        self.found.shapes = sorted(shapes)

    def on_backward_begin(self, batch: Batch, scale: float) -> None:
        """Does so again where the body of the loop calls ``model.train()``."""
        self._switch_off()
        self._scale = scale

    def on_gradients_ready(self, batch: Batch, loss: Tensor) -> None:
        """Keeps the loss and the gradients."""
        if self._run is None:
            return
        path = self._folder / f"gradients-{len(self.found.passes)}.safetensors"
        held = self._run.strategy.trainable().items()
        save_file({name: p.grad.double().contiguous() / self._scale for name, p in held if p.grad is not None}, path)
        self.found.passes.append(Pass(float(loss), str(path)))

    def on_step_end(self, batch: Batch) -> None:
        """Ends the run."""
        if self.found.passes and self._run is not None:
            self.found.deviations = self._run.rehearsals.deviations
            raise StopRecording

    def _switch_off(self) -> None:
        if self._run is None:
            return
        for module in self._run.require_prepared().forward_pass.model.modules():
            self.found.batch_norm |= normalises_by_batch(module) and not self._run.options.sync_batch_norm
            off: tuple[type, ...] = {
                AS_IT_IS: _DROPPING,
                WITHOUT_BATCH_NORM: (*_DROPPING, _NormBase),
                EVALUATING: (nn.Module,),
            }[self._variant]
            if isinstance(module, off):
                module.training = False


_DROPPING = (_DropoutNd, nn.RNNBase, nn.MultiheadAttention)
"""Modules that drop at random in training mode and compute the same in both modes beside that."""
