"""Finds the first difference of an ordinary loop on several ranks from its run on one: a pure function of records.

Every step is checked in the order in which it computes, so the first difference has caused the rest. Ordinary loops add
in another order on every number of ranks, so differences within rounding are reported last.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import replace

from lockstep.errors import ConfigError
from lockstep.verify.diagnosis import PREPARED_OTHERWISE, Cause, Comparison, Diagnosis, other_length
from lockstep.verify.plain import checks, gradients, samples
from lockstep.verify.plain.checks import Pair, vector
from lockstep.verify.plain.record import Recording
from lockstep.verify.trace import StepTrace, Trace

_CHECKS: tuple[Callable[[Pair, int], Diagnosis | None], ...] = (
    *(checks.frozen, checks.stale, checks.buffers, checks.hyperparameters),
    *(samples.samples, samples.inputs, samples.losses),
    *(checks.skipped, gradients.gradients, checks.replicas, checks.update),
)


def diagnose_plain(
    reference: Recording, other: Recording, *, again: Recording | None = None, tolerance: float | None = None
) -> Diagnosis | None:
    """The first difference and its cause; None where all bits of as many steps are equal.

    Args:
        reference: the run on one process.
        other: the run to compare.
        again: the reference recorded a second time, which reveals operators that do not repeat their bits.
        tolerance: relative difference that rounding may explain; by default from the reference's precision.

    Raises:
        ConfigError: the reference was recorded on several processes.
    """
    if len(reference.ranks) != 1:
        raise ConfigError(f"The reference was recorded on {len(reference.ranks)} processes. Record it on one process.")
    pair = Pair(reference, other, tolerance)
    beyond = beyond_rounding(pair)
    lengths = (other_length(reference.length, len(rank.steps)) for rank in other.ranks)
    if beyond is None and (length := next(filter(None, lengths), None)) is not None:
        return length
    found = beyond or _by_bits(pair)
    unstable = again is not None and _by_bits(Pair(reference, again, tolerance)) is not None
    if found and unstable and (beyond is None or beyond.cause in _UNSTABLE):
        return replace(found, cause=Cause.OPERATOR, detail="the reference differs from itself")
    return found


_POSSIBLE: dict[Cause, tuple[str, ...]] = {
    Cause.DATA_ORDER: (
        "a sampler of another seed or epoch",
        "a data set whose order differs between processes",
    ),
    Cause.AUGMENTATION: PREPARED_OTHERWISE,
    Cause.OUTPUT: (
        "state that the model keeps outside of its parameters and buffers",
        "statistics over the batch",
        "random numbers of a generator of its own",
    ),
    Cause.LOSS: (
        "targets of other samples",
        "weights or a divisor computed from each rank's share",
        "a loss that keeps state",
    ),
    Cause.FORWARD: (
        "state that the model or the loss keeps",
        "statistics over the batch",
        "targets or weights of other samples",
    ),
    Cause.GRADIENTS: (
        "gradients changed after backward, as by noise, clipping by value or a hook",
        "a lossy compression",
        "a parameter used outside of the recorded forward pass",
    ),
    Cause.UPDATE: (
        "state or settings of the optimizer that are not recorded",
        "parameters changed by the loop",
    ),
    Cause.REPLICAS: ("parameters changed by the loop on some ranks", "code under a condition on the rank"),
}
"""Explanations of the causes that only say what is known."""


_UNSTABLE = (Cause.FORWARD, Cause.OUTPUT, Cause.LOSS, Cause.GRADIENTS, Cause.NO_LOSSES)
"""Causes of what an operator may do that does not repeat its bits."""


def beyond_rounding(pair: Pair) -> Diagnosis | None:
    """The first thing that differs by more than rounding."""
    if found := checks.values(pair) or checks.context(pair) or checks.stages(pair):
        return found
    steps = range(min(pair.reference.length, pair.other.length))
    every = [(check, step) for step in steps for check in _CHECKS]
    every += [(checks.reported, step) for step in steps]
    first = next((found for check, step in every if (found := check(pair, step)) is not None), None)
    return _explained_before(pair, first) if first else samples.same_order(pair)


_OF_NUMBERS = (*checks.MODE_MATTERS, Cause.UPDATE, Cause.LOSS_WEIGHTING)
"""Causes that rounded gradients of the steps before may have led to."""


def _explained_before(pair: Pair, found: Diagnosis) -> Diagnosis:
    """The same finding, or what has led to it and is not a finding where it has no effect."""
    step = max(found.step, 0)
    mode = checks.modes(pair, step) if found.cause in checks.MODE_MATTERS else None
    rounded = gradients.compressed(pair, step) if found.cause in _OF_NUMBERS else None
    if found.cause is Cause.GRADIENTS and not any(batch.losses for batch in pair.mine(step).batches):
        found = replace(found, cause=Cause.NO_LOSSES)
    return mode or rounded or replace(found, possible=_POSSIBLE.get(found.cause, ()))


def _by_bits(pair: Pair) -> Diagnosis | None:
    """The first difference in bits, with a cause other than the order of sums if there is one."""
    for step in range(min(pair.reference.length, pair.other.length)):
        mine = pair.mine(step).values
        for record in pair.other.at(step):
            for name, value in record.values.items():
                if name in mine and mine[name].digest != value.digest:
                    kind = pair.first.context["precision"]
                    bound = f"within {100 * pair.tolerance:g} %, which rounding in {kind} may explain"
                    one, two = pair.mine(step).used.get(name), record.used.get(name)
                    is_update = one is not None and two is not None and one.digest == two.digest
                    cause = Cause.UPDATE if is_update else Cause.REDUCTION_ORDER
                    return _explained(pair, Diagnosis(cause, step, repr(name), bound))
    return None


def _explained(pair: Pair, found: Diagnosis) -> Diagnosis:
    if rounded := gradients.compressed(pair, found.step):
        return rounded
    context = pair.first.context
    for key in sorted(context):
        for rank in pair.other.ranks:
            value = rank.context.get(key, "")
            if value != context[key] and key not in ("optimizers", "precision"):
                cause = Cause.THREADS if key == "threads" else Cause.SOFTWARE
                detail = f"{key}: {value} on rank {rank.rank}, {context[key]} in the reference"
                return replace(found, cause=cause, detail=detail)
    mine = pair.mine(0).settings
    for name in mine:
        for number, record in enumerate(pair.other.at(0)):
            theirs = record.settings.get(name, "")
            if theirs != mine[name]:
                detail = f"{name}: {theirs} on rank {number}, {mine[name]} in the reference"
                return replace(found, cause=Cause.OPTIMIZER, detail=detail)
    return found


LEVEL = "B"
"""The best level of an ordinary loop: its sums are added in another order on every number of ranks."""


def compare_plain(reference: Recording, other: Recording, label: str, *, again: Recording) -> Comparison:
    """Compares a run with the reference: A for equal bits, B for rounding, and - for more than that."""
    found = diagnose_plain(reference, other, again=again)
    if found is None:
        return Comparison(trace_of(other, label), "A")
    is_rounding = found.cause is not Cause.LENGTH and beyond_rounding(Pair(reference, other)) is None
    reached = LEVEL if is_rounding else "-"
    return Comparison(trace_of(other, label), reached, _difference(reference, other), found)


def trace_of(run: Recording, label: str) -> Trace:
    """A recorded run in the form of the table."""
    steps = []
    for step in range(run.length):
        losses = [loss for _, batch in run.batches(step) for loss in batch.losses]
        losses = losses or [batch.loss for _, batch in run.batches(step) if batch.loss is not None]
        steps.append(StepTrace(step, (sum(losses) / len(losses) if losses else math.nan).hex()))
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


def _difference(reference: Recording, other: Recording) -> float:
    """The largest relative difference of a parameter after the last step, estimated from sketches."""
    last = min(reference.length, other.length) - 1
    mine, worst = reference.at(last)[0].values, 0.0
    for record in other.at(last):
        for name, value in record.values.items():
            if name in mine and mine[name].digest != value.digest:
                gap = float(((vector(mine[name]) - vector(value)) ** 2).sum()) ** 0.5
                worst = max(worst, gap / max(mine[name].norm, 1e-38) if math.isfinite(gap) else math.inf)
    return worst
