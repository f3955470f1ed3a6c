"""The gradients that the optimizer was given: which weighted sum of the ranks' own gradients they are.

Every rank records its own gradient g_b of each backward pass b and the gradient u that its optimizer used, as linear
sketches. Least squares give the weights: of the run, u = sum c_b g_b, and of the reference, u_ref = sum a_b g_b. So c
says what the loop did with the gradients, and a what it should have done; c / a tells the mistakes apart:

    one factor for all                      divided or added up once too often, accumulated without scaling
    c equal, a as the numbers of samples    mean of means
    c smaller where the norm is larger      clipped before the reduction
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lockstep.verify.diagnosis import Cause, Diagnosis
from lockstep.verify.plain.pair import Pair, Vector, vector
from lockstep.verify.plain.record import BatchRecord, Measure, StepRecord
from lockstep.verify.plain.weights import name_weights

_WEIGHTS = 0.05
"""Relative difference of weights that are equal, at most."""


def gradients(pair: Pair, step: int) -> Diagnosis | None:
    """Gradients that ranks do not agree on, or that are not the reference's."""
    return _between_ranks(pair, step) or _against_reference(pair, step)


def _between_ranks(pair: Pair, step: int) -> Diagnosis | None:
    records = pair.other.at(step)
    common = [name for name in records[0].used if any(name in record.used for record in records[1:])]
    apart = [name for name in common if not _agree(pair, [r.used[name] for r in records if name in r.used])]
    if not apart:
        return None
    own = [name for name in apart if all(_is_own(pair, record, name) for record in records)]
    if len(own) < len(apart):
        return Diagnosis(Cause.GRADIENTS, step, repr(apart[0]), "ranks step with different ones")
    if len(apart) == len(common):
        return Diagnosis(Cause.NOT_REDUCED, step, repr(apart[0]), "every rank steps with its own")
    detail = f"every rank steps with its own; {len(apart)} of {len(common)} parameters"
    return Diagnosis(Cause.LEFT_OUT, step, repr(apart[0]), detail)


def _agree(pair: Pair, found: list[Measure]) -> bool:
    return all(pair.is_same(found[0], each) for each in found[1:])


def _is_own(pair: Pair, record: StepRecord, name: str) -> bool:
    """Whether a rank used a multiple of its own gradient."""
    parts = [vector(batch.gradients[name]) for batch in record.batches if name in batch.gradients]
    if not parts or name not in record.used:
        return name not in record.used
    own, used = np.sum(parts, axis=0), vector(record.used[name])
    length = float(own @ own)
    rest = used - own * (float(own @ used) / length if length else 0.0)
    return float(np.linalg.norm(rest)) <= pair.fit * float(np.linalg.norm(used))


def _against_reference(pair: Pair, step: int) -> Diagnosis | None:
    mine, theirs = pair.mine(step).used, _merged(pair.other.at(step))
    absent = [name for name in mine if name not in theirs and mine[name].norm]
    if absent:
        return Diagnosis(Cause.LEFT_OUT, step, repr(absent[0]), "it has no gradient")
    scale = pair.noise / pair.tolerance * math.hypot(*(each.norm for each in mine.values()))
    odd = [n for n in mine if n in theirs and not pair.is_same(mine[n], theirs[n], scale)]
    if not odd:
        return None
    first = repr(odd[0])
    if all(pair.is_same(mine[n], theirs[n], scale, pair.fit) for n in odd) and _is_mean(
        pair, step, list(mine)
    ):
        return None  # rounding of steps before: this one summed what the ranks computed as it should
    sums = _sums(pair, step, odd)
    if sums is None or max(sums.rest_of_used, sums.rest_of_wanted) > pair.fit:
        what = (
            "the reduction gave"
            if sums is not None and sums.rest_of_wanted < sums.rest_of_used
            else "they are"
        )
        return Diagnosis(
            Cause.GRADIENTS, step, first, f"{what} no weighted sum that the reference would explain"
        )
    if len(odd) <= len(mine) / 2:
        weights = ", ".join(f"{weight:.3g}" for weight in sums.used)
        detail = f"reduced with the weights {weights}; {len(odd)} of {len(mine)} parameters"
        return Diagnosis(Cause.LEFT_OUT, step, first, detail)
    cause, detail = name_weights(
        sums.batches, sums.used, sums.wanted, len(pair.other.ranks), min(pair.fit, _WEIGHTS)
    )
    return Diagnosis(cause, step, first, detail)


def _is_mean(pair: Pair, step: int, names: list[str]) -> bool:
    """Whether every backward pass has the weight of its number of samples."""
    sums = _sums(pair, step, names)
    if sums is None or sums.rest_of_used > pair.fit:
        return False
    counts = [len(batch.samples) for _, batch in sums.batches]
    unit = sum(sums.used) / max(sum(counts), 1)
    return all(
        abs(weight - unit * count) <= _WEIGHTS * unit * count for weight, count in zip(sums.used, counts)
    )


def _merged(records: list[StepRecord]) -> dict[str, Measure]:
    """The gradients of all ranks by name; where ranks hold the same parameter, they agree by now."""
    return {name: measure for record in reversed(records) for name, measure in record.used.items()}


@dataclass(frozen=True)
class _Sums:
    """Weights of each backward pass in the gradients of the run and in those of the reference."""

    batches: list[tuple[int, BatchRecord]]
    used: list[float]
    wanted: list[float]
    rest_of_used: float
    """Relative size of what the weights leave unexplained."""
    rest_of_wanted: float


def _sums(pair: Pair, step: int, names: list[str]) -> _Sums | None:
    """The weights over some parameters; None where nobody recorded gradients of all of them."""
    batches = [
        (rank, batch)
        for rank, batch in pair.other.batches(step)
        if any(name in batch.gradients for name in names)
    ]
    if not batches:
        return None
    mine, theirs = pair.mine(step).used, _merged(pair.other.at(step))
    columns = np.stack([_long(batch.gradients, names, mine) for _, batch in batches], axis=1)
    used, rest_of_used = _fit(columns, _long(theirs, names, mine))
    wanted, rest_of_wanted = _fit(columns, _long(mine, names, mine))
    return _Sums(batches, used, wanted, rest_of_used, rest_of_wanted)


def _long(measures: dict[str, Measure], names: list[str], shapes: dict[str, Measure]) -> Vector:
    """The sketches of some parameters, one after the other; zeros for one without a gradient."""
    return np.concatenate(
        [vector(measures[n]) if n in measures else np.zeros(len(shapes[n].sketch)) for n in names]
    )


def _fit(columns: Vector, target: Vector) -> tuple[list[float], float]:
    """Least squares: weights, and the relative size of the rest."""
    if not (np.isfinite(columns).all() and np.isfinite(target).all()):
        return [0.0] * columns.shape[1], math.inf
    weights = np.linalg.lstsq(columns, target, rcond=None)[0]
    rest = float(np.linalg.norm(target - columns @ weights))
    return [float(each) for each in weights], rest / max(float(np.linalg.norm(target)), 1e-300)
