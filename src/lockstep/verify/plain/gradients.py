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
from itertools import pairwise

import numpy as np

from lockstep.text import grouped, numbered, shorten
from lockstep.verify.diagnosis import Cause, Diagnosis
from lockstep.verify.plain import checks
from lockstep.verify.plain.checks import Pair, Vector, least_squares, tells_weights, vector
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
    if _summed_again(batches, ratios, world_size, tolerance):
        return Cause.REDUCED_AGAIN, f"weights {shorten((f'{each:.3g}' for each in used), _MOST)}"
    absent = sorted({rank for (rank, _), ratio in zip(batches, ratios) if abs(ratio) <= tolerance})
    if absent:
        return Cause.NOT_REDUCED, f"those of {numbered('rank', absent)} do not count"
    counts = [len(batch.samples) for _, batch in batches]
    listed = f"weights {shorten((f'{each:.3g}' for each in used), _MOST)}"
    samples = f"for {shorten(counts, _MOST)} samples"
    if _alike(used, tolerance) and not _alike(counts, 0.0):
        return Cause.LOSS_WEIGHTING, f"all have weight {used[0]:.3g}, {samples}"
    norms = [math.hypot(*(each.norm for each in batch.gradients.values())) for _, batch in batches]
    if _alike(wanted, tolerance) and _is_clipped(norms, used, tolerance):
        return Cause.CLIPPING, f"{listed}, for own gradients of norm {', '.join(f'{n:.3g}' for n in norms)}"
    return Cause.LOSS_WEIGHTING, f"{listed}, {samples}{_odd_one(batches, ratios, tolerance)}"


def _summed_again(
    batches: Sequence[tuple[int, BatchRecord]], ratios: Sequence[float], world_size: int, tolerance: float
) -> bool:
    """True if each backward pass of a rank counts as many times as there are ranks more than the one after it."""
    by_rank = grouped((rank, ratio) for (rank, _), ratio in zip(batches, ratios))
    return any(len(each) > 1 for each in by_rank.values()) and all(
        abs(earlier - world_size * later) <= tolerance * abs(earlier)
        for each in by_rank.values()
        for earlier, later in pairwise(each)
    )


def _odd_one(batches: Sequence[tuple[int, BatchRecord]], ratios: Sequence[float], tolerance: float) -> str:
    """Says where only the last backward pass of each rank, or those of one rank, count otherwise than they should."""
    order = [rank for rank, _ in batches]
    last = {max(n for n, each in enumerate(order) if each == rank) for rank in order}
    groups = [("the last micro-batch of each rank counts", last)] if len(last) < len(order) else []
    groups += [(f"those of rank {r} count", {n for n, each in enumerate(order) if each == r}) for r in set(order)]
    for text, chosen in groups:
        inside = [ratios[n] for n in chosen]
        rest = [ratio for n, ratio in enumerate(ratios) if n not in chosen]
        if rest and _alike(inside, tolerance) and _alike([*rest, 1.0], tolerance):
            return f"; {text} {inside[0]:.3g} times as much as in the reference"
    return ""


def _one_factor(sums: _Sums, factor: float, world_size: int, tolerance: float) -> tuple[Cause, str]:
    detail = f"all are {factor:.4g} times as large"
    if abs(factor - world_size) <= tolerance * factor:
        detail += ": summed over the ranks and not averaged, or the loss is multiplied by their number"
    elif abs(factor * world_size - 1) <= tolerance:
        detail += ": divided by the number of ranks twice"
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


_ROUNDED = 2.0**-6
"""The relative part of a gradient that rounding to bf16 may change, at most."""
_MOST = 4
"""Numbers that are listed."""
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
        names = [name for name in common if name not in own]
        for rank in range(len(records)):
            if found := _more(pair, step, names, rank):
                return found
        mine, used = pair.mine(step).used, [record.used for record in records]
        odd = [
            rank
            for rank, theirs in enumerate(used)
            if any(n in theirs and n in mine and not pair.is_same(theirs[n], mine[n]) for n in apart)
        ]
        detail = f"ranks step with different ones; {numbered('rank', odd)} with others than the reference"
        return Diagnosis(Cause.GRADIENTS, step, repr(apart[0]), detail)
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
    if near and _is_mean(pair, step, list(mine)):
        return None  # rounding of steps before: this one summed what the ranks computed as it should
    sums = _sums(pair, step, odd)
    if over := checks.overflowed(pair, step):
        return Diagnosis(Cause.OVERFLOW, step, first, f"not finite on {numbered('rank', over)} before the reduction")
    if sums is None or max(sums.rest_of_used, sums.rest_of_wanted) > pair.fit:
        if found := _more(pair, step, odd, 0):
            return found
        if sums is None:
            detail = "the records do not tell with which weights they were summed"
        elif sums.rest_of_wanted < sums.rest_of_used:
            rest = f"{sums.rest_of_used:.2g} of its norm is something else"
            detail = f"the reduction gave no weighted sum that the reference would explain: {rest}"
        else:
            detail = "they are not a weighted sum that the reference would explain"
        return Diagnosis(Cause.GRADIENTS, step, first, detail)
    if len(odd) <= len(mine) / 2:
        if twice := _reduced_twice(pair, sums, odd):
            return Diagnosis(Cause.REDUCED_TWICE, step, first, f"{twice}; {len(odd)} of {len(mine)} parameters")
        weights = ", ".join(f"{weight:.3g}" for weight in sums.used)
        detail = f"reduced with the weights {weights}; {len(odd)} of {len(mine)} parameters"
        return Diagnosis(Cause.LEFT_OUT, step, first, detail)
    cause, detail = _name_weights(sums, len(pair.other.ranks), min(pair.fit, _WEIGHTS))
    return Diagnosis(cause, step, first, detail)


