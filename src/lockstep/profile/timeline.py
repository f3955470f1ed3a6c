"""Records one rank for some steps, from the events of its run, and adds the spans to the timeline of the run.

    before FIRST        the callback only compares step numbers
    FIRST .. + COUNT    spans are collected; nothing waits for a device or for another rank
    the step after      this rank adds its spans to the file, under the file's lock, and removes its callback

So the trace also has what happens between two steps (evaluation, checkpoint, log), and after the last of them.
Loaders contribute the spans of their reads. Events of the run tell when work was queued on a GPU, not when it ran:
kernels and copies come from torch's profiler, which needs no synchronisation that would remove the overlap.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from lockstep.config.options import RunOptions
from lockstep.core.plan import Indices
from lockstep.core.world import World
from lockstep.data.batch import Batch
from lockstep.data.keyed import EVALUATION_EPOCH
from lockstep.data.reader import ReadTrace
from lockstep.errors import ConfigError
from lockstep.profile import trace
from lockstep.profile.trace import ProfileWindow, SpanRecorder, TraceSpan, events
from lockstep.runtime.devices import is_gpu
from lockstep.runtime.events import Callback, CallbackHandle


def read_spans(traces: Sequence[ReadTrace], used: Sequence[TraceSpan], began: int, ended: int) -> list[TraceSpan]:
    """The reads of loaders between two moments in nanoseconds, one lane for each process.

    ``used`` are the spans of the rank; those of micro-batches carry ``epoch`` and ``first``, by which reads are named.
    """
    names: dict[tuple[object, object], str] = {}
    for span in used:
        if "first" in span.about:
            names.setdefault((span.about["epoch"], span.about["first"]), _name(span))
    found = []
    for reads in traces:
        for read in reads.spans():
            if read.ended >= began and read.began <= ended:
                lane = f"{reads.name}, {f'worker {read.worker}' if read.worker >= 0 else 'this process'}"
                name = names.get((read.epoch, read.first), f"{read.samples} samples")
                about = {"epoch": read.epoch, "first": read.first, "samples": read.samples}
                found.append(TraceSpan(lane, name, read.began, read.ended, about))
    return found


def _name(span: TraceSpan) -> str:
    kind, _, number = span.name.partition(" ")
    return f"{number} (evaluation)" if kind == "evaluate" else f"step {span.about.get('step', '?')} {number}"


logger = logging.getLogger(__name__)
_OF_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class DeviceTrace:
    """Profiles the CUDA device of this rank between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self._profiler: Any = None

    def start(self) -> None:
        """Starts the profiler; where that fails, warns and leaves the device out of the timeline."""
        try:
            # Without acc_events torch 2.11 warns of what a second cycle would clear, and there is only one.
            profiler = torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True)
            profiler.start()
        except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUPTI
            logger.warning("The timeline will not show the device: its profiler failed to start: %s.", error)
            return
        self._profiler = profiler

    def stop(self, unix: int) -> list[TraceSpan]:
        """Stops the profiler and returns the spans; ``unix`` is Unix time minus the recorder's clock, in ns."""
        if self._profiler is None:
            return []
        self._profiler.stop()
        with tempfile.TemporaryDirectory(prefix="lockstep-timeline-") as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            return device_spans(json.loads(path.read_text()), unix, _OF_DEVICE)


def device_spans(trace: Mapping[str, Any], unix: int, categories: Collection[str]) -> list[TraceSpan]:
    """The spans of some categories in a trace of torch's profiler, one lane for each stream."""
    base = int(trace.get("baseTimeNanoseconds", 0)) - unix
    found = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in categories:
            began = base + round(1000 * event["ts"])
            lane = f"device, stream {event.get('args', {}).get('stream', event['tid'])}"
            found.append(TraceSpan(lane, event["name"], began, began + round(1000 * event["dur"])))
    return found


_RESUMED = ("update", "save")
"""Phases that resume after a span within them."""


