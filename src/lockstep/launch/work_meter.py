"""Adds up how long a rank itself works on its steps, and how long it waits for others."""

from __future__ import annotations

import math

_WORK = frozenset({"data", "forward", "backward", "update"})
_WAIT = frozenset({"reduce", "wait"})


class WorkMeter:
    """The seconds of work that a rank has had for one micro-batch, over all steps so far.

    They are counted for each micro-batch, because shares of a step differ by one among ranks that are equally fast.
    Steps that are not timed count as much as the one before or the one after them that is, whichever took less: so a
    pause that falls into a timed step counts once.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.waited = 0.0
        """Seconds of exchange that no work hides, over all steps so far."""
        self.latest = math.inf
        """Seconds that the step took which was timed last."""
        self.micro_batches = 0
        """Of the step so far; whoever begins them adds them here."""
        self.is_timed = False
        """Whether all phases of the step so far have been entered; whoever leaves some out says so here."""
        self._step, self._counted, self._began = -1, -1, 0.0
        self._timed = math.inf, math.inf
        self._phase, self._since = "", 0.0
        self._worked = self._idle = 0.0

    def has_counted(self, step: int) -> bool:
        """Whether this is the step that was timed last."""
        return self._counted == step

    def enter(self, phase: str, step: int, now: float) -> float:
        """Goes over to a phase of a step; returns ``seconds``.

        Args:
            phase: what begins now.
            step: of which step; -1 outside of any.
            now: the time.
        """
        if self._phase in _WORK:
            self._worked += now - self._since
        elif self._phase in _WAIT:
            self._idle += now - self._since
        if step > self._step:
            self._begin(phase, step, now)
        self._phase, self._since = phase, now
        return self.seconds

    def _begin(self, phase: str, step: int, now: float) -> None:
        if self.is_timed:
            untimed = self._step - self._counted - 1
            work, idle = self._worked / max(1, self.micro_batches), self._idle
            self.seconds += work + untimed * min(work, self._timed[0])
            self.waited += idle + untimed * min(idle, self._timed[1])
            self._timed, self.latest, self._counted = (work, idle), now - self._began, self._step
        elif self._step < 0:
            self._counted = step - 1
        self.is_timed = phase in _WORK
        self._step, self._began, self._worked, self._idle, self.micro_batches = step, now, 0.0, 0.0, 0
