"""Entry points of a rank of ``lockstep verify``: some steps of a job or of a user's script, observed.

``main`` trains a job and ``watch_script`` runs a script. A run, of the job or of a script with ``lockstep.init``, is
observed by a callback that does not change it and writes nothing to the user's folders; any other loop writes its own
records with a ``Recorder``. Both stop after the last requested step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lockstep.config.job import JobConfig
from lockstep.core.fingerprint import digest_tensor
from lockstep.core.world import World
from lockstep.data.batch import Batch
from lockstep.errors import ConfigError
from lockstep.job.assemble import assemble
from lockstep.launch import ScriptTarget
from lockstep.launch.rank_process import run_script
from lockstep.numerics.randomness import draws_in_forward
from lockstep.run import Run, RunOptions
from lockstep.run.optimizer_step import hyperparameters
from lockstep.runtime import Callback
from lockstep.runtime.events import observe_new_runs
from lockstep.strategies import IndependentStrategy, StepResult, gather_records
from lockstep.verify.plain.recorder import RecordingRequest, StopRecording, requested
from lockstep.verify.trace import StepTrace, Trace


class Observer(Callback):
    """Records the steps of a prepared run. Collective: every rank must create one and make the same calls."""

    def __init__(self, run: Run, label: str) -> None:
        self._run, self._saved = run, run.require_prepared().state
        self._group = self._saved.group
        self._seconds: list[float] = []
        self._observing = 0.0
        self._noted: dict[str, Any] = {}
        strategy = run.strategy
        self.trace = Trace(
            label=label,
            strategy=strategy.name,
            ranks=run.world.world_size,
            level=strategy.level.value,
            independent=isinstance(strategy, IndependentStrategy),
            context={
                key: str(value)
                for key, value in self._saved.context.as_dict().items()
                if key in ("threads", "device", "torch", "optimizers")
            },
            start=self._state()[0],
            draws=draws_in_forward(self._saved.parts.model),
        )
        self._names = [name for each in self._saved.model.members for group in each for name in group]
        run.add_callback(self)

    def begin_step(self) -> None:
        """Starts the clock of a step."""
        self._began, self._observing = time.perf_counter(), 0.0

    def end_step(self, loss: Tensor) -> None:
        """Records a step after the optimizer has stepped. Collective."""
        self._seconds.append(time.perf_counter() - self._began - self._observing)
        model, apart = self._state()
        captured = self._saved.capture("", keep=self._run.is_main)
        trained = set(self._names)
        self.trace.steps.append(
            StepTrace(
                step=len(self.trace.steps),
                loss=float(loss).hex(),
                parameters={name: digest for name, digest in model.items() if name in trained},
                buffers={name: digest for name, digest in model.items() if name not in trained},
                optimizer={name: digest_tensor(tensor) for name, tensor in captured.optimizer.items()},
                apart=apart,
                **self._noted,
            )
        )

    def finish(self, final: Path | None) -> Trace:
        """Ends the observation and writes the parameters to ``final``. Collective."""
        run = self._run
        self.trace.milliseconds = 1000 * statistics.median(self._seconds)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        everyone = self._gather((memory, run.strategy.bytes_sent))
        self.trace.memory = [int(memory) for memory, _ in everyone]
        self.trace.sent = max(sent for _, sent in everyone) / len(self._seconds)
        state = run.state_dict()
        if final is not None and run.is_main:
            save_file(
                {n: t.detach().clone().contiguous() for n, t in state.items() if t.is_floating_point()}, final
            )
        return self.trace

    def on_backward_begin(self, batch: Batch, scale: float) -> None:
        """Records the hyperparameters of the step."""
        self._noted = {"settings": hyperparameters(self._saved.parts.optimizers)}

    def on_backward_end(self, batch: Batch, result: StepResult) -> None:
        """Records samples, inputs, losses and gradients of all ranks. Collective."""
        if self.trace.independent:  # a collective would come between a gradient and its push
            return
        began = time.perf_counter()
        own: dict[str, dict[str, str]] = {"samples": {}, "inputs": {}}
        for part in batch.micro_batches:
            if part.k < batch.plan.leaves:
                own["samples"][str(part.k)] = digest_tensor(torch.as_tensor(part.indices))
                own["inputs"][str(part.k)] = _digest(part.data)
        everyone = self._gather(own)
        merged = {kind: _by_number(each[kind] for each in everyone) for kind in ("samples", "inputs")}
        self._noted |= {
            **merged,
            "losses": [float(value).hex() for value in result.losses.tolist()],
            "gradients": self._gradients(),
        }
        self._observing += time.perf_counter() - began

    def _gradients(self) -> dict[str, tuple[str, float]]:
        strategy, held = self._run.strategy, self._run.strategy.trainable()
        own = [name for name, parameter in held.items() if parameter.grad is not None]
        used = {name for names in self._gather(own) for name in names}
        found = {}
        for name in self._names:
            if name in used:
                gradient = held[name].grad if name in own else None
                whole = strategy.gather_full(name, gradient, self._saved.model.tensors[name].dtype)
                found[name] = digest_tensor(whole), float(whole.double().norm())
        return found

    def _state(self) -> tuple[dict[str, str], list[str]]:
        """Digests of the whole model, and the names whose bits differ between ranks. Collective."""
        digests = {name: digest_tensor(tensor) for name, tensor in self._run.strategy.state()}
        everyone = self._gather(digests)
        return digests, [name for name in digests if any(each[name] != digests[name] for each in everyone)]

    def _gather(self, value: Any) -> list[Any]:
        return gather_records(self._run.strategy, value, self._group)


def _digest(data: Any) -> str:
    """One digest of all tensors in a micro-batch's data."""
    return " ".join(digest_tensor(leaf)[:16] for leaf in tree_leaves(data) if isinstance(leaf, Tensor))


