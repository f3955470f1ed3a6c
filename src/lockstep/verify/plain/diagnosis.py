"""Why a run of an ordinary loop on several ranks parts from its run on one: a pure function of what was recorded.

Every step is checked in the order in which it computes, so the first thing that differs has caused the rest. Ordinary
loops add in another order on every number of ranks; what differs by no more than rounding is judged last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lockstep.errors import ConfigError
from lockstep.verify.diagnosis import Cause, Diagnosis
from lockstep.verify.plain import after, forward, gradients, samples, settings, start
from lockstep.verify.plain.pair import Pair
from lockstep.verify.plain.record import Recording

_CHECKS: tuple[Callable[[Pair, int], Diagnosis | None], ...] = (
    start.frozen,
    settings.stale,
    after.buffers,
    settings.hyperparameters,
    samples.samples,
    samples.inputs,
    forward.losses,
    after.skipped,
    gradients.gradients,
    after.replicas,
    after.update,
)


def diagnose_plain(
    reference: Recording, other: Recording, *, again: Recording | None = None, tolerance: float | None = None
) -> Diagnosis | None:
    """The first difference and its cause; None where all bits are equal.

    Args:
        reference: the run on one process.
        other: the run to be judged.
        again: the reference recorded a second time, which tells operators that do not repeat themselves.
        tolerance: relative difference that rounding may explain; by default as the reference's precision has it.

    Raises:
        ConfigError: the reference was recorded on several processes.
    """
    if len(reference.ranks) != 1:
        raise ConfigError(
            f"The reference was recorded on {len(reference.ranks)} processes. Record it on one, where there is nothing "
            "to share out or to reduce."
        )
    pair = Pair(reference, other, tolerance)
    found = beyond_rounding(pair)
    rounded = _by_bits(pair)
    if again is not None and _by_bits(Pair(reference, again, tolerance)) is not None:
        differs = found if found is not None and found.cause in (Cause.FORWARD, Cause.GRADIENTS) else None
        if differs is None and found is None:
            differs = rounded
        if differs is not None:
            return replace(differs, cause=Cause.OPERATOR, detail="the reference differs from itself")
    return found or rounded


def beyond_rounding(pair: Pair) -> Diagnosis | None:
    """The first thing that differs by more than rounding."""
    steps = range(min(pair.reference.length, pair.other.length))
    found = start.values(pair) or settings.precision(pair) or settings.optimizers(pair) or start.stages(pair)
    for step in steps if found is None else ():
        found = next((each for check in _CHECKS if (each := check(pair, step)) is not None), None)
        if found is not None:
            break
    if found is not None:
        return found
    unequal = next((each for step in steps if (each := after.reported(pair, step)) is not None), None)
    return unequal or samples.same_order(pair)


def _by_bits(pair: Pair) -> Diagnosis | None:
    """What differs in bits, and whether anything but the order of sums explains it."""
    context = pair.first.context
    for step in range(min(pair.reference.length, pair.other.length)):
        mine = pair.mine(step).values
        for record in pair.other.at(step):
            for name, value in record.values.items():
                if name in mine and mine[name].digest != value.digest:
                    rounding = Diagnosis(Cause.REDUCTION_ORDER, step, repr(name), "no more than rounding")
                    return _explained(pair, rounding, context)
    return None


def _explained(pair: Pair, found: Diagnosis, context: dict[str, str]) -> Diagnosis:
    for key in sorted(context):
        for rank in pair.other.ranks:
            value = rank.context.get(key, "")
            if value != context[key] and key not in ("optimizers", "precision"):
                cause = Cause.THREADS if key == "threads" else Cause.SOFTWARE
                detail = f"{key}: {value} on rank {rank.rank}, {context[key]} in the reference"
                return replace(found, cause=cause, detail=detail)
    setting = settings.implementation(pair)
    if setting is not None:
        return replace(found, cause=Cause.OPTIMIZER, detail=f"{setting[0]}: {setting[1]}")
    return found
