"""What a replay found, and how it is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.replay.origin import Origin
from lockstep.trainer.gradients import GradientDigest, GradientRecord

_MOST_NAMES = 5
_MOST_SAMPLES = 32


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A recomputed gradient beside its record."""

    step: int
    gradient: GradientDigest
    recorded: GradientDigest | None
    loss: str = ""
    """Recomputed, as ``float.hex``; empty where no loss was recorded."""
    recorded_loss: str = ""
    micro_batches: Sequence[int] = ()
    """Those whose own gradients differ, where they were recorded."""

    @property
    def differs(self) -> bool:
        """Whether a record says otherwise."""
        return self.recorded is not None and self.recorded.digest != self.gradient.digest


@dataclass(frozen=True, kw_only=True)
class Report:
    """All of a replay."""

    folder: Path
    origin: Origin
    epoch: int
    position: int
    """Step within the epoch."""
    leaves: int
    """Micro-batches of the step."""
    micro_batch: int | None
    samples: Sequence[int]
    """Numbers in the data set of all samples that were computed."""
    loss: float
    """Mean over those samples."""
    norm: float
    """Of the gradient: of the mean loss for a whole step, of the sum of the losses for a micro-batch."""
    compared: Compared
    earlier: Sequence[Compared]
    """The recorded steps on the way."""
    record: GradientRecord | None
    """Of the step; None where there is none."""

    @property
    def differs(self) -> bool:
        """Whether a record says otherwise, of this step or of one on the way."""
        return any(each.differs for each in (*self.earlier, self.compared))


def describe(report: Report) -> str:
    """The report for people, a fact a line; the last says whether the bits are those of the record."""
    origin, start, step = report.origin, report.origin.start, report.compared.step
    part, k = "", report.micro_batch
    if k is not None:
        ranks = start.holders(k, report.leaves)
        part = f", micro-batch {k} of rank{'s' * (len(ranks) > 1)} {_shorten(ranks, _MOST_SAMPLES)}"
    rows = [
        ("run", f"{report.folder}, trained with {start.strategy} on {start.ranks}"),
        ("step", f"{step}{part} (step {report.position} of epoch {report.epoch + 1})"),
        ("from", f"{origin.label}, {_count(step - origin.step)}"),
        ("samples", _shorten(report.samples, _MOST_SAMPLES)),
        ("loss", f"{report.loss:.9g}"),
        ("norm", f"{report.norm:.9g}"),
        ("digest", report.compared.gradient.digest),
        ("record", _verdict(report)),
    ]
    return "\n".join(f"{name:9} {text}" for name, text in rows)


def _verdict(report: Report) -> str:
    compared, on_the_way = report.compared, next((each for each in report.earlier if each.differs), None)
    if on_the_way is not None:
        return f"differs already at step {on_the_way.step}: {_differences(on_the_way)}"
    if compared.recorded is None:
        return _why_absent(report)
    if compared.differs:
        return f"differs: {_differences(compared)}"
    return "matches: the gradient has the bits that were recorded"


def _differences(compared: Compared) -> str:
    assert compared.recorded is not None
    names = compared.gradient.differing(compared.recorded)
    every = len(compared.gradient.parameters.keys() | compared.recorded.parameters.keys())
    text = f"{_shorten(names, _MOST_NAMES)} ({len(names)} of {every} parameters)"
    if compared.micro_batches:
        text += f", in micro-batches {_shorten(compared.micro_batches, _MOST_SAMPLES)}"
    if compared.loss == compared.recorded_loss:
        return text
    mine, theirs = (float.fromhex(each) for each in (compared.loss, compared.recorded_loss))
    return f"{text}; so does the loss, {mine:.9g} here and {theirs:.9g} there"


def _why_absent(report: Report) -> str:
    start = report.origin.start
    if start.level != "A":
        return (
            f"was not recorded: strategy {start.strategy} promises level {start.level} with these settings, "
            "whose bits need not be those of one device"
        )
    setting = "gradients_every=1" if report.record is None else "record_micro_batches=true"
    text = f"was not recorded; train with --set training.{setting} to record it"
    if report.earlier:
        text += f" (step {report.earlier[-1].step}, the last on the way that was, matches)"
    return text


def _shorten(items: Sequence[object], most: int) -> str:
    shown = ", ".join(map(str, items[:most]))
    return shown if len(items) <= most else f"{shown}, ... {len(items) - most} more"


def _count(steps: int) -> str:
    return f"{steps} step{'' if steps == 1 else 's'} before" if steps else "right before it"
