"""Steps of an epoch from the sample plan, computed many at a time.

The keyed permutation costs about 100 microseconds a call, nearly the same for 16 samples as for 1,000.
"""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.plan import SamplePlan, StepPlan

_SAMPLES_AT_ONCE = 8192


def planned_steps(plan: SamplePlan, epoch: int, first: int = 0) -> Iterator[StepPlan]:
    """Yields ``plan.step(epoch, position)`` for every position from ``first`` to the end of the epoch."""
    count = max(1, _SAMPLES_AT_ONCE // plan.shape.global_batch)
    steps = plan.steps_per_epoch
    for begin in range(first, steps, count):
        yield from plan.steps(epoch, begin, min(begin + count, steps))
