"""Watches one rank for some steps, from the marks of its heartbeat, and writes what it saw into the run's timeline.

    before FIRST        wrappers only look whether the time has come
    FIRST .. + COUNT    spans are collected; nothing waits for a device or for another rank
    the step after      this rank adds its part to the file, under the file's lock, and takes its wrappers away

So what stands between two steps (evaluation, checkpoint, log) is in the trace, also after the last of them.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from lockstep.data.keyed import EVALUATION_EPOCH
from lockstep.data.read_clock import ReadClock
from lockstep.launch.heartbeat import Heartbeat
from lockstep.permutation import Indices
from lockstep.timeline import file
from lockstep.timeline.between import Between
from lockstep.timeline.device import DeviceTrace
from lockstep.timeline.events import events
from lockstep.timeline.reading import read_spans
from lockstep.timeline.recorder import Recorder
from lockstep.timeline.window import Window

logger = logging.getLogger(__name__)
_RESUMED = ("update", "save")
"""Phases that go on after what was done in between."""


class Timeline:
    """The timeline of one rank. Nothing here is collective.

    Args:
        window: which steps.
        folder: of the run; ``file.begin`` has been called there.
        rank: number of the rank.
        title: of the rank, as it is shown.
        device: watches the device, if there is one to watch.
    """

    def __init__(
        self, window: Window, folder: Path, *, rank: int, title: str, device: DeviceTrace | None = None
    ) -> None:
        self._window, self._folder, self._rank, self._title = window, folder, rank, title
        self._device = device
        self.clocks: list[ReadClock] = []
        """Notes of the rank's loaders; whoever makes a loader adds its own."""
        self._recorder = Recorder()
        self._threads = {threading.get_ident(): 0}
        self._first: int | None = None
        self._recording = self._done = False
        self._began = self._unix = 0
        self._between = Between()
        atexit.register(self.finish)

    def listen(self, heartbeat: Heartbeat) -> None:
        """Takes every mark of the heartbeat as the end of one phase and the beginning of another."""

        def marked(mark: Any) -> Any:
            def marking(phase: str, *, epoch: int = -1, step: int = -1, micro_batch: int = -1) -> None:
                mark(phase, epoch=epoch, step=step, micro_batch=micro_batch)
                self._come_to(phase, epoch, step, micro_batch)

            return marking

        def told(samples: Any) -> Any:
            def telling(indices: Indices) -> None:
                samples(indices)
                if self._recording and len(indices):
                    self._recorder.label(self._thread(), first=int(indices[0]))

            return telling

        self._between.stand(heartbeat, "mark", marked)
        self._between.stand(heartbeat, "samples", told)

    def watch_backward(self, strategy: Any) -> None:
        """Lets the window end when a step after it is about to be computed, and the reduction be seen."""

        def watched(backward: Any) -> Any:
            @wraps(backward)
            def computing(batch: Any, *arguments: Any, **options: Any) -> Any:
                if self._first is not None and batch.plan.step >= self._last:
                    self.finish()
                if not self._recording:
                    return backward(batch, *arguments, **options)
                self._enter("compute", step=batch.plan.step)
                result = backward(batch, *arguments, **options)
                for thread in range(1, len(self._threads)):
                    self._recorder.enter("", time.perf_counter_ns(), thread=thread)
                return result

            return computing

        self._between.stand(strategy, "backward", watched)
        reducer = getattr(strategy, "_reducer", None)
        if reducer is not None:
            self._watch_reducer(reducer)

    def watch_call(self, owner: Any, name: str, phase: str) -> None:
        """Shows each call of a method as a phase; what went on before it goes on after it."""

        def watched(call: Any) -> Any:
            @wraps(call)
            def calling(*arguments: Any, **options: Any) -> Any:
                with self.span(phase):
                    return call(*arguments, **options)

            return calling

        self._between.stand(owner, name, watched)

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Shows what is done inside as a phase."""
        if not self._recording or self._thread():
            yield
            return
        before = self._recorder.phase_of()
        self._enter(phase)
        try:
            yield
        finally:
            if self._recording:
                self._enter(before if before in _RESUMED and before != phase else "")

    def watch_inside(self, owner: Any, name: str, lane: str) -> None:
        """Shows each call of a method beside the phase in which it is made."""

        def watched(call: Any) -> Any:
            @wraps(call)
            def calling(*arguments: Any, **options: Any) -> Any:
                recording, began = self._recording, time.perf_counter_ns()
                try:
                    return call(*arguments, **options)
                finally:
                    if recording:
                        self._recorder.add(lane, lane, began, time.perf_counter_ns())

            return calling

        self._between.stand(owner, name, watched)

    def finish(self) -> None:
        """Writes what was collected, and lets go of the run; saying it again changes nothing."""
        if self._done:
            return
        recorded, now = self._recording, time.perf_counter_ns()
        self._done, self._recording = True, False
        atexit.unregister(self.finish)
        self._between.leave()
        if not recorded:
            if self._rank == 0:
                logger.warning(
                    "The run ended before step %d of this start: its timeline is empty.", self._window.first
                )
            return
        self._recorder.close(now)
        self._write(now)

    @property
    def _last(self) -> int:
        """The first step after the window."""
        return (self._first or 0) + self._window.first + self._window.count

    def _come_to(self, phase: str, epoch: int, step: int, micro_batch: int) -> None:
        if self._done:
            return
        now, thread = time.perf_counter_ns(), self._thread()
        if phase == "data" and not thread:
            self._first = step if self._first is None else self._first
            if not self._recording and self._first + self._window.first <= step < self._last:
                self._start(now)
            if self._recording and step < self._last:
                self._recorder.begin_step(step, now)
            elif self._recording:
                self._recorder.end_step(now)
        if self._recording:
            self._recorder.enter(phase, now, step=step, micro_batch=micro_batch, thread=thread)
            if micro_batch >= 0:
                key = EVALUATION_EPOCH if phase == "evaluate" else epoch
                self._recorder.label(thread, epoch=key)

    def _start(self, now: int) -> None:
        self._recording, self._began = True, now
        self._unix = time.time_ns() - time.perf_counter_ns()
        if self._device is not None:
            self._device.start()

    def _enter(self, phase: str, step: int = -1) -> None:
        self._recorder.enter(phase, time.perf_counter_ns(), step=step)

    def _thread(self) -> int:
        return self._threads.setdefault(threading.get_ident(), len(self._threads))

    def _watch_reducer(self, reducer: Any) -> None:
        begun: dict[int, int] = {}

        def starting(start: Any) -> Any:
            def starts(bucket: int) -> None:
                begun[bucket] = time.perf_counter_ns()
                start(bucket)

            return starts

        def finishing(finish: Any) -> Any:
            def finishes(header: Any) -> Any:
                result, now = finish(header), time.perf_counter_ns()
                for bucket, began in begun.items() if self._recording else ():
                    self._recorder.add("in flight", f"bucket {bucket}", began, now)
                begun.clear()
                return result

            return finishes

        self._between.stand(reducer, "start", starting)
        self._between.stand(reducer, "finish", finishing)

    def _write(self, now: int) -> None:
        spans = self._recorder.spans + read_spans(self.clocks, self._recorder.spans, self._began, now)
        if self._device is not None:
            spans += self._device.stop(self._unix)
        try:
            file.add(
                self._folder,
                self._began + self._unix,
                lambda origin: events(spans, rank=self._rank, title=self._title, origin=origin - self._unix),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.error(
                "Rank %d cannot write its part of '%s': %s.", self._rank, self._folder / file.FILE, error
            )
            return
        if self._rank == 0:
            logger.info(
                "The timeline is in %s; see it with 'lockstep explain timeline FILE', or at https://ui.perfetto.dev.",
                self._folder / file.FILE,
            )
