"""Finds the first difference of two runs, its cause, and the level that a layout has reached.

``diagnose`` is a pure function of their traces; ``compare`` judges by it, and by how far the parameters are apart.

Every step is checked in the order in which it computes, so the first difference has caused the rest:

    settings -> samples -> inputs -> losses of micro-batches -> loss -> gradients -> buffers -> update
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from lockstep.text import numbered, plural
from lockstep.verify.trace import StepTrace, Trace


class Cause(Enum):
    """The causes of a difference, with their description."""

    START = "the parameters began differently: they were not made alike, or not broadcast"
    RESUMED = "it is not what the run without a stop had there: rounded before the stop, or not kept by the checkpoint"
    STALE = "values changed between two steps: something was restored, loaded or set outside of the update"
    RECIPE = "an argument of lockstep.init depends on the number of processes, so each trains another model"
    THREADS = "another number of threads, which decides how a CPU adds"
    SOFTWARE = "other software or another device"
    OPTIMIZER = "another optimizer, implementation or hyperparameter"
    LEARNING_RATE = "the learning rate is multiplied by the number of ranks"
    DATA_ORDER = "other samples in a step: the order of the data depends on the layout"
    AUGMENTATION = "the same samples were prepared differently: augmentation or input randomness depends on the layout"
    SAME_DRAWS = "every rank draws the same random numbers to prepare its samples"
    TARGETS = "samples have other targets"
    MODEL_RANDOMNESS = "the model drew other random numbers, in dropout for example"
    OPERATOR = "the program does not give the same bits twice, on one device either"
    ROUNDING = "sums inside of the model are added in another order"
    MODE = "modules are in another mode, train() or eval()"
    HIDDEN_STATE = "the model keeps state of its own, which depends on how often a rank calls it"
    LOSS_STATE = "the loss keeps state of its own, which depends on what a rank has computed"
    CLASS_WEIGHTS = "the loss has other class weights, as where every rank counts the classes of its own share"
    FORWARD = "the forward pass or the loss depends on the layout"
    OUTPUT = "the output of the model differs for the same input"
    LOSS = "the loss differs for the same output of the model"
    LOSS_WEIGHTING = "micro-batches are weighted differently in the loss"
    GRADIENT_SCALE = "gradients are scaled differently: divided or summed once too often"
    LEFT_OUT = "some parameters are left out of the reduction"
    REDUCED_TWICE = "some parameters are summed over the ranks twice"
    REDUCED_AGAIN = "gradients are summed over the ranks after each micro-batch, and those of earlier ones again"
    COMPRESSED = "gradients are rounded to a coarser type for the reduction"
    CARRIED = "gradients of the step before are still in them: they were not set to zero"
    OVERFLOW = "a gradient that is not finite was treated on its rank alone"
    REDUCTION_ORDER = "gradients are added in another order"
    GRADIENTS = "gradients differ although losses do not"
    NO_LOSSES = (
        "gradients differ, as by BatchNorm or dropout; recorder.batch(losses=...) tells which part differs first"
    )
    BUFFERS = "running statistics or other buffers are not synchronised"
    NOT_HELD = "the optimizer does not hold the parameter: it was made for another model, or before a copy"
    OPTIMIZER_STATE = "the optimizer's state differs: it was lost, or not given to every rank"
    DECAY = "weight decay is applied in another way: twice, or in the loss as well"
    UPDATE = "the update differs although gradients do not"
    REPLICAS = "ranks that must hold the same values do not"
    PRECISION = "another precision"
    SEEDS = "ranks began with other values because they are seeded differently"
    FROZEN = "a parameter is trained on some ranks only"
    STAGES = "layers are run in another order"
    EPOCHS = "every epoch has the same order: the sampler is not told the epoch (set_epoch)"
    REPEATED = "samples are read twice in an epoch: the sampler pads the shares of the ranks"
    DROPPED = "samples are left out that the reference reads"
    LAST_BATCH = "the last, smaller batch of an epoch is left out"
    SAME_SHARE = "every rank reads the same samples: the data is not shared out"
    OVERLAP = "ranks shuffle with different seeds: shares overlap, and samples are left out"
    SAME_MASKS = "every rank draws the same random numbers: one dropout mask for all"
    BATCH_NORM = "BatchNorm normalises with each rank's share instead of the whole batch"
    NOT_REDUCED = "gradients are not reduced over the ranks"
    ACCUMULATION = "micro-batches are accumulated without being divided by their number"
    CLIPPING = "every rank clips its own gradients before they are reduced"
    SKIPPED = "a step is skipped on some ranks only"
    NOT_MADE = "a step is left out in one of the runs only"
    LENGTH = "it ends after another number of steps"
    SCHEDULE = "the schedule is at another step: it is stepped once per process, or not at all"
    REPORTED = "the reported loss is not the mean over the global batch"


@dataclass(frozen=True)
class Diagnosis:
    """The first difference of a run from the reference, and its most likely cause."""

    cause: Cause
    step: int
    """-1: before the first step."""
    tensor: str
    """The tensor, micro-batch or setting that differs first."""
    detail: str = ""
    possible: tuple[str, ...] = ()
    """Explanations of the difference where the cause is not certain; empty where it is."""

    @property
    def text(self) -> str:
        """One line."""
        where = f"step {self.step}" if self.step >= 0 else "before the first step"
        found = f"{where}, {self.tensor}: {self.cause.value}{f' ({self.detail})' if self.detail else ''}"
        return f"{found}; possible: {'; '.join(self.possible)}" if self.possible else found


PREPARED_OTHERWISE = (
    "numbers drawn per rank or per worker, not per sample",
    "a data set that changes its samples",
    "the order of a set of strings, which differs from run to run",
)
_LAST_BITS = 1e-5
"""Relative difference of a loss that rounding explains within one forward pass."""
_ROUNDING = 1e-4
"""Relative difference of norms that rounding explains over one step."""
_UNITS = 4
"""Units in the last place that both may be off where the type is a coarse one."""


def diagnose(reference: Trace, other: Trace, *, repeats: bool | None = None) -> Diagnosis | None:
    """The first difference and its cause; None where all bits are equal.

    Args:
        reference: the run on one device.
        other: the run to compare.
        repeats: whether a second run of the reference gave the same bits; None if there was none.
    """
    found = _context(reference, other)
    if found is not None and found.cause is Cause.RECIPE:
        return found
    name = _first_difference(reference.start, other.start)
    if found is None and name:
        if other.first:
            return Diagnosis(Cause.RESUMED, other.first, repr(name))
        return Diagnosis(Cause.START, -1, repr(name), possible=("a model made above torch.manual_seed",))
    for mine, theirs in zip(reference.steps, other.steps):
        if mine.step != theirs.step:
            skipping, one = ("it", theirs) if theirs.step > mine.step else ("the reference", mine)
            return Diagnosis(
                Cause.NOT_MADE,
                min(mine.step, theirs.step),
                "the loop",
                f"{skipping} goes on with step {one.step}",
            )
        step = _step(mine, theirs, reference, other, repeats)
        if step is not None:
            if found is not None and step.cause in _EXPLAINED_BY_CONTEXT:
                return replace(step, cause=found.cause, detail=found.detail)
            return step
    return other_length(reference.first + len(reference.steps), other.first + len(other.steps))


def other_length(reference: int, other: int) -> Diagnosis | None:
    """Finds that a run has another number of steps than the reference."""
    if other == reference:
        return None
    detail = f"it has {plural(other, 'step')}, and the reference {reference}"
    return Diagnosis(Cause.LENGTH, min(other, reference), "the loop", detail)


_EXPLAINED_BY_CONTEXT = (
    *(Cause.ROUNDING, Cause.REDUCTION_ORDER, Cause.OPERATOR),
    *(Cause.FORWARD, Cause.OUTPUT, Cause.LOSS, Cause.GRADIENTS, Cause.UPDATE),
)


_CONDITIONS = {
    "threads": Cause.THREADS,
    "optimizers": Cause.OPTIMIZER,
    **dict.fromkeys(("device", "cpu", "torch", "photos"), Cause.SOFTWARE),
}
"""The cause that another value of each condition is; those that are not here belong to the recipe."""


def _context(reference: Trace, other: Trace) -> Diagnosis | None:
    """The first difference of the conditions, of the recipe before others."""
    for key in sorted(reference.context, key=lambda key: (key in _CONDITIONS, key)):
        mine, theirs = reference.context[key], other.context.get(key, "")
        if mine != theirs:
            cause = _CONDITIONS.get(key, Cause.RECIPE)
            return Diagnosis(cause, -1, key, f"{key}: {mine} and {theirs}")
    return None


def _step(mine: StepTrace, theirs: StepTrace, reference: Trace, other: Trace, repeats: bool | None) -> Diagnosis | None:
    step = mine.step
    if setting := _first_difference(mine.settings, theirs.settings):
        detail = f"{mine.settings.get(setting)} and {theirs.settings.get(setting)}"
        is_scaled = not other.first and _is_times_ranks(mine, theirs, setting, other.ranks)
        cause = Cause.LEARNING_RATE if is_scaled else Cause.OPTIMIZER
        return Diagnosis(cause, step, setting, detail)
    if k := _first_difference(mine.samples, theirs.samples):
        own = [*theirs.samples.values()]
        again = [number for number, each in enumerate(other.steps) if [*each.samples.values()] == own]
        detail = f"the samples of steps {again[0]} and {again[1]} are the same" if len(again) > 1 else ""
        return Diagnosis(Cause.DATA_ORDER, step, f"micro-batch {k}", detail)
    if k := _first_difference(mine.inputs, theirs.inputs):
        return Diagnosis(Cause.AUGMENTATION, step, f"micro-batch {k}", possible=PREPARED_OTHERWISE)
    number = next((n for n, (a, b) in enumerate(zip(mine.losses, theirs.losses)) if a != b), None)
    if number is not None:
        return _forward(mine, theirs, number, (reference, other), repeats)
    if mine.loss != theirs.loss or len(mine.losses) != len(theirs.losses):
        ratio = _quotient(float.fromhex(theirs.loss), float.fromhex(mine.loss))
        return Diagnosis(Cause.LOSS_WEIGHTING, step, "loss", f"{ratio:.6g} times as large")
    rounding = max(_ROUNDING, _UNITS * reference.unit)
    found = _gradients(mine, theirs, rounding, other.ranks)
    if found and other.first == step > 0 and found.cause is not Cause.REDUCTION_ORDER:
        return replace(found, cause=Cause.GRADIENTS, possible=_OF_RESUMED_BACKWARD)
    return found or _after(mine, theirs)


def _forward(
    mine: StepTrace, theirs: StepTrace, number: int, traces: tuple[Trace, Trace], repeats: bool | None
) -> Diagnosis:
    (reference, other), tensor = traces, f"loss of micro-batch {number}"
    ratio = _quotient(float.fromhex(theirs.losses[number]), float.fromhex(mine.losses[number]))
    rounding = None
    if abs(ratio - 1) < max(_LAST_BITS, _UNITS * reference.unit):
        rounding = Diagnosis(Cause.ROUNDING, mine.step, tensor, f"{ratio - 1:+.1e}")
    if repeats is False:
        possible = ("an operator without a fixed order",) if rounding else _OF_EACH_RUN
        return Diagnosis(Cause.OPERATOR, mine.step, tensor, possible=possible)
    if rounding and other.level != "A":
        return rounding  # which is expected, so there is nothing else to explain
    detail = f"{ratio:.9g} times as large"
    if odd := [name for name, ranks in theirs.evaluating.items() if name not in mine.evaluating]:
        ranks = numbered("rank", theirs.evaluating[odd[0]])
        return Diagnosis(Cause.MODE, mine.step, tensor, f"{odd[0]!r} is in eval mode on {ranks}; {detail}")
    output = mine.outputs.get(str(number)), theirs.outputs.get(str(number))
    if None not in output and output[0] == output[1]:
        return Diagnosis(Cause.LOSS, mine.step, tensor, detail, _OF_LOSS)
    state, is_certain = _state_kept(mine, theirs)
    if state and is_certain:
        return Diagnosis(Cause.HIDDEN_STATE, mine.step, tensor, f"{state}; {detail}")
    if rounding:
        return rounding
    detail = f"{state}; {detail}" if state else detail
    cause = Cause.FORWARD if None in output else Cause.OUTPUT
    drawn = ("random numbers that are not keyed by the micro-batch",) if reference.draws else ()
    return Diagnosis(cause, mine.step, tensor, detail, (*drawn, *_OF_OUTPUT))


_OF_OUTPUT = (
    "state that the model keeps outside of its parameters and buffers",
    "statistics over several micro-batches",
    "a generator of its own",
)
_OF_EACH_RUN = (PREPARED_OTHERWISE[-1], "random numbers without a seed", "the time")
_OF_RESUMED_BACKWARD = ("the stop has lost what only the backward pass reads, such as a coefficient",)
_OF_LOSS = ("weights or a divisor computed from each rank's share", "a loss that keeps state")


def _state_kept(mine: StepTrace, theirs: StepTrace) -> tuple[str, bool]:
    """The state of modules that is not the reference's on a rank that has changed it, and whether it is not a tensor.

    Tensors come last: they may be no more than copies of what was computed. Empty where nothing differs.
    """
    found: list[tuple[bool, str]] = []
    for name, held in theirs.kept.items():
        known = next(iter(mine.kept.get(name, {}).values()), "as at the beginning")
        for rank, value in held.items():
            if value != known:
                text = f"{name!r} is {value} on rank {rank} after the step, {known} in the reference"
                found.append(("tensor" in value, text))
    is_tensor, text = min(found, key=lambda each: each[0], default=(True, ""))
    return text, not is_tensor


def _is_times_ranks(mine: StepTrace, theirs: StepTrace, setting: str, ranks: int) -> bool:
    """True if a learning rate is as many times that of the reference as there are ranks."""
    try:
        value, known = (float(each.settings.get(setting, "")) for each in (theirs, mine))
    except ValueError:
        return False
    return setting.split()[0] == "lr" and ranks > 1 and math.isclose(value, ranks * known, rel_tol=1e-9)


def _gradients(mine: StepTrace, theirs: StepTrace, rounding: float, ranks: int) -> Diagnosis | None:
    absent = sorted(set(mine.gradients) ^ set(theirs.gradients))
    if absent:
        return Diagnosis(Cause.LEFT_OUT, mine.step, repr(absent[0]), "it has a gradient in one of them only")
    different = [name for name, (digest, _) in mine.gradients.items() if theirs.gradients[name][0] != digest]
    if not different:
        return None
    ratios = {name: _quotient(theirs.gradients[name][1], mine.gradients[name][1]) for name in mine.gradients}
    # One that is nothing but rounding beside the others, as that of a bias before BatchNorm is, tells nothing.
    least = rounding / 100 * max(norm for _, norm in mine.gradients.values())
    large = [n for n in different if max(mine.gradients[n][1], theirs.gradients[n][1]) > least]
    first, off = repr(different[0]), [n for n in large if abs(ratios[n] - 1) > rounding]
    if not off:
        return Diagnosis(Cause.REDUCTION_ORDER, mine.step, first, "norms agree but for rounding")
    middle = statistics.median(ratios.values())
    alike = [n for n in ratios if abs(ratios[n] / middle - 1) <= rounding] if middle else []
    if len(alike) >= 0.9 * len(ratios) and abs(middle - 1) > rounding:
        return Diagnosis(Cause.GRADIENT_SCALE, mine.step, first, f"all are {middle:.4g} times as large")
    if len(off) <= len(ratios) / 2:
        if all(abs(ratios[n] / ranks - 1) <= rounding for n in off) and ranks > 1:
            detail = f"{len(off)} of {len(ratios)} are {ranks} times as large, in a world of {ranks}"
            return Diagnosis(Cause.REDUCED_TWICE, mine.step, repr(off[0]), detail)
        detail = f"{len(off)} of {len(ratios)} differ by more than rounding"
        return Diagnosis(Cause.LEFT_OUT, mine.step, repr(off[0]), detail)
    return Diagnosis(Cause.GRADIENTS, mine.step, first)


def _after(mine: StepTrace, theirs: StepTrace) -> Diagnosis | None:
    for first, second, cause, prefix in (
        (mine.buffers, theirs.buffers, Cause.BUFFERS, ""),
        (mine.optimizer, theirs.optimizer, Cause.UPDATE, "optimizer state "),
        (mine.parameters, theirs.parameters, Cause.UPDATE, ""),
    ):
        if name := _first_difference(first, second):
            return Diagnosis(cause, mine.step, f"{prefix}{name!r}")
    return Diagnosis(Cause.REPLICAS, mine.step, repr(theirs.apart[0])) if theirs.apart else None


def _first_difference(mine: dict[str, str], theirs: dict[str, str]) -> str:
    return next((name for name in [*mine, *theirs] if mine.get(name) != theirs.get(name)), "")


def _quotient(a: float, b: float) -> float:
    if b:
        return a / b
    return 1.0 if not a else math.inf


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
