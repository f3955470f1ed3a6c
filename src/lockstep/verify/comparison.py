"""Compares the run of one layout with the reference: equal bits, or how far apart and since when."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.verify.diagnosis import Diagnosis, diagnose
from lockstep.verify.trace import Trace


@dataclass(frozen=True)
class Comparison:
    """One layout against the reference."""

    trace: Trace
    reached: str
    """A: equal bits after every step; B: within rounding so far; C: no more than that was promised; -: further apart;
    empty: it did not run."""
    difference: float = 0.0
    """Largest relative difference of a parameter at the end; 0 for equal bits."""
    diagnosis: Diagnosis | None = None

    @property
    def is_broken(self) -> bool:
        """Whether the layout promises level A and did not keep it."""
        return not self.trace.refused and self.trace.level == "A" and self.reached != "A"


_BOUND = 1e-3
"""Relative difference of parameters up to which a short run at level B is called close."""


def compare(reference: Trace, other: Trace, difference: float, *, repeats: bool | None = None) -> Comparison:
    """Judges a layout.

    Args:
        reference: the run on one device.
        other: the layout's run.
        difference: largest relative difference of a parameter at the end.
        repeats: see ``diagnose``.
    """
    if other.refused:
        return Comparison(other, "")
    found = diagnose(reference, other, repeats=repeats)
    if found is None:
        return Comparison(other, "A")
    if other.level == "C":
        return Comparison(other, "C", difference, None if other.independent else found)
    return Comparison(other, "B" if difference <= _BOUND else "-", difference, found)
