"""The result of ``lockstep verify`` for the terminal, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lockstep.verify.comparison import Comparison

_HEAD = ("layout", "level", "result", "ms/step", "MiB/rank", "sent/step")


def table(comparisons: Sequence[Comparison], steps: int) -> str:
    """One row for each layout, then a line for each that differs or did not run.

    Args:
        comparisons: the reference first.
        steps: how many each has run.
    """
    rows = [_HEAD, *(_row(each) for each in comparisons)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]
    reference, equal = comparisons[0], [each for each in comparisons if each.reached == "A"]
    ran = [each for each in comparisons if not each.trace.refused]
    lines.append("")
    lines += [
        f"{each.trace.label} differs since {each.diagnosis.text}." for each in comparisons if each.diagnosis
    ]
    lines += [
        f"{each.trace.label} did not run: {each.trace.refused}" for each in comparisons if each.trace.refused
    ]
    last = reference.trace.steps[-1]
    lines.append(
        f"{len(equal)} of {len(ran)} layouts have the bits of one device after each of {steps} steps; the loss of the "
        f"last is {float.fromhex(last.loss):.6g}."
    )
    return "\n".join(lines)


def as_json(comparisons: Sequence[Comparison]) -> str:
    """All that was found."""
    found = [
        {
            "layout": each.trace.label,
            "strategy": each.trace.strategy,
            "ranks": each.trace.ranks,
            "promised": each.trace.level,
            "reached": each.reached,
            "difference": each.difference,
            "refused": each.trace.refused,
            "cause": each.diagnosis.cause.name.lower() if each.diagnosis else "",
            "step": each.diagnosis.step if each.diagnosis else None,
            "tensor": each.diagnosis.tensor if each.diagnosis else "",
            "detail": each.diagnosis.detail if each.diagnosis else "",
            "milliseconds": each.trace.milliseconds,
            "memory": each.trace.memory,
            "sent": each.trace.sent,
        }
        for each in comparisons
    ]
    return json.dumps(found, indent=1) + "\n"


def _row(each: Comparison) -> tuple[str, ...]:
    trace = each.trace
    if trace.refused:
        return trace.label, "", "did not run", "", "", ""
    result = "equal bits" if each.reached == "A" else f"differs by {each.difference:.1e}"
    memory = f"{max(trace.memory) / 2**20:.0f}"
    sent = f"{trace.sent / 1e6:.2f} MB" if trace.sent else "-"
    return trace.label, each.reached, result, f"{trace.milliseconds:.1f}", memory, sent