class Timeline(Callback):
    """Records the timeline of one rank. Nothing here is collective.

    Args:
        window: the steps to record.
        folder: run folder, in which ``trace.begin`` has made the file.
        rank: number of the rank.
        title: heading of the rank in the timeline.
        device: profiles the device; None on a CPU.
    """

    def __init__(
        self, window: ProfileWindow, folder: Path, *, rank: int, title: str, device: DeviceTrace | None = None
    ) -> None:
        self._window, self._folder, self._rank, self._title = window, folder, rank, title
        self._device = device
        self.traces: list[ReadTrace] = []
        """Read times of the rank's loaders; each loader adds its own."""
        self._recorder = SpanRecorder()
        self._threads = {threading.get_ident(): 0}
        self._first: int | None = None
        self._recording = self._done = False
        self._began = self._unix = 0
        self._started: dict[int, int] = {}
        self._spans: list[str | None] = []
        self._copy = threading.local()
        self.handle: CallbackHandle | None = None
        """Removes this callback at the end of the window."""
        atexit.register(self.finish)

    def on_phase(self, phase: str, epoch: int, step: int, micro_batch: int) -> None:
        """Ends a span and begins another."""
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
                self.finish()  # the wait for the data of a step after the window is none of its own
        if self._recording:
            self._recorder.enter(
                "" if phase == "script" else phase, now, step=step, micro_batch=micro_batch, thread=thread
            )
            if micro_batch >= 0:
                self._recorder.label(thread, epoch=EVALUATION_EPOCH if phase == "evaluate" else epoch)

    def on_samples(self, indices: Indices) -> None:
        """Labels the span of a micro-batch with its first sample, which identifies its read."""
        if self._recording and len(indices):
            self._recorder.label(self._thread(), first=int(indices[0]))

    def on_backward_begin(self, batch: Batch, scale: float) -> None:
        """Ends the window before the first step after it is computed."""
        if self._first is not None and batch.plan.step >= self._last:
            self.finish()
        if self._recording:
            self._enter("compute", step=batch.plan.step)

    def on_backward_end(self, batch: Batch, result: object) -> None:
        """Ends the spans of replica threads."""
        if self._recording:
            for thread in range(1, len(self._threads)):
                self._recorder.enter("", time.perf_counter_ns(), thread=thread)

    def on_bucket_start(self, bucket: int) -> None:
        """Remembers when the reduction of a bucket begins."""
        self._started[bucket] = time.perf_counter_ns()

    def on_exchange_end(self) -> None:
        """Adds a span for every bucket of the step, in flight until now."""
        now = time.perf_counter_ns()
        for bucket, began in self._started.items() if self._recording else ():
            self._recorder.add("in flight", f"bucket {bucket}", began, now)
        self._started.clear()

    def on_span_begin(self, name: str) -> None:
        """Begins a named span."""
        if not self._thread():
            self._spans.append(self._recorder.phase if self._recording else None)
            if self._recording:
                self._enter(name)

    def on_span_end(self, name: str) -> None:
        """Resumes the phase before the span."""
        if not self._thread():
            before = self._spans.pop() if self._spans else None
            if self._recording and before is not None:
                self._enter(before if before in _RESUMED and before != name else "")

    def on_copy_begin(self) -> None:
        """Remembers when a copy to the device begins."""
        self._copy.began = time.perf_counter_ns() if self._recording else None

    def on_copy_end(self) -> None:
        """Adds a span for the copy."""
        if (began := getattr(self._copy, "began", None)) is not None:
            self._recorder.add("copy", "copy", began, time.perf_counter_ns())

    def on_close(self, run: Any) -> None:
        """Writes the collected spans."""
        self.finish()

    def finish(self) -> None:
        """Writes the collected spans and removes the callback; further calls do nothing."""
        if self._done:
            return
        recorded, now = self._recording, time.perf_counter_ns()
        self._done, self._recording = True, False
        atexit.unregister(self.finish)
        if self.handle is not None:
            self.handle.remove()
        if not recorded:
            if self._rank == 0:
                logger.warning("The timeline is empty: the run ended before step %d of this start.", self._window.first)
            return
        self._recorder.close(now)
        self._write(now)

    @property
    def _last(self) -> int:
        """The first step after the window."""
        return (self._first or 0) + self._window.first + self._window.count

    def _start(self, now: int) -> None:
        self._recording, self._began = True, now
        self._unix = time.time_ns() - time.perf_counter_ns()
        if self._device is not None:
            self._device.start()

    def _enter(self, phase: str, step: int = -1) -> None:
        self._recorder.enter(phase, time.perf_counter_ns(), step=step)

    def _thread(self) -> int:
        return self._threads.setdefault(threading.get_ident(), len(self._threads))

    def _write(self, now: int) -> None:
        spans = self._recorder.spans + read_spans(self.traces, self._recorder.spans, self._began, now)
        if self._device is not None:
            spans += self._device.stop(self._unix)
        try:
            trace.add(
                self._folder,
                self._began + self._unix,
                lambda origin: events(spans, rank=self._rank, title=self._title, origin=origin - self._unix),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.error("Rank %d cannot write to '%s': %s.", self._rank, self._folder / trace.FILE, error)
            return
        if self._rank == 0:
            logger.info(
                "Wrote the timeline to %s. Open it with 'lockstep explain timeline FILE' or https://ui.perfetto.dev.",
                self._folder / trace.FILE,
            )


def as_launched(options: RunOptions, world: World) -> RunOptions:
    """The options, with the window of ``lockstep run --profile`` in place of the script's own.

    Raises:
        ConfigError: the script names no run folder, or the window is not a range of steps.
    """
    if not world.profile:
        if options.profile:
            ProfileWindow.parse(options.profile)
        return options
    if options.directory is None:
        raise ConfigError(
            f"--profile {world.profile} needs a folder for {trace.FILE}, and the script's lockstep.init names none. "
            "Pass it directory=...."
        )
    return dataclasses.replace(options, profile=world.profile)


def make_file(options: RunOptions) -> None:
    """Creates the timeline, if the options have a ``profile``. On the main process; ``ConfigError`` where it fails."""
    if options.profile:
        trace.begin(_folder(options))


def open_timeline(options: RunOptions, world: World, device: torch.device) -> Timeline:
    """A rank's timeline, for a run whose options have a ``profile``; the run adds it as a callback."""
    return Timeline(
        ProfileWindow.parse(options.profile),
        _folder(options),
        rank=world.rank,
        title=f"rank {world.rank} ({options.strategy}, {device.type})",
        device=DeviceTrace() if is_gpu(device) else None,
    )


def _folder(options: RunOptions) -> Path:
    assert options.directory is not None, "RunOptions has a run folder wherever it has a profile"
    return Path(options.directory)
