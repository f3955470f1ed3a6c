"""What a step left behind: skipped updates, replicas, buffers, the update itself, the reported loss."""

from __future__ import annotations

import math

from lockstep.verify.diagnosis import Cause, Diagnosis
from lockstep.verify.plain.pair import Pair, vector

_OF_UPDATE = 10
"""How many tolerances an update may be off: optimizers that divide by gradients enlarge their rounding."""


def skipped(pair: Pair, step: int) -> Diagnosis | None:
    """A step that only some ranks took, or that one of the runs did not take."""
    mine, theirs = pair.mine(step).updates, [record.updates for record in pair.other.at(step)]
    if len(set(theirs)) > 1:
        without = ", ".join(str(rank) for rank, count in enumerate(theirs) if count < max(theirs))
        return Diagnosis(Cause.SKIPPED, step, "optimizer", f"not taken on rank {without}")
    if theirs[0] != mine:
        detail = f"{theirs[0]} updates, and {mine} in the reference"
        return Diagnosis(Cause.UPDATE, step, "optimizer", detail)
    return None


def replicas(pair: Pair, step: int) -> Diagnosis | None:
    """A parameter of which the ranks hold different bits."""
    records = pair.other.at(step)
    for name in dict.fromkeys(name for record in records for name in record.values):
        held = [record.values[name].digest for record in records if name in record.values]
        if len(set(held)) > 1:
            return Diagnosis(Cause.REPLICAS, step, repr(name))
    return None


def buffers(pair: Pair, step: int) -> Diagnosis | None:
    """Buffers that begin a step differently on the ranks, or otherwise than in the reference."""
    records, mine = pair.other.at(step), pair.mine(step).buffers
    for name in dict.fromkeys(name for record in records for name in record.buffers):
        held = {rank: record.buffers[name] for rank, record in enumerate(records) if name in record.buffers}
        if len({each.digest for each in held.values()}) > 1:
            return Diagnosis(Cause.BUFFERS, step - 1, repr(name), "ranks hold different values")
        if (
            name in mine
            and not pair.is_same(mine[name], next(iter(held.values())))
            and not _drifts(pair, step)
        ):
            return Diagnosis(
                Cause.BUFFERS, step - 1, repr(name), "equal on all ranks, and not the reference's"
            )
    return None


def _drifts(pair: Pair, step: int) -> bool:
    """Whether parameters have gone their own way on rounding alone.

    The bias before a BatchNorm has a gradient of nothing but rounding, and Adam makes full steps of it. It moves the
    running mean and no output.
    """
    if not step:
        return False
    mine, held = pair.mine(step - 1).values, [record.values for record in pair.other.at(step - 1)]
    return any(
        name in mine and not pair.is_same(mine[name], now) for each in held for name, now in each.items()
    )


def update(pair: Pair, step: int) -> Diagnosis | None:
    """A change of a parameter that is not the reference's although its gradient is."""
    used = pair.mine(step).used
    total = math.hypot(*(each.norm for each in used.values()))
    for record, rank in zip(pair.other.at(step), pair.other.ranks):
        before = rank.steps[step - 1].values if step else rank.start
        known = pair.first.steps[step - 1].values if step else pair.first.start
        for name, now in record.values.items():
            mine = pair.mine(step).values.get(name)
            if mine is None or name not in used or used[name].norm <= pair.noise * total:
                continue
            change, wanted = vector(now) - vector(before[name]), vector(mine) - vector(known[name])
            bound = _OF_UPDATE * pair.tolerance * math.hypot(*wanted) + 1e-6 * mine.norm
            gap = math.hypot(*(change - wanted))
            if gap > bound:
                ratio = f"{gap / max(math.hypot(*wanted), 1e-300):.3g} of the reference's change"
                return Diagnosis(Cause.UPDATE, step, repr(name), f"off by {ratio}")
    return None


def reported(pair: Pair, step: int) -> Diagnosis | None:
    """A reported loss that is not the reference's although those of all samples are."""
    mine = [batch.loss for batch in pair.mine(step).batches if batch.loss is not None]
    if not mine:
        return None
    wanted = sum(mine) / len(mine)
    for rank, record in enumerate(pair.other.at(step)):
        found = [batch for batch in record.batches if batch.loss is not None]
        if not found:
            continue
        value = sum(batch.loss or 0.0 for batch in found) / len(found)
        if not pair.is_close(value, wanted):
            own = [loss for batch in found for loss in batch.losses]
            is_own = bool(own) and pair.is_close(value, sum(own) / len(own))
            detail = f"{value:.4g} on rank {rank}{', the mean of its own samples' if is_own else ''}"
            return Diagnosis(Cause.REPORTED, step, "loss", f"{detail}; {wanted:.4g} in the reference")
    return None
