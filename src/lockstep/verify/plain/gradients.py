"""Checks the gradients that the optimizer used: the weights with which they sum the ranks' own gradients.

Every rank records its own gradient g_b of each backward pass b and the gradient u that its optimizer used, as linear
sketches. Least squares give the weights: of the run, u = sum c_b g_b, and of the reference, u_ref = sum a_b g_b. The
loop has used the weights c and should have used a; c / a identifies the mistake:

    one factor for all                      divided or added up once too often, accumulated without scaling
    c equal, a as the numbers of samples    mean of means
    c smaller where the norm is larger      clipped before the reduction
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.text import numbered
from lockstep.verify.diagnosis import Cause, Diagnosis
from lockstep.verify.plain.checks import Pair, Vector, vector
from lockstep.verify.plain.record import BatchRecord, Measure, StepRecord


@dataclass(frozen=True)
class _Sums:
    """Weights of each backward pass in the gradients of the run and in those of the reference."""

    batches: list[tuple[int, BatchRecord]]
    used: list[float]
    wanted: list[float]
    rest_of_used: float
    """Relative size of the part that the weights leave unexplained."""
    rest_of_wanted: float


def _name_weights(sums: _Sums, world_size: int, tolerance: float) -> tuple[Cause, str]:
    """The cause behind the weights of backward passes, and a sentence on the numbers."""
    batches, used, wanted = sums.batches, sums.used, sums.wanted
    ratios = [a / b if b else math.inf for a, b in zip(used, wanted)]
    middle = statistics.median(ratios)
    if all(abs(ratio - middle) <= tolerance * abs(middle) for ratio in ratios):
        return _one_factor(sums, middle, world_size, tolerance)
    absent = sorted({rank for (rank, _), ratio in zip(batches, ratios) if abs(ratio) <= tolerance})
    if absent:
        return Cause.NOT_REDUCED, f"those of {numbered('rank', absent)} do not count"
    counts = [len(batch.samples) for _, batch in batches]
    listed = "weights " + ", ".join(f"{each:.3g}" for each in used)
    samples = f"for {' and '.join(map(str, counts))} samples"
    if _alike(used, tolerance) and not _alike(counts, 0.0):
        return Cause.LOSS_WEIGHTING, f"all have weight {used[0]:.3g}, {samples}"
    norms = [math.hypot(*(each.norm for each in batch.gradients.values())) for _, batch in batches]
    if _alike(wanted, tolerance) and _is_clipped(norms, used, tolerance):
        return Cause.CLIPPING, f"{listed}, for own gradients of norm {', '.join(f'{n:.3g}' for n in norms)}"
    return Cause.LOSS_WEIGHTING, f"{listed}, {samples}"


def _one_factor(sums: _Sums, factor: float, world_size: int, tolerance: float) -> tuple[Cause, str]:
    detail = f"all are {factor:.4g} times as large"
    each = len(sums.batches) / len({rank for rank, _ in sums.batches})
    is_mean_over_ranks = all(abs(weight * world_size - 1) <= tolerance for weight in sums.used)
    if each > 1 and abs(factor / each - 1) <= tolerance and (is_mean_over_ranks or each != world_size):
        return Cause.ACCUMULATION, f"{detail}, and every rank accumulates {each:.0f}"
    return Cause.GRADIENT_SCALE, f"{detail}, in a world of {world_size}"


def _alike(values: Sequence[float], tolerance: float) -> bool:
    return max(values) - min(values) <= tolerance * max(abs(value) for value in values)


def _is_clipped(norms: Sequence[float], weights: Sequence[float], tolerance: float) -> bool:
    """True if every gradient counts in full, or was scaled down to one norm that all others share."""
    full, parts = max(weights), [norm * weight for norm, weight in zip(norms, weights)]
    return all(
        abs(weight - full) <= tolerance * full or abs(part - max(parts)) <= tolerance * max(parts)
        for weight, part in zip(weights, parts)
    )


_WEIGHTS = 0.05
"""Relative difference of weights that are equal, at most."""


def gradients(pair: Pair, step: int) -> Diagnosis | None:
    """Finds gradients that differ between ranks or from the reference."""
    return _between_ranks(pair, step) or _against_reference(pair, step)


def _between_ranks(pair: Pair, step: int) -> Diagnosis | None:
    records = pair.other.at(step)
    common = [name for name in records[0].used if any(name in record.used for record in records[1:])]
    apart = [
        name
        for name in common
        if not all(pair.is_same(records[0].used[name], r.used[name]) for r in records[1:] if name in r.used)
    ]
    if not apart:
        return None
    own = [name for name in apart if all(_is_own(pair, record, name) for record in records)]
    if len(own) < len(apart):
        return Diagnosis(Cause.GRADIENTS, step, repr(apart[0]), "ranks step with different ones")
    if len(apart) == len(common):
        return Diagnosis(Cause.NOT_REDUCED, step, repr(apart[0]), "every rank steps with its own")
    detail = f"every rank steps with its own; {len(apart)} of {len(common)} parameters"
    return Diagnosis(Cause.LEFT_OUT, step, repr(apart[0]), detail)


def _is_own(pair: Pair, record: StepRecord, name: str) -> bool:
    """True if a rank used a multiple of its own gradient."""
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
    near = all(pair.is_same(mine[name], theirs[name], scale, pair.fit) for name in odd)
    if near and _is_mean(_sums(pair, step, list(mine)), pair.fit):
        return None  # rounding of steps before: this one summed what the ranks computed as it should
    sums = _sums(pair, step, odd)
    if sums is None or max(sums.rest_of_used, sums.rest_of_wanted) > pair.fit:
        reduced = sums is not None and sums.rest_of_wanted < sums.rest_of_used
        detail = f"{'the reduction gave' if reduced else 'they are'} no weighted sum that the reference would explain"
        return Diagnosis(Cause.GRADIENTS, step, first, detail)
    if len(odd) <= len(mine) / 2:
        weights = ", ".join(f"{weight:.3g}" for weight in sums.used)
        detail = f"reduced with the weights {weights}; {len(odd)} of {len(mine)} parameters"
        return Diagnosis(Cause.LEFT_OUT, step, first, detail)
    cause, detail = _name_weights(sums, len(pair.other.ranks), min(pair.fit, _WEIGHTS))
    return Diagnosis(cause, step, first, detail)


def _is_mean(sums: _Sums | None, fit: float) -> bool:
    """True if the weight of every backward pass is its number of samples."""
    if sums is None or sums.rest_of_used > fit:
        return False
    counts = [len(batch.samples) for _, batch in sums.batches]
    unit = sum(sums.used) / max(sum(counts), 1)
    return all(abs(w - unit * count) <= _WEIGHTS * unit * count for w, count in zip(sums.used, counts))


def _merged(records: list[StepRecord]) -> dict[str, Measure]:
    """The gradients of all ranks by name; ranks that hold the same parameter have been found to agree."""
    return {name: measure for record in reversed(records) for name, measure in record.used.items()}


def _sums(pair: Pair, step: int, names: list[str]) -> _Sums | None:
    """The weights over some parameters; None where no rank recorded their gradients."""
    every = pair.other.batches(step)
    batches = [(rank, batch) for rank, batch in every if not batch.gradients.keys().isdisjoint(names)]
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
