"""``lockstep verify --micro-batches``: the first step in one micro-batch, which is the undivided batch, and in several.

A mean over samples has the same value and gradient however the batch is cut, but for rounding. Where they differ, the
step is computed again with BatchNorm in evaluation mode, and with the whole model so: what makes the difference vanish
is its cause. A loss is judged by its values over parts of a micro-batch, as in the first step of any run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import EXIT_DONE
from lockstep.launch.supervisor import run_sequentially
from lockstep.text import aligned, shorten
from lockstep.verify.layouts import reason_of
from lockstep.verify.trace import JsonRecord, refusal

VARIANTS = AS_IT_IS, WITHOUT_BATCH_NORM, EVALUATING = "as it is", "batch norm in evaluation mode", "eval"
"""How a step is computed. Modules that drop at random are switched off in each: masks belong to a micro-batch."""


@dataclass
class Pass:
    """The result of one ``run.backward`` of the step."""

    loss: float
    gradients: str
    """File of the gradients, by parameter name."""


@dataclass
class FirstStep(JsonRecord):
    """The first step of a run on one process."""

    micro_batches: int
    samples: int = 0
    """Of the first micro-batch."""
    passes: list[Pass] = field(default_factory=list)
    tolerance: float = 0.0
    """Relative difference that rounding explains."""
    batch_norm: bool = False
    """True if the model has BatchNorm that normalises by the batch."""
    shapes: list[str] = field(default_factory=list)
    """Those that samples have in the data of the micro-batches."""
    deviations: dict[str, str] = field(default_factory=dict)
    """Why losses are not means over samples, by their names."""
    refused: str = ""
    """Why the step was not computed."""
    in_training: bool = False
    """True if it was refused while it trained, which is a finding about the program."""


@dataclass(frozen=True)
class Difference:
    """Two computations of one step, relative to the first."""

    loss: float = 0.0
    gradient: float = 0.0
    factor: float = 1.0
    """How many times as large the gradient is, where that is all; 1 otherwise."""

    @property
    def largest(self) -> float:
        """Of loss and gradient."""
        return max(self.loss, self.gradient)


def difference(one: FirstStep, other: FirstStep) -> Difference:
    """The largest difference of the passes of a step."""
    if len(one.passes) != len(other.passes):
        return Difference(math.inf, math.inf)
    found = [_difference(*pair) for pair in zip(one.passes, other.passes)]
    return max(found, key=lambda each: each.largest, default=Difference())


def _difference(one: Pass, other: Pass) -> Difference:
    import numpy as np
    from safetensors.numpy import load_file

    mine, theirs = (load_file(each.gradients) for each in (one, other))
    if mine.keys() != theirs.keys():
        return Difference(math.inf, math.inf)
    first, second = (
        np.concatenate([np.zeros(1), *(held[name].ravel() for name in sorted(held))]) for held in (mine, theirs)
    )
    size, product = float(first @ first), float(first @ second)
    factor = product / size if size else 1.0
    gap, scaled = float(np.linalg.norm(second - first)), float(np.linalg.norm(second - factor * first))
    is_factor = scaled < 0.01 * gap
    relative = gap / math.sqrt(size) if size else (math.inf if gap else 0.0)
    loss = abs(other.loss - one.loss) / max(abs(one.loss), 1e-12)
    return Difference(loss, relative, factor if is_factor else 1.0)


@dataclass(frozen=True)
class StepComparison:
    """A number of micro-batches compared with the reference."""

    step: FirstStep
    difference: Difference = Difference()
    cause: str = ""
    """A name for programs: loss, batch_norm, random, shapes, unknown, refused; empty where they agree."""
    text: str = ""
    """The cause and the remedy."""

    @property
    def is_mistake(self) -> bool:
        """True for a cause that changes what is trained; other random numbers do not."""
        return self.cause not in ("", "random")


def compared(steps: Sequence[FirstStep], again: Callable[[int, str], FirstStep]) -> list[StepComparison]:
    """Compares with the first step that was computed, which has the fewest micro-batches.

    Args:
        steps: by ascending number of micro-batches.
        again: computes a step once more, given the number of its micro-batches and one of ``VARIANTS``.
    """
    reference = next((each for each in steps if not each.refused), None)
    return [_found(reference, each, again) for each in steps]


def _found(reference: FirstStep | None, step: FirstStep, again: Callable[[int, str], FirstStep]) -> StepComparison:
    if step.refused:
        return StepComparison(step, cause="refused", text=step.refused)
    if reference is None or reference is step:
        return StepComparison(step)
    gap, tolerance = difference(reference, step), reference.tolerance

    def without(variant: str) -> float:
        first, second = again(reference.micro_batches, variant), again(step.micro_batches, variant)
        return math.inf if first.refused or second.refused else difference(first, second).largest

    if gap.largest <= tolerance:
        return StepComparison(step, gap)
    if reference.batch_norm and without(WITHOUT_BATCH_NORM) <= tolerance:
        return StepComparison(step, gap, "batch_norm", _BATCH_NORM)
    if without(EVALUATING) <= tolerance:  # so that it is no cause that whether a loss is a mean is not known
        both = ("batch_norm", f"{_RANDOM} {_BATCH_NORM}")
        return StepComparison(step, gap, *both if reference.batch_norm else ("random", _RANDOM))
    deviations = reference.deviations or step.deviations
    causes = [f"The loss {name} {why}" for name, why in deviations.items()]
    causes += [_SHAPES] if reference.shapes != step.shapes else []
    cause = "loss" if deviations else "shapes" if causes else "unknown"
    return StepComparison(step, gap, cause, " ".join(causes) or _UNKNOWN)


_BATCH_NORM = (
    "BatchNorm normalises each micro-batch by its own mean and variance; in evaluation mode there is no difference. "
    "DistributedDataParallel does so with the share of each device. For those of the whole batch: "
    "lockstep.init(sync_batch_norm=True), or training.sync_batch_norm in a job; or GroupNorm or LayerNorm in its place."
)
_RANDOM = (
    "The model draws random numbers in training mode, beside Dropout modules, which were switched off; in evaluation "
    "mode there is no difference. They are keyed by micro-batch, so they depend on the number of micro-batches: this "
    "is not a mistake."
)
_SHAPES = (
    "Samples have other shapes in smaller micro-batches, as where a collate function pads them to the longest one. If "
    "the model or the loss depends on it, mask what is padded and return (sum, how many were counted), or pad all "
    "samples to one length."
)
_UNKNOWN = (
    "The cause was not found. Possible: a loss or a model that compares the samples of a batch, a mean over something "
    "else than samples, random numbers drawn in evaluation mode too, or state that the model keeps. See docs/means.md."
)


def table(findings: Sequence[StepComparison]) -> str:
    """One row for each number of micro-batches, then a line for each cause."""
    first = next((each for each in findings if not each.step.refused), None)
    rows = [("micro-batches", "samples", "loss", "loss differs", "gradient differs", "result")]
    rows += [_row(each, is_reference=each is first) for each in findings]
    causes: dict[str, list[int]] = {}
    for each in findings:
        if each.cause:
            factor = each.difference.factor
            scaled = "" if math.isclose(factor, 1.0) else f"The gradient is {factor:.4g} times as large. "
            causes.setdefault(scaled + each.text, []).append(each.step.micro_batches)
    lines = [f"{shorten(counts)} micro-batches: {text}" for text, counts in causes.items()]
    lines = lines or ["Loss and gradient do not depend on the micro-batches."]
    return "\n".join([*aligned(rows), "", *lines])


def _row(finding: StepComparison, *, is_reference: bool) -> tuple[str, str, str, str, str, str]:
    step, gap = finding.step, finding.difference
    number = str(step.micro_batches)
    if step.refused:
        return number, "", "", "", "", "refused" if step.in_training else "did not run"
    loss = f"{step.passes[0].loss:.6g}"
    if is_reference:
        return number, str(step.samples), loss, "", "", "reference" if step.micro_batches > 1 else "undivided"
    result = "differs" if finding.cause else "equal but for rounding"
    return number, str(step.samples), loss, f"{gap.loss:.1e}", f"{gap.gradient:.1e}", result


def as_json(findings: Sequence[StepComparison]) -> str:
    """All results as JSON."""
    found = [
        {
            "micro_batches": each.step.micro_batches,
            "samples": each.step.samples,
            "losses": [one.loss for one in each.step.passes],
            "loss_difference": each.difference.loss,
            "gradient_difference": each.difference.gradient,
            "cause": each.cause,
            "text": each.text,
        }
        for each in findings
    ]
    return json.dumps(found, indent=1) + "\n"


_ENTRY = "lockstep.verify.rank:watch_micro_batches"


def first_step(payload: dict[str, Any], threads: int | None, folder: Path) -> FirstStep:
    """Computes a step in one process, which is given ``payload`` and the folder: see ``watch_micro_batches``."""
    folder.mkdir()
    outcome = run_sequentially(_ENTRY, payload, ranks=1, threads=threads, folder=folder)
    if (folder / "step.json").exists():
        return FirstStep.read(folder / "step.json")
    sentence, reason = refusal(folder), reason_of(outcome.lines)
    if outcome.code == EXIT_DONE:
        reason = "it made no step with lockstep.init and run.backward"
    return FirstStep(payload["micro_batches"], refused=sentence or reason, in_training=bool(sentence))
