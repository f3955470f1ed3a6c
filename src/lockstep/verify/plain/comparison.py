"""Compares what two runs of an ordinary loop have recorded, in the form in which layouts of a job are compared."""

from __future__ import annotations

import statistics

from lockstep.verify.comparison import Comparison
from lockstep.verify.plain.diagnosis import beyond_rounding, diagnose_plain
from lockstep.verify.plain.pair import Pair, vector
from lockstep.verify.plain.record import Recording
from lockstep.verify.trace import StepTrace, Trace

LEVEL = "B"
"""What an ordinary loop can promise: its sums are added in another order on every number of ranks."""


def compare_plain(reference: Recording, other: Recording, label: str, *, again: Recording) -> Comparison:
    """Judges a run: A for equal bits, B for rounding, and - for more than that.

    Args:
        reference: the run on one process.
        other: the run to be judged.
        label: names it.
        again: the reference recorded a second time.
    """
    found = diagnose_plain(reference, other, again=again)
    if found is None:
        return Comparison(trace_of(other, label), "A")
    reached = "-" if beyond_rounding(Pair(reference, other)) is not None else "B"
    return Comparison(trace_of(other, label), reached, _difference(reference, other), found)


def trace_of(run: Recording, label: str) -> Trace:
    """What the table shows of a recorded run."""
    steps = [StepTrace(step, _loss(run, step).hex()) for step in range(run.length)]
    seconds = [max(record.seconds for record in run.at(step)) for step in range(run.length)]
    return Trace(
        label=label,
        strategy="",
        ranks=len(run.ranks),
        level=LEVEL,
        context=run.ranks[0].context,
        steps=steps,
        milliseconds=1000 * statistics.median(seconds),
        memory=[rank.steps[-1].memory for rank in run.ranks],
    )


def _loss(run: Recording, step: int) -> float:
    losses = [loss for _, batch in run.batches(step) for loss in batch.losses]
    reported = [batch.loss for _, batch in run.batches(step) if batch.loss is not None]
    values = losses or reported
    return sum(values) / len(values) if values else float("nan")


def _difference(reference: Recording, other: Recording) -> float:
    """The largest relative difference of a parameter after the last step, estimated from sketches."""
    last = min(reference.length, other.length) - 1
    mine, worst = reference.at(last)[0].values, 0.0
    for record in other.at(last):
        for name, value in record.values.items():
            if name in mine and mine[name].digest != value.digest:
                gap = float(((vector(mine[name]) - vector(value)) ** 2).sum()) ** 0.5
                worst = max(worst, gap / max(mine[name].norm, 1e-38))
    return worst
