"""Compares the run of a layout with the reference, and writes the result of ``lockstep verify`` as text and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.text import aligned, format_bytes, plural
from lockstep.verify.diagnosis import Cause, Diagnosis, diagnose
from lockstep.verify.trace import Trace


@dataclass(frozen=True)
class Comparison:
    """A layout compared with the reference."""

    trace: Trace
    reached: str
    """A: equal bits after every step; B: within ``BOUND``; ~: further apart, as far as the model itself enlarges
    rounding; -: further apart than that; C: no more was promised; empty: it did not run."""
    difference: float = 0.0
    """Largest relative difference of a parameter at the end; 0 for equal bits."""
    diagnosis: Diagnosis | None = None
    sensitivity: float | None = None
    """The same difference, the largest of some runs, for one device whose inputs and layers were changed by one unit in
    the last place; None if the layout is within the bound, or if it was not measured."""

    @property
    def is_broken(self) -> bool:
        """True if the layout promises level A or B and did not reach it, or refuses the program while it trains."""
        if self.trace.in_training:
            return True
        if self.trace.level == "B":
            return self.reached == "-"
        return not self.trace.refused and self.trace.level == "A" and self.reached != "A"

    @property
    def needs_sensitivity(self) -> bool:
        """True if rounding may explain a difference beyond the bound: ``compare`` should know the sensitivity."""
        return self.is_broken and self.trace.level == "B" and self.sensitivity is None


BOUND = 1e-3
"""Largest relative difference at level B of a parameter from that of one device, after the compared steps."""
_FURTHER = 10.0
"""A layout rounds in every operator, what it is compared with once a layer only: it may differ by this much more."""
_PARTED = 0.1
"""Sensitivity from which the parameters of two runs have so little in common that their distance says nothing more."""
_MAY_BE_ROUNDING = (
    Cause.ROUNDING,
    Cause.RESUMED,
    Cause.REDUCTION_ORDER,
    Cause.GRADIENTS,
    Cause.LEFT_OUT,  # a gradient that is rounding alone looks so, as of a bias before a BatchNorm
    Cause.BUFFERS,
    Cause.UPDATE,
)


def is_enlarged(difference: float, sensitivity: float) -> bool:
    """True for a difference that rounding alone explains in a model of this sensitivity."""
    return difference <= _FURTHER * sensitivity or sensitivity >= _PARTED


def compare(
    reference: Trace,
    other: Trace,
    difference: float,
    *,
    repeats: bool | None = None,
    sensitivity: float | None = None,
) -> Comparison:
    """Compares the run of a layout with the reference.

    Args:
        reference: the run on one device.
        other: the run of the layout.
        difference: the largest relative difference of a parameter at the end.
        repeats: as in ``diagnose``.
        sensitivity: the largest difference of runs on one device whose inputs and layers were changed by one unit
            in the last place.
    """
    if other.refused:
        return Comparison(other, "")
    found = diagnose(reference, other, repeats=repeats)
    if found is None and difference:
        last, detail = other.first + len(other.steps), f"after the last step, by {difference:.1e}"
        found = Diagnosis(Cause.STALE, last, "the parameters", detail)
    if found is None:
        return Comparison(other, "A")
    if other.level == "C":
        return Comparison(other, "C", difference, None if other.independent else found)
    if difference <= BOUND and found.cause not in (Cause.LENGTH, Cause.NOT_MADE):
        return Comparison(other, "B", difference, found)
    near = sensitivity is not None and is_enlarged(difference, sensitivity)
    enlarged = near and found.cause in _MAY_BE_ROUNDING and math.isfinite(difference)
    return Comparison(other, "~" if enlarged else "-", difference, found, sensitivity)


def largest_difference(reference: Path, other: Path) -> float:
    """The largest relative difference of a tensor between two files; infinite where it has no size."""
    import torch
    from safetensors.torch import load_file

    from lockstep.core.fingerprint import digest_tensor

    mine, theirs = load_file(reference), load_file(other)
    worst = 0.0 if mine.keys() == theirs.keys() else math.inf
    for name in mine.keys() & theirs.keys():
        one, two = mine[name], theirs[name]
        if digest_tensor(one) == digest_tensor(two):
            continue
        gap = float((two.double() - one.double()).norm()) if one.shape == two.shape else math.inf
        size = max(float(one.double().norm()), torch.finfo(torch.float32).tiny)
        worst = max(worst, gap / size if math.isfinite(gap) else math.inf)
    return worst


_HEAD = ("layout", "level", "result", "ms/step", "MiB/rank", "sent/step")


def table(comparisons: Sequence[Comparison]) -> str:
    """One row for each layout, the reference first, then a line for each that differs or did not run."""
    lines = [*aligned([_HEAD, *map(_row, comparisons)]), ""]
    reference, *others = comparisons
    ran = [each for each in others if not each.trace.refused or each.trace.in_training]
    lines += [f"{each.trace.label} differs since {each.diagnosis.text}." for each in comparisons if each.diagnosis]
    lines += [_beyond_bound(each) for each in comparisons if each.sensitivity is not None]
    lines += [
        f"{each.trace.label}{': refused while it trained' if each.trace.in_training else ' did not run'}: "
        + each.trace.refused
        for each in comparisons
        if each.trace.refused
    ]
    lines += [
        f"{each.trace.label}: {warning}"
        for each in comparisons
        for warning in each.trace.warnings
        if each.trace.first and warning not in reference.trace.warnings
    ]
    if reference.trace.refused:
        return "\n".join([*lines, "No layout was compared."])
    if further := reference.trace.further_runs:
        lines.append(f"The script begins {1 + further} runs with lockstep.init; the first alone was compared.")
    steps, last = len(reference.trace.steps), float.fromhex(reference.trace.steps[-1].loss)
    if not ran:
        return "\n".join([*lines, f"No other layout was compared. The loss of the last step is {last:.6g}."])
    after = f"each of {steps} steps; the loss of the last is" if steps > 1 else "the only step, whose loss is"
    equal = f"{sum(each.reached == 'A' for each in ran)} of {plural(len(ran), 'other layout')}"
    has = "has" if len(ran) == 1 else "have"
    lines.append(f"{equal} {has} the bits of one device after {after} {last:.6g}.")
    return "\n".join(lines)


def as_json(comparisons: Sequence[Comparison]) -> str:
    """All results as JSON."""
    found = [
        {
            "layout": each.trace.label,
            "strategy": each.trace.strategy,
            "ranks": each.trace.ranks,
            "promised": each.trace.level,
            "reached": each.reached,
            "difference": each.difference,
            "sensitivity": each.sensitivity,
            "refused": each.trace.refused,
            "cause": "refused" if each.trace.in_training else _cause(each),
            "step": each.diagnosis.step if each.diagnosis else None,
            "tensor": each.diagnosis.tensor if each.diagnosis else "",
            "detail": each.diagnosis.detail if each.diagnosis else "",
            "possible": each.diagnosis.possible if each.diagnosis else (),
            "milliseconds": each.trace.milliseconds,
            "memory": each.trace.memory,
            "sent": each.trace.sent,
            "warnings": each.trace.warnings,
            "further_runs": each.trace.further_runs,
        }
        for each in comparisons
    ]
    return json.dumps(found, indent=1) + "\n"


def _cause(each: Comparison) -> str:
    return each.diagnosis.cause.name.lower() if each.diagnosis else ""


def _beyond_bound(each: Comparison) -> str:
    explained = "rounding alone does not explain it."
    if each.reached == "~":
        explained = "this model enlarges rounding that much. Compare fewer steps to see the layout within the bound."
    return (
        f"{each.trace.label} differs by {each.difference:.1e}, more than the bound of level B, {BOUND:g}. One device "
        "whose inputs and layers change by one unit in the last place differs by up to "
        f"{each.sensitivity:.1e}: {explained}"
    )


def _row(each: Comparison) -> tuple[str, ...]:
    trace = each.trace
    if trace.refused:
        return trace.label, "", "refused" if trace.in_training else "did not run", "", "", ""
    differs = f"differs by {each.difference:.1e}" if each.difference else "equal at the end"
    result = "equal bits" if each.reached == "A" else differs
    memory = f"{max(trace.memory) / 2**20:.0f}"
    sent = format_bytes(trace.sent) if trace.sent else "-"
    return trace.label, each.reached, result, f"{trace.milliseconds:.1f}", memory, sent
