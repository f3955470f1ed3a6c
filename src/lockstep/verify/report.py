"""Compares the run of a layout with the reference, and writes the result of ``lockstep verify`` as text and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.text import format_bytes
from lockstep.verify.diagnosis import Diagnosis, diagnose
from lockstep.verify.trace import Trace


@dataclass(frozen=True)
class Comparison:
    """A layout compared with the reference."""

    trace: Trace
    reached: str
    """A: equal bits after every step; B: equal within rounding; C: no more was promised; -: further apart; empty: it
    did not run."""
    difference: float = 0.0
    """Largest relative difference of a parameter at the end; 0 for equal bits."""
    diagnosis: Diagnosis | None = None

    @property
    def is_broken(self) -> bool:
        """True if the layout promises level A and did not reach it."""
        return not self.trace.refused and self.trace.level == "A" and self.reached != "A"


_BOUND = 1e-3
"""Largest relative difference of parameters after a short run at level B."""


def compare(reference: Trace, other: Trace, difference: float, *, repeats: bool | None = None) -> Comparison:
    """Compares the run of a layout; ``difference`` is the largest relative one of a parameter at the end.

    ``repeats`` is that of ``diagnose``.
    """
    if other.refused:
        return Comparison(other, "")
    found = diagnose(reference, other, repeats=repeats)
    if found is None:
        return Comparison(other, "A")
    if other.level == "C":
        return Comparison(other, "C", difference, None if other.independent else found)
    return Comparison(other, "B" if difference <= _BOUND else "-", difference, found)


_HEAD = ("layout", "level", "result", "ms/step", "MiB/rank", "sent/step")


def table(comparisons: Sequence[Comparison], steps: int) -> str:
    """One row for each layout, the reference first, then a line for each that differs or did not run."""
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
    """All results as JSON."""
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
    sent = format_bytes(trace.sent) if trace.sent else "-"
    return trace.label, each.reached, result, f"{trace.milliseconds:.1f}", memory, sent
