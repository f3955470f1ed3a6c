"""Which samples a step read, over all ranks, against those of the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lockstep.verify.diagnosis import Cause, Diagnosis
from lockstep.verify.plain.pair import Pair
from lockstep.verify.plain.record import Recording, Sample


def samples(pair: Pair, step: int) -> Diagnosis | None:
    """Samples that are missing, repeated, the same on every rank, or those of another step."""
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
    """Epochs that are all shuffled alike, in the reference too; a loop that reads in the order of indices may."""
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
    """The same samples, prepared otherwise."""
    mine = {key for _, batch in pair.reference.batches(step) for key in zip(batch.samples, batch.inputs)}
    if not mine:
        return None
    odd = [
        (rank, sample)
        for rank, batch in pair.other.batches(step)
        for sample, digest in zip(batch.samples, batch.inputs)
        if (sample, digest) not in mine
    ]
    if not odd:
        return None
    ranks = sorted({rank for rank, _ in odd})
    detail = f"on rank {', '.join(str(rank) for rank in ranks)}"
    return Diagnosis(Cause.AUGMENTATION, step, f"sample {odd[0][1]}", detail)


def _all(run: Recording, step: int) -> Counter[Sample]:
    return Counter(sample for share in run.samples(step) for sample in share)


def _period(pair: Pair, step: int) -> int | None:
    """After how many steps the run reads everything again in the same order, where the reference does not."""
    mine = [_all(pair.reference, each) for each in range(step + 1)]
    theirs = [_all(pair.other, each) for each in range(step + 1)]
    for period in range(1, step + 1):
        repeats = all(theirs[each] == theirs[each - period] for each in range(period, step + 1))
        if repeats and theirs[:period] == mine[:period] and mine[step] != mine[step - period]:
            return period
    return None


def _read_twice(pair: Pair, step: int) -> list[Sample]:
    """What the run reads more than once in the epoch of a step, and the reference does not."""
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
    listed = [str(each)[:8] for each in found]
    return ", ".join(listed[:4]) + (", ..." if len(listed) > 4 else "")
