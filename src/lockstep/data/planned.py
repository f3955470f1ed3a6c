"""Steps of an epoch from the sample plan, computed many at a time.

The keyed permutation costs about 200 microseconds a call, nearly the same for 16 samples as for 1,000. Steps
are cut from one plan whose "step" is a block of them; its micro-batches have the same size and order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lockstep.plan import BatchShape, SamplePlan, StepPlan

_SAMPLES_AT_ONCE = 8192


def planned_steps(plan: SamplePlan, epoch: int, first: int = 0) -> Iterator[StepPlan]:
    """Yields ``plan.step(epoch, position)`` for every position from ``first`` to the end of the epoch."""
    shape, count = plan.shape, max(1, _SAMPLES_AT_ONCE // plan.shape.global_batch)
    blocks = replace(
        plan,
        drop_last=False,
        shape=BatchShape(global_batch=count * shape.global_batch, micro_batches=count * shape.micro_batches),
    )
    for number in range(first // count, -(-plan.steps_per_epoch // count)):
        block = blocks.step(epoch, number)
        for position in range(max(first, number * count), min((number + 1) * count, plan.steps_per_epoch)):
            start = (position - number * count) * shape.micro_batches
            yield StepPlan(
                epoch=epoch,
                step=epoch * plan.steps_per_epoch + position,
                position=position,
                indices=block.indices[start : start + shape.micro_batches],
            )
