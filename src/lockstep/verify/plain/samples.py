"""Checks the samples of a step over all ranks, their inputs, and the loss of each, against the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lockstep.text import numbered, shorten
from lockstep.verify.diagnosis import Cause, Diagnosis
from lockstep.verify.plain.checks import Pair
from lockstep.verify.plain.record import Recording, Sample


def samples(pair: Pair, step: int) -> Diagnosis | None:
    """Finds samples that are missing, repeated, the same on every rank, or of another step."""
    shares, mine = pair.other.samples(step), _all(pair.reference, step)
    theirs = _all(pair.other, step)
    if theirs == mine or not mine or not theirs:
        return None
    if len(shares) > 1 and all(share == shares[0] for share in shares):
        return Diagnosis(Cause.SAME_SHARE, step, "samples", _some(shares[0]))
    period = _period(pair, step)
    if period is not None:
        return Diagnosis(Cause.EPOCHS, step, "samples", f"they are those of step {step - period}")
    extra, missing = theirs - mine, mine - theirs
    if not missing:
        return Diagnosis(Cause.REPEATED, step, "samples", f"too often: {_some(extra.elements())}")
    if not extra:
        return Diagnosis(Cause.DROPPED, step, "samples", f"missing: {_some(missing.elements())}")
    twice = _read_twice(pair, step)
    if twice:
        return Diagnosis(Cause.OVERLAP, step, "samples", f"twice in this epoch: {_some(twice)}")
    return Diagnosis(Cause.DATA_ORDER, step, "samples", f"not in the reference: {_some(extra.elements())}")


def same_order(pair: Pair) -> Diagnosis | None:
    """Finds epochs with equal orders, in the reference too, unless the loop reads in the order of indices."""
    length = min(pair.reference.length, pair.other.length)
    epoch = _epoch(pair.reference)
    orders = [pair.reference.samples(step) for step in range(length)]
    if epoch < 2 or epoch >= length or any(orders[n] != orders[n - epoch] for n in range(epoch, length)):
        return None
    first = [str(sample).rjust(20) for step in orders[:epoch] for share in step for sample in share]
    if first == sorted(first):
        return None
    return Diagnosis(Cause.EPOCHS, epoch, "samples", "they are those of step 0, in the reference too")


def inputs(pair: Pair, step: int) -> Diagnosis | None:
    """Finds a sample whose input differs."""
    mine = {key for _, batch in pair.reference.batches(step) for key in zip(batch.samples, batch.inputs)}
    odd = [
        (rank, sample)
        for rank, batch in pair.other.batches(step)
        for sample, digest in zip(batch.samples, batch.inputs)
        if (sample, digest) not in mine
    ]
    if not odd or not mine:
        return None
    ranks = sorted({rank for rank, _ in odd})
    return Diagnosis(Cause.AUGMENTATION, step, f"sample {odd[0][1]}", f"on {numbered('rank', ranks)}")


def _all(run: Recording, step: int) -> Counter[Sample]:
    return Counter(sample for share in run.samples(step) for sample in share)


def _period(pair: Pair, step: int) -> int | None:
    """The number of steps after which the run, but not the reference, reads the same samples again."""
    mine = [_all(pair.reference, each) for each in range(step + 1)]
    theirs = [_all(pair.other, each) for each in range(step + 1)]
    for period in range(1, step + 1):
        repeats = all(theirs[each] == theirs[each - period] for each in range(period, step + 1))
        if repeats and theirs[:period] == mine[:period] and mine[step] != mine[step - period]:
            return period
    return None


def _read_twice(pair: Pair, step: int) -> list[Sample]:
    """The samples that the run reads more often in the epoch of a step than the reference."""
    epoch = _epoch(pair.reference)
    first = step - step % epoch
    window = range(first, min(first + epoch, pair.other.length, pair.reference.length))
    counts = sum((_all(pair.other, each) for each in window), Counter[Sample]())
    usual = sum((_all(pair.reference, each) for each in window), Counter[Sample]())
    return [sample for sample, count in counts.items() if count > max(1, usual[sample])]


def _epoch(run: Recording) -> int:
    """Steps until the reference reads a sample again."""
    seen: set[Sample] = set()
    for step in range(run.length):
        read = set(_all(run, step))
        if seen & read:
            return step
        seen |= read
    return run.length


def _some(found: Iterable[Sample]) -> str:
    return shorten((str(each)[:8] for each in found), 4)


def losses(pair: Pair, step: int) -> Diagnosis | None:
    """Finds a sample whose loss differs by more than rounding."""
    reference = [batch for _, batch in pair.reference.batches(step)]
    mine = {sample: loss for batch in reference for sample, loss in zip(batch.samples, batch.losses)}
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
    ranks = [pair.other.at(step)[rank].batches for rank in sorted({rank for rank, _ in batches})]
    states = [[batch.generators[0] for batch in each] for each in ranks]
    if any(batch.generators[0] != batch.generators[1] for _, batch in batches):
        if len(states) > 1 and all(state == states[0] for state in states):
            return Diagnosis(Cause.SAME_MASKS, step, where, "torch's generator is in one state on all ranks")
        return Diagnosis(Cause.MODEL_RANDOMNESS, step, where, numbers)
    norms = [name for record in pair.other.at(step) for name in record.batch_norms]
    if norms and len(batches) > len(list(pair.reference.batches(step))):
        return Diagnosis(Cause.BATCH_NORM, step, where, f"{norms[0]!r} is one; {numbers}")
    return Diagnosis(Cause.FORWARD, step, where, numbers)
