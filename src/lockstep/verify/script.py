"""What a rank of ``lockstep verify --script`` runs: a user's own script, as it is, watched for some steps.

A loop on ``lockstep.init`` is observed from inside of its ``Run``, like a job; any other writes its own records with a
``Recorder``. Both end after the last step that is wanted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.data.batch import Batch
from lockstep.launch import ScriptTarget
from lockstep.launch.run_target import run_script
from lockstep.run import Run, RunOptions
from lockstep.verify.observer import Observer
from lockstep.verify.plain.session import Enough, Session, wanted
from lockstep.verify.trace import Trace
from lockstep.world import World

RECORDS = "records"
"""Folder of a Recorder's files, beside the trace of an observed run."""


def main(payload: Any) -> None:
    """Runs a script on this rank; rank 0 writes the trace.

    Args:
        payload: ``{"script": path, "arguments": its words, "steps": how many, "label": of the world, "folder": for
            what is written}``.
    """
    logging.basicConfig(level=logging.ERROR)
    folder = Path(payload["folder"])
    watch = _Watch(payload["label"], payload["steps"], folder)
    target = ScriptTarget(path=payload["script"], arguments=tuple(payload["arguments"]))
    token = wanted.set(Session(folder / RECORDS, payload["steps"]))
    try:
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere), watch.attached():
            run_script(target)
    except Enough:
        pass
    except SystemExit as ending:
        if ending.code:
            raise
    finally:
        wanted.reset(token)
    trace = watch.finish()
    if trace is not None and World.from_environment().is_main:
        trace.write(folder / "trace.json")


class _Watch:
    """Observes the first run that a script prepares."""

    def __init__(self, label: str, steps: int, folder: Path) -> None:
        self._label, self._steps, self._folder = label, steps, folder
        self._run: Run | None = None
        self._observer: Observer | None = None
        self._loss: Tensor | None = None
        self._trace: Trace | None = None

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Stands between scripts and ``Run`` until the end of the block, as the observer between run and strategy."""
        names = ("__init__", "prepare", "batches", "backward", "close")
        own = {name: getattr(Run, name) for name in names}
        for name in names:
            setattr(Run, name, getattr(self, f"_{name.strip('_')}")(own[name]))
        try:
            yield
        finally:
            for name, method in own.items():
                setattr(Run, name, method)

    def finish(self) -> Trace | None:
        """The trace, if a run was observed. Collective."""
        observer, self._observer = self._observer, None
        if observer is not None and observer.trace.steps:
            self._trace = observer.finish(self._folder / "final.safetensors")
        return self._trace

    def _init(self, own: Any) -> Any:
        """Runs write into the folder of verify, and begin anew."""

        def init(run: Run, options: RunOptions, *others: Any, **named: Any) -> None:
            directory = None if options.directory is None else self._folder / "run"
            own(run, dataclasses.replace(options, directory=directory, resume=""), *others, **named)

        return init

    def _prepare(self, own: Any) -> Any:
        def prepare(run: Run, *others: Any, **named: Any) -> Any:
            prepared = own(run, *others, **named)
            if self._run is None:
                self._run, self._observer = run, Observer(run, self._label)
            return prepared

        return prepare

    def _batches(self, own: Any) -> Any:
        def batches(run: Run, *others: Any, **named: Any) -> Iterator[Batch]:
            for batch in own(run, *others, **named):
                observer, self._loss = self._observer if run is self._run else None, None
                if observer is not None:
                    observer.begin_step()
                yield batch
                if observer is not None and self._loss is not None:
                    observer.end_step(self._loss)
                    if len(observer.trace.steps) >= self._steps:
                        raise Enough

        return batches

    def _backward(self, own: Any) -> Any:
        def backward(run: Run, *others: Any, **named: Any) -> Tensor:
            loss: Tensor = own(run, *others, **named)
            self._loss = loss
            return loss

        return backward

    def _close(self, own: Any) -> Any:
        def close(run: Run) -> None:
            if run is self._run:
                self.finish()
            own(run)

        return close