def _by_number(parts: Any) -> dict[str, str]:
    merged = {k: digest for part in parts for k, digest in part.items()}
    return {k: merged[k] for k in sorted(merged, key=int)}


def main(payload: Any) -> None:
    """Trains some steps of a job on this rank; rank 0 writes the trace.

    Args:
        payload: ``{"config": JSON of the job, "steps": number, "label": of the layout, "folder": for the trace}``.
    """
    logging.basicConfig(level=logging.ERROR)
    config, world = JobConfig.from_json(payload["config"]), World.from_environment()
    folder = Path(payload["folder"])
    try:
        trainer = assemble(config, world)
    except ConfigError as error:
        if world.is_main:
            strategy = config.training.strategy
            refused = Trace(payload["label"], strategy, world.world_size, "", refused=str(error))
            refused.write(folder / "trace.json")
        return
    observer = Observer(trainer.run, payload["label"])
    done = 0
    for _ in trainer.run.epochs(config.training.epochs):
        for batch in trainer.batches():
            observer.begin_step()
            observer.end_step(trainer.train_step(batch))
            done += 1
            if done == payload["steps"]:
                break
        if done == payload["steps"]:
            break
    trace = observer.finish(folder / "final.safetensors")
    if world.is_main:
        trace.write(folder / "trace.json")
    trainer.run.close()


RECORDS = "records"
"""Folder of a Recorder's files, beside the trace of an observed run."""


def watch_script(payload: Any) -> None:
    """Runs a script on this rank; rank 0 writes the trace.

    Args:
        payload: ``{"script": path, "arguments": list, "steps": number, "label": of the world, "folder": for files}``.
    """
    logging.basicConfig(level=logging.ERROR)
    folder = Path(payload["folder"])
    watch = _Watch(payload["label"], payload["steps"], folder)
    target = ScriptTarget(path=payload["script"], arguments=tuple(payload["arguments"]))
    token = requested.set(RecordingRequest(folder / RECORDS, payload["steps"]))
    try:
        with (
            Path(os.devnull).open("w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            observe_new_runs(watch, options=watch.redirect),
        ):
            run_script(target)
    except StopRecording:
        pass
    except SystemExit as ending:
        if ending.code:
            raise
    finally:
        requested.reset(token)
    trace = watch.finish()
    if trace is not None and World.from_environment().is_main:
        trace.write(folder / "trace.json")


class _Watch(Callback):
    """Observes the first run that a script prepares."""

    def __init__(self, label: str, steps: int, folder: Path) -> None:
        self._label, self._steps, self._folder = label, steps, folder
        self._run: Run | None = None
        self._observer: Observer | None = None
        self._trace: Trace | None = None

    def redirect(self, options: RunOptions) -> RunOptions:
        """The options of a run that starts anew and writes into the folder of verify."""
        directory = None if options.directory is None else self._folder / "run"
        return dataclasses.replace(options, directory=directory, resume="")

    def finish(self) -> Trace | None:
        """The trace, if a run was observed. Collective."""
        observer, self._observer = self._observer, None
        if observer is not None and observer.trace.steps:
            self._trace = observer.finish(self._folder / "final.safetensors")
        return self._trace

    def on_prepare_end(self, run: Run) -> None:
        """Observes the first run."""
        if self._run is None:
            self._run, self._observer = run, Observer(run, self._label)
            run.add_callback(_Steps(self._observer, self._steps))

    def on_close(self, run: Run) -> None:
        """Ends the observation while the process group is still open."""
        if run is self._run:
            self.finish()


class _Steps(Callback):
    """Tells an observer where steps begin and end, and stops the script after the last."""

    def __init__(self, observer: Observer, steps: int) -> None:
        self._observer, self._steps = observer, steps
        self._loss: Tensor | None = None

    def on_step_begin(self, batch: Batch) -> None:
        self._loss = None
        self._observer.begin_step()

    def on_gradients_ready(self, batch: Batch, loss: Tensor) -> None:
        self._loss = loss

    def on_step_end(self, batch: Batch) -> None:
        if self._loss is None:
            return
        self._observer.end_step(self._loss)
        if len(self._observer.trace.steps) >= self._steps:
            raise StopRecording
