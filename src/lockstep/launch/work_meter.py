"""Adds up how long a rank itself works on its steps, and how long it waits for others."""

from __future__ import annotations

_WORK = frozenset({"data", "forward", "backward", "update"})
_WAIT = frozenset({"reduce", "wait"})


class WorkMeter:
    """The seconds of work that a rank has had for one micro-batch, over all steps so far.

    They are counted for each micro-batch, because shares of a step differ by one among ranks that are equally fast.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.waited = 0.0
        """Seconds of exchange that no work hides, over all steps so far."""
        self._step, self._since, self._phase = -1, 0.0, ""
        self._in_step = 0.0
        self.micro_batches = 0
        """Of the step so far; whoever begins them adds them here."""
        self.latest = float("inf")
        """Seconds of work for one micro-batch in the last step that was done."""

    @property
    def is_working(self) -> bool:
        """Whether the rank is at work of its own."""
        return self._phase in _WORK

    def enter(self, phase: str, step: int, now: float) -> float:
        """Goes over to a phase of a step; returns ``seconds``.

        Args:
            phase: what begins now.
            step: of which step; -1 outside of any.
            now: the time.
        """
        if self._phase in _WORK:
            self._in_step += now - self._since
        elif self._phase in _WAIT:
            self.waited += now - self._since
        if step > self._step:
            if self._step >= 0:
                self.latest = self._in_step / max(1, self.micro_batches)
                self.seconds += self.latest
            self._step, self._in_step, self.micro_batches = step, 0.0, 0
        self._since, self._phase = now, phase
        return self.seconds
