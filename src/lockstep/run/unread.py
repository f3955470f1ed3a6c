"""Results of steps that have not been read back from the device yet."""

from __future__ import annotations

from lockstep.launch.control import StopReason
from lockstep.plan import StepPlan
from lockstep.run.scaling import raise_non_finite
from lockstep.strategies import StepResult


class Unread:
    """Keeps what steps gave until somebody looks: reading a value makes the host wait for a GPU.

    Args:
        every: look at every so many steps; 1 where reading costs nothing.
        overflow_expected: whether a loss scaler deals with what is not finite.
    """

    def __init__(self, every: int, overflow_expected: bool) -> None:
        self._every, self._overflow_expected = every, overflow_expected
        self._results: list[tuple[StepResult, StepPlan]] = []
        self.stop = StopReason.NONE
        """Why all ranks agreed to stop, as far as has been read."""

    def add(self, result: StepResult, plan: StepPlan) -> None:
        """Takes the result of a step, and looks if it is time. Raises what ``look`` raises."""
        self._results.append((result, plan))
        if len(self._results) >= self._every:
            self.look()

    def look(self) -> None:
        """Reads what there is; ``NonFiniteError`` names the first step that was not finite."""
        results, self._results = self._results, []
        for number, (result, plan) in enumerate(results):
            if not self._overflow_expected and not bool(result.finite):
                raise_non_finite(result.losses, plan, later_updates=len(results) - 1 - number)
        if results:
            self.stop = StopReason(int(results[-1][0].stop)) or self.stop
