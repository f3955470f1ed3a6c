"""How long a rank may be silent: learned from the run's own steps, phase by phase."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from lockstep.launch.beat import Beat, Membership

_LEARNED = 5.0
"""How many times its longest silence so far a rank may be silent."""
_KNOWN_STEPS = 20
"""Steps after which the longest silence means something."""
_SLOW = 10.0
"""How much longer phases may last that are slow by nature, and the first step, which may compile."""
_SLOW_PHASES = ("start", "prepare", "load", "save", "evaluate")


@dataclass
class Pace:
    """The silences of one rank.

    Args:
        floor: seconds below which no silence is a stall; 0 means that none ever is.
    """

    floor: float
    _last: Beat | None = None
    _longest: float = 0.0
    _moved: float = 0.0
    _steps: set[int] = field(default_factory=set)

    def hear(self, beat: Beat) -> None:
        """Takes the rank's newest heartbeat, as often as one likes."""
        last = self._last
        if last is not None:
            if last.warm and last.phase not in _SLOW_PHASES:
                self._longest = max(self._longest, beat.time - last.time)
            if (last.step, last.micro_batch, last.phase) != (beat.step, beat.micro_batch, beat.phase):
                self._moved = time.monotonic()
        if beat.step >= 0 and len(self._steps) <= _KNOWN_STEPS:
            self._steps.add(beat.step)
        self._last = beat

    def silence(self, beat: Beat) -> float:
        """Seconds since the rank wrote this heartbeat, or was heard to have moved: short steps leave the time out."""
        return time.monotonic() - max(beat.time, self._moved)

    def limit(self, beat: Beat) -> float:
        """Seconds of silence after this heartbeat from which the rank counts as stalled."""
        if not self.floor or beat.phase == "end" or beat.membership is Membership.FINISHED:
            return math.inf
        if beat.phase in _SLOW_PHASES or not beat.warm:
            return _SLOW * self.floor
        learned = _LEARNED * self._longest if len(self._steps) > _KNOWN_STEPS else 0.0
        return max(self.floor, learned)
