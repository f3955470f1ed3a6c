"""The result of a replay, and its report for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.replay.origin import Origin
from lockstep.text import numbered, plural, shorten
from lockstep.trainer.gradient_record import GradientDigest, GradientRecord

_MOST_NAMES = 5
_MOST_SAMPLES = 32


@dataclass(frozen=True, kw_only=True)
class GradientComparison:
    """A recomputed gradient and its record."""

    step: int
    gradient: GradientDigest
    recorded: GradientDigest | None
    loss: str = ""
    """Recomputed, as ``float.hex``; empty where no loss was recorded."""
    recorded_loss: str = ""
    micro_batches: Sequence[int] = ()
    """Numbers of those whose own gradients differ, where they were recorded."""

    @property
    def differs(self) -> bool:
        """True where the record has another digest."""
        return self.recorded is not None and self.recorded.digest != self.gradient.digest


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """The result of a replay."""

    folder: Path
    origin: Origin
    epoch: int
    position: int
    """Step within the epoch."""
    leaves: int
    """Micro-batches of the step."""
    micro_batch: int | None
    samples: Sequence[int]
    """Indices in the data set of all samples that were computed."""
    loss: float
    """Mean over those samples."""
    norm: float
    """Of the gradient: of the mean loss for a whole step, of the sum of the losses for a micro-batch."""
    compared: GradientComparison
    earlier: Sequence[GradientComparison]
    """The recorded steps before it that were recomputed too."""
    record: GradientRecord | None
    """Of the step; None where there is none."""

    @property
    def differs(self) -> bool:
        """True where the record of this step, or of one before it, has another digest."""
        return any(each.differs for each in (*self.earlier, self.compared))


def describe(report: ReplayReport) -> str:
    """The report for the terminal, one fact a line; the last line says whether the bits equal the record."""
    origin, start, step = report.origin, report.origin.start, report.compared.step
    steps, k = step - origin.step, report.micro_batch
    before = f"{plural(steps, 'step')} before" if steps else "right before it"
    part = "" if k is None else f", micro-batch {k} of {numbered('rank', start.holders(k, report.leaves))}"
    rows = [
        ("run", f"{report.folder}, trained with {start.strategy} on {start.ranks}"),
        ("step", f"{step}{part} (step {report.position} of epoch {report.epoch + 1})"),
        ("from", f"{origin.label}, {before}"),
        ("samples", shorten(report.samples, _MOST_SAMPLES)),
        ("loss", f"{report.loss:.9g}"),
        ("norm", f"{report.norm:.9g}"),
        ("digest", report.compared.gradient.digest),
        ("record", _verdict(report)),
    ]
    return "\n".join(f"{name:9} {text}" for name, text in rows)


def _verdict(report: ReplayReport) -> str:
    earlier = next((each for each in report.earlier if each.differs), None)
    if earlier is not None:
        return f"differs already at step {earlier.step}: {_differences(earlier)}"
    if report.compared.recorded is None:
        return _why_absent(report)
    if report.compared.differs:
        return f"differs: {_differences(report.compared)}"
    return "matches: the gradient has the bits that were recorded"


def _differences(compared: GradientComparison) -> str:
    assert compared.recorded is not None
    names = compared.gradient.differing(compared.recorded)
    every = len(compared.gradient.parameters.keys() | compared.recorded.parameters.keys())
    text = f"{shorten(names, _MOST_NAMES)} ({len(names)} of {every} parameters)"
    if compared.micro_batches:
        text += f", in micro-batches {shorten(compared.micro_batches, _MOST_SAMPLES)}"
    if compared.loss == compared.recorded_loss:
        return text
    mine, theirs = (float.fromhex(each) for each in (compared.loss, compared.recorded_loss))
    return f"{text}; so does the loss, {mine:.9g} here and {theirs:.9g} there"


def _why_absent(report: ReplayReport) -> str:
    start = report.origin.start
    if start.level != "A":
        return (
            f"was not recorded: strategy {start.strategy} promises level {start.level} with these settings, "
            "so its bits may differ from those of one device"
        )
    setting = "gradients_every=1" if report.record is None else "record_micro_batches=true"
    text = f"was not recorded; train with --set training.{setting} to record it"
    if report.earlier:
        text += f" (step {report.earlier[-1].step}, the last recorded one before it, matches)"
    return text
