"""Checks the samples of a step over all ranks, their inputs, and the loss of each, against the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from lockstep.text import grouped, numbered, plural, shorten
from lockstep.verify.diagnosis import Cause, Diagnosis
from lockstep.verify.plain.checks import Pair
from lockstep.verify.plain.record import LOSS, BatchRecord, Recording, Sample


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
    if found := _left_out(pair, step):
        return found
    if not missing:
        return Diagnosis(Cause.REPEATED, step, "samples", f"too often: {_some(extra.elements())}")
    if not extra:
        return Diagnosis(Cause.DROPPED, step, "samples", f"missing: {_some(missing.elements())}")
    twice = _read_twice(pair, step)
    odd = [rank for rank, share in enumerate(shares) if Counter(share) - mine]
    where = "" if len(odd) == len(shares) else f"{numbered('rank', odd)} alone reads others; "
    if twice:
        return Diagnosis(Cause.OVERLAP, step, "samples", f"{where}twice in this epoch: {_some(twice)}")
    detail = f"{where}not in the reference: {_some(extra.elements())}"
    return Diagnosis(Cause.DATA_ORDER, step, "samples", detail)


def _left_out(pair: Pair, step: int) -> Diagnosis | None:
    """Finds that the run goes on where the reference is later, so a step of the reference is not read."""
    mine, theirs = _all(pair.reference, step), _all(pair.other, step)
    size, usual = mine.total(), _all(pair.reference, 0).total()
    later = range(step + 1, pair.reference.length)
    goes_on = next((each for each in later if _all(pair.reference, each) == theirs), None)
    text = f"{plural(size, 'sample')} of step {step} of the reference"
    if size < usual and (goes_on is not None or theirs.total() == usual):
        return Diagnosis(Cause.LAST_BATCH, step, "samples", f"{text}, whose steps have {usual}")
    if goes_on is not None:
        detail = f"{text}; it reads those of step {goes_on}"
        return Diagnosis(Cause.DROPPED, step, "samples", detail)
    return None


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
    ranks, where = sorted({rank for rank, _ in odd}), f"sample {odd[0][1]}"
    detail = f"on {numbered('rank', ranks)}"
    if len(ranks) == len(pair.other.ranks) > 1 and (name := _shared_state(pair, step)):
        return Diagnosis(Cause.SAME_DRAWS, step, where, f"{detail}; {name} is in one state on all ranks")
    return Diagnosis(Cause.AUGMENTATION, step, where, detail)


def _shared_state(pair: Pair, step: int) -> str:
    """The global generator that moves between forward passes and is in the same state on all ranks, if one is."""
    ranks = [[batch.states for batch in record.batches] for record in pair.other.at(step)]
    before = pair.other.at(max(step - 1, 0))[0].batches
    after = pair.other.at(min(step + 1, pair.other.length - 1))[0].batches
    for name in ranks[0][0] if ranks[0] else ():
        states = [[each.get(name) for each in batches] for batches in ranks]
        near = {batch.states.get(name) for batch in (*before, *after)} - {None} | set(states[0])
        if all(each == states[0] for each in states) and len(near) > 1:
            return name
    return ""


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
        for number, value in enumerate(batch.losses):
            sample = batch.samples[number]
            if sample in mine and not pair.is_close(value, mine[sample], scale):
                where = f"loss of sample {sample} on rank {rank}"
                numbers = f"{value:.4g}, and {mine[sample]:.4g} in the reference"
                return _targets(pair, step) or _cause(pair, step, (rank, batch, number), where, numbers)
    return None


def _targets(pair: Pair, step: int) -> Diagnosis | None:
    """Finds a sample with another target."""
    known = {s: t for _, each in pair.reference.batches(step) for s, t in zip(each.samples, each.targets)}
    for rank, batch in pair.other.batches(step):
        for sample, target in zip(batch.samples, batch.targets):
            if known.get(sample, target) != target:
                detail = f"{target} on rank {rank}, and {known[sample]} in the reference"
                return Diagnosis(Cause.TARGETS, step, f"sample {sample}", detail)
    return None


def _cause(pair: Pair, step: int, at: tuple[int, BatchRecord, int], where: str, numbers: str) -> Diagnosis:
    batches = [(rank, batch) for rank, batch in pair.other.batches(step) if batch.losses]
    same_output = _same_output(pair, step, at[1], at[2])
    if same_output:
        return _of_loss(pair, step, batches, where, numbers)
    state, is_certain = hidden(pair, step, loss=False)
    if state and is_certain:
        return Diagnosis(Cause.HIDDEN_STATE, step, where, f"{state}; {numbers}")
    ranks = [pair.other.at(step)[rank].batches for rank in sorted({rank for rank, _ in batches})]
    states = [[batch.generators[0] for batch in each] for each in ranks]
    if any(batch.generators[0] != batch.generators[1] for _, batch in batches):
        if len(states) > 1 and all(state == states[0] for state in states):
            return Diagnosis(Cause.SAME_MASKS, step, where, "torch's generator is in one state on all ranks")
        return Diagnosis(Cause.MODEL_RANDOMNESS, step, where, numbers)
    drawn = next((name for _, batch in batches for name in batch.drawn), "")
    if drawn:
        return Diagnosis(Cause.MODEL_RANDOMNESS, step, where, f"it draws from {drawn}; {numbers}")
    norms = [name for record in pair.other.at(step) for name in record.batch_norms]
    if norms and len(batches) > len(list(pair.reference.batches(step))):
        return Diagnosis(Cause.BATCH_NORM, step, where, f"{norms[0]!r} is one; {numbers}")
    numbers = f"{state}; {numbers}" if state else numbers
    return Diagnosis(Cause.FORWARD if same_output is None else Cause.OUTPUT, step, where, numbers)


def _same_output(pair: Pair, step: int, batch: BatchRecord, number: int) -> bool | None:
    """True if the model's output for a sample is that of the reference but for rounding; None where it is not known."""
    for _, known in pair.reference.batches(step):
        if batch.samples[number] in known.samples and len(known.outputs) == len(known.samples):
            if len(batch.outputs) != len(batch.samples):
                return None
            wanted = np.array(known.outputs[known.samples.index(batch.samples[number])])
            found, size = np.array(batch.outputs[number]), float(np.linalg.norm(wanted))
            if found.shape != wanted.shape:
                return False
            return bool(np.linalg.norm(found - wanted) <= pair.tolerance * size)
    return None


