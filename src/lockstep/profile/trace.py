"""The timeline file of a run: spans of time, the steps they cover, and their form in the Chrome trace format.

    ProfileWindow   the steps that are recorded
    SpanRecorder    turns the moments at which phases change into spans, by lane; has no clock of its own
    events          spans as events that Perfetto and chrome://tracing show: a rank is a process, a lane is a thread
    begin/add/read  one file for all ranks; each adds its events when it is ready, under the file's lock

The format is "Trace Event Format", Google 2016: X events are spans, M events name lanes, s and f are ends of an arrow.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from lockstep.core.atomic import NO_LOCKS, sole_use
from lockstep.errors import ConfigError

LANES = {
    "step": "steps",
    "data": "waiting for data",
    "copy": "copy to the device",
    "rehearsal": "rehearsal",
    "compute": "compute",
    "forward": "forward",
    "backward": "backward",
    "in flight": "reduce, in flight",
    "reduce": "reduce, exposed",
    "wait": "waiting for a rank",
    "record": "record of gradients",
    "update": "optimizer",
    "fingerprint": "fingerprint",
    "evaluate": "evaluation",
    "log": "log",
    "save": "checkpoint",
}
"""Title of each lane, in the order of the trace; workers and devices have lanes of their own."""

_COMPUTING = ("compute", "forward", "backward")
_NAMES = {"data": "wait", "reduce": "exchange", "update": "optimizer", "evaluate": "evaluate"}


@dataclass(frozen=True)
class TraceSpan:
    """An interval of one lane, in nanoseconds of one clock."""

    lane: str
    """A key of ``LANES``, or the title of another lane."""
    name: str
    began: int
    ended: int
    about: Mapping[str, int | float | str] = field(default_factory=dict)
    """Further facts by name, such as the step."""


class SpanRecorder:
    """Collects the spans of one rank."""

    def __init__(self) -> None:
        self.spans: list[TraceSpan] = []
        self._open: dict[int, tuple[str, str, int, dict[str, int | float | str]]] = {}
        self._step: tuple[int, int] | None = None
        self._computed = False

    def enter(self, phase: str, now: int, *, step: int = -1, micro_batch: int = -1, thread: int = 0) -> None:
        """Ends the phase of a thread and begins another, a key of ``LANES`` or nothing if it is empty.

        Thread 0 is the one that trains; every other has a lane of its own.
        """
        if before := self._open.pop(thread, None):
            name, lane, began, known = before
            if now > began:
                self.spans.append(TraceSpan(lane, name, began, now, known))
        self._computed = self._computed or phase in _COMPUTING
        if phase:
            number = f" k{micro_batch}" if micro_batch >= 0 else ""
            lane = phase if not thread else f"replica thread {thread}"
            about: dict[str, int | float | str] = {"step": step} if step >= 0 else {}
            self._open[thread] = f"{_NAMES.get(phase, phase)}{number}", lane, now, about

    def label(self, thread: int = 0, **about: int) -> None:
        """Adds facts to the current phase of a thread."""
        if thread in self._open:
            self._open[thread][3].update(about)

    @property
    def phase(self) -> str:
        """The current phase of the main thread; empty if it has none."""
        return self._open[0][1] if 0 in self._open else ""

    def add(self, lane: str, name: str, began: int, ended: int, **about: int | float | str) -> None:
        """Adds a finished span, independent of the current phase."""
        self.spans.append(TraceSpan(lane, name, began, ended, about))

    def begin_step(self, step: int, now: int) -> None:
        """Begins a step and ends the one before. Calling it again for the same step moves its beginning."""
        if self._step is None or self._step[0] != step:
            self.end_step(now)
        self._step, self._computed = (step, now), False

    def end_step(self, now: int) -> None:
        """Ends the current step; one in which nothing was computed leaves no span."""
        if self._step is not None and self._computed:
            step, began = self._step
            self.spans.append(TraceSpan("step", f"step {step}", began, now, {"step": step}))
        self._step = None

    def close(self, now: int) -> None:
        """Ends the step and all phases."""
        self.end_step(now)
        for thread in list(self._open):
            self.enter("", now, thread=thread)


DEFAULT = "10:5"
"""After the first steps, in which memory is allocated and workers start."""

_FORM = re.compile(r"(\d{1,18}):(\d{1,18})")


@dataclass(frozen=True)
class ProfileWindow:
    """The steps to record, counted from the start of this process, also in a resumed run."""

    first: int
    count: int

    @classmethod
    def parse(cls, text: str) -> ProfileWindow:
        """Reads ``FIRST:COUNT``, such as ``10:5``.

        Raises:
            ConfigError: the text has another form, or COUNT is 0.
        """
        found = _FORM.fullmatch(text)
        if found is None or not int(found[2]):
            raise ConfigError(
                f"profile {text!r} is not a range of steps. Use FIRST:COUNT, for example {DEFAULT}, which skips 10 "
                "steps and then records 5; 0:5 records the first five."
            )
        return cls(int(found[1]), int(found[2]))


Event = dict[str, Any]
_USING = ("forward", "evaluate")
"""Phases that begin with a micro-batch."""


def events(spans: Sequence[TraceSpan], *, rank: int, title: str, origin: int) -> list[Event]:
    """All events of one rank; the moment ``origin``, in the nanoseconds of the spans, becomes 0."""
    lanes = {lane: number for number, lane in enumerate(_in_order(spans), 1)}

    def metadata(kind: str, lane: int, **values: object) -> Event:
        return {"name": kind, "ph": "M", "pid": rank, "tid": lane, "args": values}

    found = [metadata("process_name", 0, name=title), metadata("process_sort_index", 0, sort_index=rank)]
    for lane, number in lanes.items():
        found.append(metadata("thread_name", number, name=LANES.get(lane, lane)))
        found.append(metadata("thread_sort_index", number, sort_index=number))
    found += [
        {
            "name": span.name,
            "cat": LANES.get(span.lane, span.lane),
            "ph": "X",
            "ts": _microseconds(span.began - origin),
            "dur": _microseconds(span.ended - span.began),
            "pid": rank,
            "tid": lanes[span.lane],
            "args": dict(span.about),
        }
        for span in spans
    ]
    return found + list(_arrows(spans, rank, lanes, origin))


def _in_order(spans: Iterable[TraceSpan]) -> list[str]:
    """The lanes that occur: steps, loader workers, the rank's own, then replica threads and devices."""
    own = list(LANES)

    def position(lane: str) -> tuple[int, int, str]:
        if lane == "step":
            return 0, 0, lane
        if lane in LANES:
            return 2, own.index(lane), lane
        if lane.startswith("load"):
            return 1, int("evaluation" in lane), lane
        return 3, 0, lane  # other threads, and devices

    return sorted({span.lane for span in spans}, key=position)