def _reduced_twice(pair: Pair, sums: _Sums, odd: Sequence[str]) -> str:
    """Says by what factor some parameters are too large, where it is a power of the number of ranks; else empty."""
    ratios, ranks = [a / b if b else math.inf for a, b in zip(sums.used, sums.wanted)], len(pair.other.ranks)
    if ranks < 2 or not _alike(ratios, _WEIGHTS) or ratios[0] <= 1 or not math.isfinite(ratios[0]):
        return ""
    power = math.log(ratios[0], ranks)
    if abs(power - round(power)) > _WEIGHTS or round(power) < 1:
        return ""
    text = f"{ratios[0]:.4g} times as large, in a world of {ranks}"
    names = pair.first.tied.get(odd[0])
    return f"{text}; it is {', '.join(map(repr, names))} too, a tied parameter" if names else text


def _more(pair: Pair, step: int, names: list[str], rank: int) -> Diagnosis | None:
    """Explains gradients that are not a sum of the ranks' own by one more part, which is known.

    It is the gradient of the step before, or the parameter itself; in what a rank used, or in the ranks' own.
    """
    mine, used = pair.mine(step).used, pair.other.at(step)[rank].used
    names = [name for name in names if name in mine and name in used]
    batches = [batch for _, batch in pair.other.batches(step) if not batch.gradients.keys().isdisjoint(names)]
    if not names or not batches:
        return None
    own = [_long(batch.gradients, names, mine) for batch in batches]
    held = pair.other.ranks[rank]
    last = held.steps[step - 1] if step else None
    parts = [("the parameter", _long(last.values if last else held.start, names, mine))]
    if last is not None and last.used:
        parts.insert(0, ("the last step", _long(last.used, names, mine)))
    for target, sign in ((_long(used, names, mine), 1), (_long(mine, names, mine), -1)):
        _, rest = least_squares(np.stack(own, axis=1), target)
        if rest <= pair.tolerance:
            continue
        for kind, part in parts:
            weights, left = least_squares(np.stack([*own, part], axis=1), target)
            if left > min(pair.tolerance, 0.1 * rest):
                continue
            much = sign * weights[-1]
            if kind == "the parameter":
                return Diagnosis(
                    Cause.DECAY, step, repr(names[0]), f"gradients have {much:.3g} of the parameter in them"
                )
            if sign > 0:
                detail = f"those of step {step - 1} have the weight {much:.3g}"
                return Diagnosis(Cause.CARRIED, step, repr(names[0]), detail)
    return None


def compressed(pair: Pair, step: int) -> Diagnosis | None:
    """Finds that the reduced gradients fit into a coarser type, up to a step, or were rounded like that.

    It only explains a difference, which may be within rounding.
    """
    for each in range(step + 1):
        mine, records = pair.mine(each), pair.other.at(each)
        coarse = {name: kind for record in records for name, kind in record.coarse.items()}
        odd = [name for name in coarse if name in mine.used and name not in mine.coarse]
        sums = _sums(pair, each, odd) if 2 * len(odd) >= max(len(mine.used), 1) else None
        if sums is not None and sums.rest_of_used <= _ROUNDED:
            names = f"{len(odd)} of {len(mine.used)} parameters"
            detail = f"all entries fit into {coarse[odd[0]]}, and in the reference they do not; {names}"
            return Diagnosis(Cause.COMPRESSED, each, repr(odd[0]), detail)
    return None


def _is_mean(pair: Pair, step: int, names: list[str]) -> bool:
    """True if the run used the mean of all backward passes, each weighted by its number of samples."""
    mine, theirs = pair.mine(step).used, _merged(pair.other.at(step))
    parts = [len(each.samples) * _long(each.gradients, names, mine) for _, each in pair.other.batches(step)]
    if not parts:
        return False
    _, rest = least_squares(np.sum(parts, axis=0)[:, None], _long(theirs, names, mine))
    return rest <= pair.fit


def _merged(records: list[StepRecord]) -> dict[str, Measure]:
    """The gradients of all ranks by name; ranks that hold the same parameter have been found to agree."""
    return {name: measure for record in reversed(records) for name, measure in record.used.items()}


def _sums(pair: Pair, step: int, names: list[str]) -> _Sums | None:
    """The weights over some parameters; None where no rank recorded their gradients, or too few numbers of them."""
    every = pair.other.batches(step)
    batches = [(rank, batch) for rank, batch in every if not batch.gradients.keys().isdisjoint(names)]
    if not batches:
        return None
    mine, theirs = pair.mine(step).used, _merged(pair.other.at(step))
    columns = np.stack([_long(batch.gradients, names, mine) for _, batch in batches], axis=1)
    if not tells_weights(*columns.shape):
        return None
    used, rest_of_used = least_squares(columns, _long(theirs, names, mine))
    wanted, rest_of_wanted = least_squares(columns, _long(mine, names, mine))
    return _Sums(batches, used, wanted, rest_of_used, rest_of_wanted)


def _long(measures: dict[str, Measure], names: list[str], shapes: dict[str, Measure]) -> Vector:
    """The sketches of some parameters, one after the other; zeros for one without a gradient."""
    return np.concatenate([vector(measures[n]) if n in measures else np.zeros(len(shapes[n].sketch)) for n in names])