def hidden(pair: Pair, step: int, *, loss: bool) -> tuple[str, bool]:
    """The state besides parameters and floating-point buffers that differs in the model or the loss; True if no tensor.

    Tensors come last: they may be no more than copies of what was computed. Empty where nothing differs.
    """
    found: list[tuple[bool, str]] = []
    for each in range(max(step - 1, 0), step + 1):  # the next step begins with what a step leaves
        mine = pair.mine(each).attributes
        for rank, record in enumerate(pair.other.at(each)):
            for name, value in record.attributes.items():
                if name.startswith(f"{LOSS}.") is loss and mine.get(name) != value:
                    known = mine.get(name, "as at the beginning")
                    text = f"{name!r} is {value} on rank {rank} after step {each}, {known} in the reference"
                    found.append(("tensor" in value, text))
    is_tensor, text = min(found, key=lambda each: each[0], default=(True, ""))
    return text, not is_tensor


def _of_loss(pair: Pair, step: int, batches: list[tuple[int, BatchRecord]], where: str, numbers: str) -> Diagnosis:
    """Says what is known where losses differ though outputs do not."""
    state, _ = hidden(pair, step, loss=True)
    if state:
        return Diagnosis(Cause.LOSS_STATE, step, where, f"{state}; {numbers}")
    mine = {s: v for _, each in pair.reference.batches(step) for s, v in zip(each.samples, each.losses)}
    factors: dict[int, list[tuple[Sample, float]]] = {}
    for rank, batch in batches:
        targets = batch.targets or range(len(batch.samples))
        for sample, value, target in zip(batch.samples, batch.losses, targets):
            if before := mine.get(sample):
                factors.setdefault(rank, []).append((target, value / before))
    tolerance = 10 * pair.tolerance
    ranges = {rank: [factor for _, factor in each] for rank, each in factors.items()}
    even = [rank for rank, each in ranges.items() if max(each) - min(each) <= tolerance * abs(max(each))]
    if len(even) == len(ranges):
        listed = ", ".join(f"{ranges[rank][0]:.4g} times on rank {rank}" for rank in even)
        return Diagnosis(Cause.LOSS, step, where, f"all losses of a rank are {listed} as large")
    by_class = grouped(((rank, target), factor) for rank, pairs in factors.items() for target, factor in pairs)
    several = [each for each in by_class.values() if len(each) > 1]
    if several and all(max(each) - min(each) <= tolerance * abs(max(each)) for each in several):
        listed = shorten((f"{each[0]:.3g} for class {t} on rank {r}" for (r, t), each in by_class.items()), 4)
        return Diagnosis(Cause.CLASS_WEIGHTS, step, where, f"times as large: {listed}")
    return Diagnosis(Cause.LOSS, step, where, numbers)
