"""Writes the result of ``lockstep verify`` as text and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lockstep.text import aligned, format_bytes, plural
from lockstep.verify.diagnosis import BOUND, Comparison

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
