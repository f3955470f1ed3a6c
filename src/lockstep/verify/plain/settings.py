"""What is set rather than computed: hyperparameters, and values that change between two steps."""

from __future__ import annotations

import ast

from lockstep.verify.diagnosis import Cause, Diagnosis
from lockstep.verify.plain.pair import Pair

_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Settings that choose how a step is computed and can only move the last bits."""


def hyperparameters(pair: Pair, step: int) -> Diagnosis | None:
    """A hyperparameter that is not the reference's, or not the same on all ranks."""
    records, mine = pair.other.at(step), pair.mine(step).settings
    for name in mine:
        found = [record.settings.get(name, "") for record in records]
        if name.split()[0] in _IMPLEMENTATION or all(value == mine[name] for value in found):
            continue
        if len(set(found)) > 1:
            each = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(found))
            return Diagnosis(Cause.OPTIMIZER, step, name, each)
        detail = f"{found[0]}, and {mine[name]} in the reference"
        at = _step_with(pair, name, found[0])
        if at is not None and at != step:
            return Diagnosis(
                Cause.SCHEDULE,
                step,
                name,
                f"{found[0]}, as in step {at} of the reference, which has {mine[name]}",
            )
        return Diagnosis(Cause.OPTIMIZER, step, name, detail)
    return None


def precision(pair: Pair) -> Diagnosis | None:
    """A forward pass in another type of numbers."""
    mine = pair.first.context["precision"]
    for rank in pair.other.ranks:
        if rank.context["precision"] != mine:
            detail = f"{rank.context['precision']} on rank {rank.rank}, {mine} in the reference"
            return Diagnosis(Cause.PRECISION, -1, "precision", detail)
    return None


def optimizers(pair: Pair) -> Diagnosis | None:
    """An optimizer of another class."""
    mine = pair.first.context["optimizers"]
    for rank in pair.other.ranks:
        theirs = rank.context["optimizers"]
        if _classes(theirs) != _classes(mine):
            detail = f"{theirs} on rank {rank.rank}, {mine} in the reference"
            return Diagnosis(Cause.OPTIMIZER, -1, "optimizers", detail)
    return None


def _classes(listed: str) -> list[str]:
    return [each.split()[0] for each in listed.split(", ")]


def implementation(pair: Pair) -> tuple[str, str] | None:
    """The first setting of the optimizers' implementation that differs, and how."""
    mine = pair.mine(0).settings
    for name in mine:
        for rank, record in enumerate(pair.other.at(0)):
            if record.settings.get(name, "") != mine[name]:
                return name, f"{record.settings.get(name, '')} on rank {rank}, {mine[name]} in the reference"
    return None


def stale(pair: Pair, step: int) -> Diagnosis | None:
    """Parameters that are not what they were after the step before.

    Where the reference's are not either, only those that went back further than others: a loop may set its values.
    """
    if not step:
        return None
    last, now = pair.mine(step - 1), pair.mine(step)
    for rank, record in enumerate(pair.other.at(step)):
        before = pair.other.ranks[rank].steps[step - 1].values
        changed = [n for n, digest in record.begin.items() if n in before and before[n].digest != digest]
        for name in changed:
            usual = name in now.begin and now.begin[name] == last.values[name].digest
            older = _step_after_which(pair, rank, name, record.begin[name])
            if usual or (older is not None and len(changed) < len(record.begin)):
                detail = (
                    f"on rank {rank} it is as after step {older}" if older is not None else f"rank {rank}"
                )
                return Diagnosis(Cause.STALE, step, repr(name), detail)
    return None


def _step_after_which(pair: Pair, rank: int, name: str, digest: str) -> int | None:
    steps = pair.other.ranks[rank].steps
    return next(
        (each.step for each in steps if name in each.values and each.values[name].digest == digest), None
    )


def _step_with(pair: Pair, name: str, value: str) -> int | None:
    """The first step of the reference that has a number in a setting, to nine digits."""
    number = _number(value)
    if number is None:
        return None
    for record in pair.first.steps:
        found = _number(record.settings.get(name, ""))
        if found is not None and abs(found - number) <= 1e-9 * abs(number):
            return record.step
    return None


def _number(text: str) -> float | None:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    return float(value) if isinstance(value, int | float) else None
