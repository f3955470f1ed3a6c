"""From the weights that gradients were summed with to the mistake behind them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from lockstep.verify.diagnosis import Cause
from lockstep.verify.plain.record import BatchRecord


def name_weights(
    batches: Sequence[tuple[int, BatchRecord]],
    used: Sequence[float],
    wanted: Sequence[float],
    world_size: int,
    tolerance: float,
) -> tuple[Cause, str]:
    """The cause and a sentence on the numbers.

    Args:
        batches: rank and record of each backward pass.
        used: its weight in the gradient that was used.
        wanted: its weight in the reference's gradient.
        world_size: number of ranks.
        tolerance: relative.
    """
    ratios = [a / b if b else math.inf for a, b in zip(used, wanted)]
    middle = statistics.median(ratios)
    if all(abs(ratio - middle) <= tolerance * abs(middle) for ratio in ratios):
        return _one_factor(batches, used, middle, world_size, tolerance)
    absent = sorted({rank for (rank, _), ratio in zip(batches, ratios) if abs(ratio) <= tolerance})
    if absent:
        return Cause.NOT_REDUCED, f"those of rank {', '.join(str(rank) for rank in absent)} do not count"
    counts = [len(batch.samples) for _, batch in batches]
    listed = "weights " + ", ".join(f"{each:.3g}" for each in used)
    if _alike(used, tolerance) and not _alike(counts, 0.0):
        return Cause.LOSS_WEIGHTING, f"all have weight {used[0]:.3g}, for {_words(counts)} samples"
    norms = [math.hypot(*(each.norm for each in batch.gradients.values())) for _, batch in batches]
    if _alike(wanted, tolerance) and _is_clipped(norms, used, tolerance):
        return Cause.CLIPPING, f"{listed}, for own gradients of norm {', '.join(f'{n:.3g}' for n in norms)}"
    return Cause.LOSS_WEIGHTING, f"{listed}, for {_words(counts)} samples"


def _one_factor(
    batches: Sequence[tuple[int, BatchRecord]],
    used: Sequence[float],
    factor: float,
    world_size: int,
    tolerance: float,
) -> tuple[Cause, str]:
    detail = f"all are {factor:.4g} times as large"
    each = len(batches) / len({rank for rank, _ in batches})
    is_mean_over_ranks = all(abs(weight * world_size - 1) <= tolerance for weight in used)
    if each > 1 and abs(factor / each - 1) <= tolerance and (is_mean_over_ranks or each != world_size):
        return Cause.ACCUMULATION, f"{detail}, and every rank accumulates {each:.0f}"
    return Cause.GRADIENT_SCALE, f"{detail}, in a world of {world_size}"


def _alike(values: Sequence[float], tolerance: float) -> bool:
    return max(values) - min(values) <= tolerance * max(abs(value) for value in values)


def _is_clipped(norms: Sequence[float], weights: Sequence[float], tolerance: float) -> bool:
    """Whether every gradient counts in full, or else with the one norm that it was cut down to."""
    full, parts = max(weights), [norm * weight for norm, weight in zip(norms, weights)]
    return all(
        abs(weight - full) <= tolerance * full or abs(part - max(parts)) <= tolerance * max(parts)
        for weight, part in zip(weights, parts)
    )


def _words(counts: Sequence[int]) -> str:
    return " and ".join(str(count) for count in counts)
