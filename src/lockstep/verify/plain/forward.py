"""The loss of each sample against the reference's: what differs has been drawn, normalised or computed otherwise."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.verify.diagnosis import Cause, Diagnosis
from lockstep.verify.plain.pair import Pair
from lockstep.verify.plain.record import BatchRecord, Sample


def losses(pair: Pair, step: int) -> Diagnosis | None:
    """Losses of samples that differ by more than rounding."""
    mine = _by_sample(batch for _, batch in pair.reference.batches(step))
    if not mine:
        return None
    scale = sum(abs(value) for value in mine.values()) / len(mine)
    for rank, batch in pair.other.batches(step):
        for sample, value in zip(batch.samples, batch.losses):
            if sample in mine and not pair.is_close(value, mine[sample], scale):
                where = f"loss of sample {sample} on rank {rank}"
                numbers = f"{value:.4g}, and {mine[sample]:.4g} in the reference"
                return _cause(pair, step, where, numbers)
    return None


def _cause(pair: Pair, step: int, where: str, numbers: str) -> Diagnosis:
    batches = [(rank, batch) for rank, batch in pair.other.batches(step) if batch.losses]
    drew = [batch.generators[0] != batch.generators[1] for _, batch in batches]
    states = [_states(pair, step, rank) for rank in sorted({rank for rank, _ in batches})]
    if any(drew):
        if len(states) > 1 and all(state == states[0] for state in states):
            return Diagnosis(Cause.SAME_MASKS, step, where, "torch's generator is in one state on all ranks")
        return Diagnosis(Cause.MODEL_RANDOMNESS, step, where, numbers)
    norms = [name for record in pair.other.at(step) for name in record.batch_norms]
    if norms and len(batches) > len(list(pair.reference.batches(step))):
        return Diagnosis(Cause.BATCH_NORM, step, where, f"{norms[0]!r} is one; {numbers}")
    return Diagnosis(Cause.FORWARD, step, where, numbers)


def _states(pair: Pair, step: int, rank: int) -> list[str]:
    return [batch.generators[0] for batch in pair.other.ranks[rank].steps[step].batches]


def _by_sample(batches: Iterable[BatchRecord]) -> dict[Sample, float]:
    return {sample: loss for batch in batches for sample, loss in zip(batch.samples, batch.losses)}
