"""Spans of time by lane, from the moments at which one phase follows another. Holds no clock, no process, no file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LANES = {
    "step": "steps",
    "data": "waiting for data",
    "copy": "copy to the device",
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
"""Title of each kind of work, in the order in which a trace shows them; workers and devices have lanes of their own."""

_COMPUTING = ("compute", "forward", "backward")
_NAMES = {"data": "wait", "reduce": "exchange", "update": "optimizer", "evaluate": "evaluate"}


@dataclass(frozen=True)
class Span:
    """Something that took time; moments are nanoseconds of one clock."""

    lane: str
    """A key of ``LANES``, or the title of a lane of its own."""
    name: str
    began: int
    ended: int
    about: Mapping[str, int | float | str] = field(default_factory=dict)
    """What else is known, by name."""


class Recorder:
    """Collects the spans of one rank."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._open: dict[int, tuple[str, str, int, dict[str, int | float | str]]] = {}
        self._step: tuple[int, int] | None = None
        self._computed = False

    def enter(self, phase: str, now: int, *, step: int = -1, micro_batch: int = -1, thread: int = 0) -> None:
        """Ends what this thread did and begins a phase; ``thread`` 0 is the one that trains.

        Args:
            phase: a key of ``LANES``; an empty one begins nothing.
            now: the moment.
            step: global step, if there is one.
            micro_batch: number of the micro-batch, if there is one.
            thread: number of the thread; one that is not 0 has a lane of its own.
        """
        if before := self._open.pop(thread, None):
            name, lane, began, known = before
            if now > began:
                self.spans.append(Span(lane, name, began, now, known))
        self._computed = self._computed or phase in _COMPUTING
        if phase:
            number = f" k{micro_batch}" if micro_batch >= 0 else ""
            lane = phase if not thread else f"replica thread {thread}"
            about: dict[str, int | float | str] = {"step": step} if step >= 0 else {}
            self._open[thread] = f"{_NAMES.get(phase, phase)}{number}", lane, now, about

    def label(self, thread: int = 0, **about: int) -> None:
        """Adds what is known of the phase that a thread is in."""
        if thread in self._open:
            self._open[thread][3].update(about)

    def phase_of(self, thread: int = 0) -> str:
        """The phase that a thread is in; empty if it is in none."""
        return self._open[thread][1] if thread in self._open else ""

    def add(self, lane: str, name: str, began: int, ended: int, **about: int | float | str) -> None:
        """Adds a span that is over, beside whatever phase there is."""
        self.spans.append(Span(lane, name, began, ended, about))

    def begin_step(self, step: int, now: int) -> None:
        """Begins a step, which ends the one before. Saying it again moves the beginning: the step had to wait."""
        if self._step is None or self._step[0] != step:
            self.end_step(now)
        self._step, self._computed = (step, now), False

    def end_step(self, now: int) -> None:
        """Ends the step, if one has begun; one that never computed was none."""
        if self._step is not None and self._computed:
            step, began = self._step
            self.spans.append(Span("step", f"step {step}", began, now, {"step": step}))
        self._step = None

    def close(self, now: int) -> None:
        """Ends everything."""
        self.end_step(now)
        for thread in list(self._open):
            self.enter("", now, thread=thread)