def _arrows(spans: Sequence[TraceSpan], rank: int, lanes: dict[str, int], origin: int) -> Iterable[Event]:
    """An arrow from where a micro-batch was read to where it is first computed on."""
    readings = sorted((span for span in spans if span.lane.startswith("load")), key=lambda span: span.ended)
    uses = sorted((span for span in spans if span.lane in _USING), key=lambda span: span.began)
    newest: dict[tuple[Any, Any], TraceSpan] = {}
    position = 0
    for number, use in enumerate(uses):
        while position < len(readings) and readings[position].ended <= use.began:
            newest[_key(readings[position])] = readings[position]
            position += 1
        source = newest.pop(_key(use), None)
        if source is None:
            continue
        last = max(source.began, source.ended - 1000)  # an arrow begins within a span
        common = {"name": "micro-batch", "cat": "data", "id": f"{rank}.{number}", "pid": rank}
        yield {**common, "ph": "s", "ts": _microseconds(last - origin), "tid": lanes[source.lane]}
        yield {**common, "ph": "f", "bp": "e", "ts": _microseconds(use.began - origin), "tid": lanes[use.lane]}


def _key(span: TraceSpan) -> tuple[Any, Any]:
    return span.about.get("epoch"), span.about.get("first")


def _microseconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1000, 3)


FILE = "timeline.json"
"""Name of the timeline in a run folder."""


def begin(folder: Path) -> None:
    """Creates the empty timeline, on one process, before any other may add to it; ``ConfigError`` where it cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / FILE, "w") as file:
            json.dump({"displayTimeUnit": "ms", "otherData": {}, "traceEvents": []}, file)
    except OSError as error:
        raise ConfigError(
            f"Cannot write the timeline to '{folder / FILE}': {error.strerror}. Make it writable, or choose another "
            "run folder."
        ) from error


def add(folder: Path, origin: int, make: Any) -> None:
    """Adds the events of a rank; the file is a valid trace before and after. Not collective.

    Args:
        folder: run folder.
        origin: Unix time in nanoseconds that becomes 0 if this rank is the first to write.
        make: returns the events, given the origin that all ranks share.

    Raises:
        OSError: the file cannot be written.
        ValueError: the file is not a trace.
    """
    with _locked(folder / FILE, "r+") as file:
        trace = json.load(file)
        facts = trace["otherData"]
        origin = int(facts.setdefault("unix_nanoseconds_at_0", str(origin)))
        trace["traceEvents"] += make(origin)
        file.seek(0)
        # One a line, for text editors
        lines = ",\n".join(json.dumps(event) for event in trace.pop("traceEvents"))
        file.write(f'{json.dumps(trace)[:-1]}, "traceEvents": [\n{lines}\n]}}\n')
        file.truncate()


def read(path: Path) -> list[Event]:
    """The events of a timeline, or of a run folder that has one; ``ConfigError`` where it cannot be read or is none."""
    if path.is_dir():
        path /= FILE
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
        return list(trace["traceEvents"])
    except OSError as error:
        raise ConfigError(
            f"Cannot read the timeline '{path}': {error.strerror}. A run with --profile writes it."
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"'{path}' is not a timeline. Give the {FILE} of a run with --profile.") from error


_LONGEST_TURN, _LOOK_EVERY = 60.0, 0.05


@contextmanager
def _locked(path: Path, mode: str) -> Iterator[IO[str]]:
    with path.open("a" if mode == "w" else mode, encoding="utf-8") as file, _turn(file, path):
        if mode == "w":
            os.ftruncate(file.fileno(), 0)
        yield file


@contextmanager
def _turn(file: IO[str], path: Path) -> Iterator[None]:
    """Waits for the lock of the file; where the file system has none, for at most a minute for that of ``sole_use``."""
    with ExitStack() as stack:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            deadline = time.monotonic() + _LONGEST_TURN
            while True:
                try:
                    stack.enter_context(sole_use(path))
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(_LOOK_EVERY)
        yield
        file.flush()
