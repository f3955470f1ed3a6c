"""The checks of a recorded run against its reference, each of which returns a diagnosis or None.

Pair             the two runs, and how far numbers may differ by rounding alone
before a step    initial values and seeds, frozen parameters, order of layers, precision, optimizers
settings         hyperparameters, and values that change between two steps
after a step     skipped updates, replicas, buffers, the update itself, the reported loss
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lockstep.text import numbered, plural
from lockstep.verify.diagnosis import Cause, Diagnosis
from lockstep.verify.plain.record import Measure, RankRecord, Recording, StepRecord

T = TypeVar("T")
Vector = NDArray[np.float64]

_TOLERANCES = {"float64": 1e-6, "float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
_LAST_BITS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Pair:
    """A run and its reference."""

    reference: Recording
    other: Recording
    given: float | None = None
    """Relative difference that rounding may explain; None to derive it from the precision."""

    @property
    def tolerance(self) -> float:
        """Relative difference that rounding may explain in a short run."""
        return _TOLERANCES.get(self.first.context["precision"], 1e-3) if self.given is None else self.given

    @property
    def noise(self) -> float:
        """Norm of a gradient, relative to that of all, below which it may be rounding alone."""
        return 4 * _LAST_BITS.get(self.first.context["precision"], 2.0**-23)

    @property
    def fit(self) -> float:
        """The relative part of a gradient that a weighted sum may leave unexplained."""
        return min(10 * self.tolerance, 0.2)

    def mine(self, step: int) -> StepRecord:
        """The step of the reference, which is one process."""
        return self.reference.ranks[0].steps[step]

    @property
    def first(self) -> RankRecord:
        """The reference's only rank."""
        return self.reference.ranks[0]

    def is_close(self, a: float, b: float, scale: float = 0.0, tolerance: float | None = None) -> bool:
        """True if two numbers differ by rounding only, relative to themselves or a larger ``scale``.

        Two numbers that are not finite count as equal.
        """
        if not (math.isfinite(a) and math.isfinite(b)):
            return math.isfinite(a) == math.isfinite(b)
        return abs(a - b) <= (tolerance or self.tolerance) * max(abs(a), abs(b), scale)

    def is_same(self, a: Measure, b: Measure, scale: float = 0.0, tolerance: float | None = None) -> bool:
        """True if two tensors differ by rounding only, in norm and direction; see ``is_close``."""
        if a.digest and a.digest == b.digest:
            return True
        if not self.is_close(a.norm, b.norm, scale, tolerance):
            return False
        first, second = vector(a), vector(b)
        if not (np.isfinite(first).all() and np.isfinite(second).all()):
            return bool(np.isfinite(first).all() == np.isfinite(second).all())
        bound = (tolerance or self.tolerance) * max(a.norm, b.norm, scale)
        return float(np.linalg.norm(first - second)) <= bound


def vector(measure: Measure) -> Vector:
    """The sketch of a tensor."""
    return np.array(measure.sketch, dtype=np.float64)


def by_name(ranks: Iterable[Mapping[str, T]]) -> dict[str, dict[int, T]]:
    """For each name, the value on each rank that has it."""
    found: dict[str, dict[int, T]] = {}
    for rank, held in enumerate(ranks):
        for name, value in held.items():
            found.setdefault(name, {})[rank] = value
    return found


def frozen(pair: Pair, step: int) -> Diagnosis | None:
    """Finds a parameter that only some of its ranks train."""
    records = pair.other.at(step)
    for name, holders in by_name(record.begin for record in records).items():
        without = [rank for rank in holders if name not in records[rank].trained]
        if without and len(without) < len(holders):
            return Diagnosis(Cause.FROZEN, step, repr(name), f"not on {numbered('rank', without)}")
    return None


def values(pair: Pair) -> Diagnosis | None:
    """Finds a parameter whose initial value differs from the reference or between ranks."""
    ranks = pair.other.ranks
    for name, measures in by_name(rank.start for rank in ranks).items():
        held = {rank: measure.digest for rank, measure in measures.items()}
        known = pair.first.start.get(name)
        odd = [rank for rank, digest in held.items() if known is None or digest != known.digest]
        if not odd:
            continue
        if len(set(held.values())) == 1:
            detail = "equal on all ranks, and not the reference's" if known else ""
            return Diagnosis(Cause.START, -1, repr(name), detail)
        seeds = {rank: ranks[rank].seed for rank in held}
        detail = f"{numbered('rank', odd)} began with other values than the reference"
        both = {(seeds[rank], digest) for rank, digest in held.items()}
        if len(set(seeds.values())) == len(both) == len(set(held.values())):
            listed = ", ".join(str(seed) for seed in seeds.values())
            return Diagnosis(Cause.SEEDS, -1, repr(name), f"{detail}; the seeds are {listed}")
        return Diagnosis(Cause.START, -1, repr(name), detail)
    return None


def stages(pair: Pair) -> Diagnosis | None:
    """Finds a module that takes its input from another module than in the reference."""
    mine, theirs = _sources(pair.reference), _sources(pair.other)
    for name, before in mine.items():
        found = theirs.get(name, set())
        if before and found and not before & found:
            detail = f"its input comes from {_names(found)}, and from {_names(before)} in the reference"
            return Diagnosis(Cause.STAGES, 0, repr(name), detail)
    return None


def _sources(run: Recording) -> dict[str, set[str]]:
    """For each module, the modules whose output was the input of some call of it, bit for bit."""
    calls = [call for record in run.at(0) for call in record.calls]
    givers: dict[str, set[str]] = {}
    for name, _, output in calls:
        givers.setdefault(output, set()).add(name)
    found: dict[str, set[str]] = {}
    for name, given, _ in calls:
        found.setdefault(name, set()).update(givers.get(given, set()) - {name} if given else set())
    return found


def _names(modules: set[str]) -> str:
    return " or ".join(repr(name) for name in sorted(modules))


_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Settings that choose how a step is computed and can only move the last bits."""


def hyperparameters(pair: Pair, step: int) -> Diagnosis | None:
    """Finds a hyperparameter that differs from the reference or between ranks."""
    records, mine, ranks = pair.other.at(step), pair.mine(step).settings, len(pair.other.ranks)
    for name in mine:
        found = [record.settings.get(name, "") for record in records]
        if name.split()[0] in _IMPLEMENTATION or all(value == mine[name] for value in found):
            continue
        if len(set(found)) > 1:
            each = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(found))
            return Diagnosis(Cause.OPTIMIZER, step, name, each)
        detail = f"{found[0]}, and {mine[name]} in the reference"
        if name.split()[0] == "lr" and all(_times(pair, each, name) == ranks for each in range(step + 1)):
            both = [sum(len(batch.samples) for _, batch in run.batches(step)) for run in (pair.other, pair.reference)]
            detail += f"; {both[0]} samples in this step, and {both[1]} in the reference's" if all(both) else ""
            return Diagnosis(Cause.LEARNING_RATE, step, name, detail)
        at = _step_with(pair, name, found[0])
        if at is not None and at != step:
            detail = f"{found[0]}, as in step {at} of the reference, which has {mine[name]}"
            return Diagnosis(Cause.SCHEDULE, step, name, detail)
        return Diagnosis(Cause.OPTIMIZER, step, name, detail)
    return None


def context(pair: Pair) -> Diagnosis | None:
    """Finds a forward pass in another precision, or an optimizer of another class."""
    for key, cause in (("precision", Cause.PRECISION), ("optimizers", Cause.OPTIMIZER)):
        mine = pair.first.context[key]
        for rank in pair.other.ranks:
            theirs = rank.context[key]
            if _first_words(theirs) != _first_words(mine):
                detail = f"{theirs} on rank {rank.rank}, {mine} in the reference"
                return Diagnosis(cause, -1, key, detail)
    return None


def _first_words(listed: str) -> list[str]:
    return [each.split()[0] for each in listed.split(", ")]


def stale(pair: Pair, step: int) -> Diagnosis | None:
    """Finds a parameter that changed since the step before.

    Where it does in the reference too, only those that returned to an earlier step count: a loop may set its values.
    """
    if not step:
        return None
    last, now = pair.mine(step - 1), pair.mine(step)
    for rank, record in enumerate(pair.other.at(step)):
        before = pair.other.ranks[rank].steps[step - 1].values
        changed = [n for n, digest in record.begin.items() if n in before and before[n].digest != digest]
        for name in changed:
            usual = name in now.begin and now.begin[name] == last.values[name].digest
            held = [each for each in pair.other.ranks[rank].steps if name in each.values]
            older = next((e.step for e in held if e.values[name].digest == record.begin[name]), None)
            if usual or (older is not None and len(changed) < len(record.begin)):
                same = f"on rank {rank} it is as after step {older}"
                detail = same if older is not None else f"rank {rank}"
                return Diagnosis(Cause.STALE, step, repr(name), detail)
    return None


def _step_with(pair: Pair, name: str, value: str) -> int | None:
    """The first step of the reference that has a number in a setting, to nine digits."""
    held = ((record.step, _number(record.settings.get(name, ""))) for record in pair.first.steps)
    return next((step for step, found in held if math.isclose(found, _number(value), rel_tol=1e-9)), None)


def _times(pair: Pair, step: int, name: str) -> float:
    """How many times a number in a setting is as large as in the reference, to nine digits."""
    held = [record.steps[step].settings.get(name, "") for record in (pair.other.ranks[0], pair.first)]
    value, known = map(_number, held)
    return round(value / known, 9) if known else math.nan


def _number(text: str) -> float:
    """NaN, which is close to nothing, for anything else."""
    try:
        return float(text)
    except ValueError:
        return math.nan


_OF_UPDATE = 10
"""Tolerances that an update may be off: optimizers that divide by gradients enlarge their rounding."""


def skipped(pair: Pair, step: int) -> Diagnosis | None:
    """Finds an update that some ranks, or one of the runs, did not make."""
    mine, theirs = pair.mine(step).updates, [record.updates for record in pair.other.at(step)]
    without = [rank for rank, count in enumerate(theirs) if count < max(theirs)]
    if without:
        return Diagnosis(Cause.SKIPPED, step, "optimizer", f"not taken on {numbered('rank', without)}")
    if theirs[0] != mine:
        detail = f"{theirs[0]} updates, and {mine} in the reference"
        over = overflowed(pair, step)
        if theirs[0] > mine and over:
            return Diagnosis(Cause.OVERFLOW, step, "optimizer", f"{detail}; not finite on {numbered('rank', over)}")
        return Diagnosis(Cause.UPDATE, step, "optimizer", detail)
    return None


def overflowed(pair: Pair, step: int) -> list[int]:
    """The ranks with a gradient of their own that is not finite, where the optimizer was given finite ones."""
    used = [each.norm for record in pair.other.at(step) for each in record.used.values()]
    if not all(map(math.isfinite, used)):
        return []
    batches = pair.other.batches(step)
    return sorted({rank for rank, b in batches if not all(math.isfinite(g.norm) for g in b.gradients.values())})


def replicas(pair: Pair, step: int) -> Diagnosis | None:
    """Finds a parameter whose bits differ between ranks."""
    for name, held in by_name(record.values for record in pair.other.at(step)).items():
        if len({measure.digest for measure in held.values()}) > 1:
            first, records = next(iter(held)), pair.other.at(step)
            apart = [rank for rank, each in held.items() if each.digest != held[first].digest]
            gap = max(float(np.linalg.norm(vector(held[r]) - vector(held[first]))) for r in apart)
            much = f"by {gap / max(held[first].norm, 1e-300):.2g} of its norm"
            detail = f"{numbered('rank', apart)} from rank {first}, {much}"
            found = Diagnosis(Cause.REPLICAS, step, repr(name), detail)
            return _of_optimizer(pair, step, name, [records[rank] for rank in held]) or found
    return None


def _of_optimizer(pair: Pair, step: int, name: str, records: list[StepRecord]) -> Diagnosis | None:
    """Explains another update of a parameter by what the optimizers hold of it."""
    mine = pair.mine(step)
    without = [record for record in records if name in record.unheld]
    if without and name not in mine.unheld:
        return Diagnosis(Cause.NOT_HELD, step, repr(name), f"{len(without[0].unheld)} parameters are not in it")
    for key in sorted({key for each in (mine, *records) for key in each.state if key.endswith(f" of {name}")}):
        held = [record.state.get(key) for record in records]
        known = mine.state.get(key)
        tolerance = _OF_UPDATE * pair.tolerance
        odd = [
            rank
            for rank, each in enumerate(held)
            if (each is None) != (known is None)
            or (each and known and not pair.is_same(each, known, tolerance=tolerance))
        ]
        if odd:
            norms = ", ".join("absent" if each is None else f"norm {each.norm:.3g}" for each in held)
            wanted = "absent" if known is None else f"norm {known.norm:.3g}"
            return Diagnosis(Cause.OPTIMIZER_STATE, step, key, f"{norms} on the ranks; {wanted} in the reference")
    return None


MODE_MATTERS = (
    *(Cause.OUTPUT, Cause.FORWARD, Cause.LOSS, Cause.GRADIENTS, Cause.BATCH_NORM, Cause.BUFFERS),
    *(Cause.MODEL_RANDOMNESS, Cause.SAME_MASKS, Cause.HIDDEN_STATE),
)
"""Causes that another mode of a module may have led to."""


def modes(pair: Pair, step: int) -> Diagnosis | None:
    """Finds modules in another mode than in the reference; some have no effect, so it only explains a difference."""
    mine, odd = set(pair.mine(step).evaluating), dict[int, set[str]]()
    for number, (rank, record) in enumerate(zip(pair.other.ranks, pair.other.at(step))):
        if record.batches and (apart := set(record.evaluating) ^ mine & set(rank.modules)):
            odd[number] = apart
    if not odd:
        return None
    names = sorted(set[str]().union(*odd.values()))
    first = next(iter(odd))
    mode = "eval" if names[0] in pair.other.at(step)[first].evaluating else "train"
    every = len(names) == len(pair.other.ranks[first].modules)
    detail = f"{mode} mode on {numbered('rank', list(odd))}, unlike the reference; {plural(len(names), 'module')}"
    return Diagnosis(Cause.MODE, step, "the model" if every else repr(names[0]), detail)


def buffers(pair: Pair, step: int) -> Diagnosis | None:
    """Finds a buffer that begins a step with a value that differs between ranks or from the reference."""
    mine = pair.mine(step).buffers
    for name, held in by_name(record.buffers for record in pair.other.at(step)).items():
        if len({each.digest for each in held.values()}) > 1:
            return Diagnosis(Cause.BUFFERS, step - 1, repr(name), _apart(pair, step, name, held))
        same = name not in mine or pair.is_same(mine[name], next(iter(held.values())))
        if not same and not _drifts(pair, step):
            detail = "equal on all ranks, and not the reference's"
            return Diagnosis(Cause.BUFFERS, step - 1, repr(name), detail)
    return None


def _apart(pair: Pair, step: int, name: str, held: Mapping[int, Measure]) -> str:
    text = "ranks hold different values"
    if not step:
        return text
    before = [record.buffers.get(name) for record in pair.other.at(step - 1)]
    moved = [rank for rank, now in held.items() if (old := before[rank]) and old.digest != now.digest]
    return f"{text}: only {numbered('rank', moved)} updated it" if 0 < len(moved) < len(held) else text


def _drifts(pair: Pair, step: int) -> bool:
    """True if parameters have drifted by rounding alone.

    The gradient of a bias before a BatchNorm is rounding alone, and Adam turns it into full steps. They move the
    running mean and no output.
    """
    if not step:
        return False
    mine, held = pair.mine(step - 1).values, [record.values for record in pair.other.at(step - 1)]
    values = [item for each in held for item in each.items()]
    return any(name in mine and not pair.is_same(mine[name], value) for name, value in values)


def update(pair: Pair, step: int) -> Diagnosis | None:
    """Finds a change of a parameter that differs from the reference although its gradient does not."""
    used = pair.mine(step).used
    total = math.hypot(*(each.norm for each in used.values()))
    for record, rank in zip(pair.other.at(step), pair.other.ranks):
        before = rank.steps[step - 1].values if step else rank.start
        known = pair.first.steps[step - 1].values if step else pair.first.start
        off: list[tuple[str, Vector, Vector, Vector]] = []
        for name, now in record.values.items():
            mine = pair.mine(step).values.get(name)
            if mine is None or name not in used or used[name].norm <= pair.noise * total:
                continue
            if math.isfinite(now.norm) != math.isfinite(mine.norm):
                detail = f"norm {now.norm:.3g} on rank {rank.rank}, and {mine.norm:.3g} in the reference"
                return Diagnosis(Cause.UPDATE, step, repr(name), detail)
            change, wanted = vector(now) - vector(before[name]), vector(mine) - vector(known[name])
            bound = _OF_UPDATE * pair.tolerance * math.hypot(*wanted) + 1e-6 * mine.norm
            if math.hypot(*(change - wanted)) > bound:
                off.append((name, change, wanted, vector(before[name])))
        if off:
            return _of_optimizer(pair, step, off[0][0], [record]) or _name_update(pair, step, off)
    return None


def _name_update(pair: Pair, step: int, off: Sequence[tuple[str, Vector, Vector, Vector]]) -> Diagnosis:
    """Says what the changes of parameters are: ``(name, change, the reference's, value before)`` of each."""
    first, change, wanted, _ = off[0]
    ratio = math.hypot(*(change - wanted)) / max(math.hypot(*wanted), 1e-300)
    detail = f"off by {ratio:.3g} of the reference's change"
    change, wanted, value = (np.concatenate([each[column] for each in off]) for column in (1, 2, 3))
    (times,), rest_of_one = least_squares(wanted[:, None], change)
    (factor, decay), rest = least_squares(np.stack([wanted, value], axis=1), change)
    large = np.linalg.norm(decay * value) > pair.fit * np.linalg.norm(change)
    if large and rest <= min(pair.fit, 0.1 * rest_of_one):
        if -0.5 < decay < 0 and abs(factor - 1) <= pair.fit - decay:
            detail = f"each step takes another {-decay:.3g} of the parameter itself away"
            return Diagnosis(Cause.DECAY, step, repr(first), detail)
    elif rest_of_one <= pair.fit:
        detail = f"all changes are {times:.4g} times as large"
    return Diagnosis(Cause.UPDATE, step, repr(first), detail)


def tells_weights(entries: int, columns: int) -> bool:
    """True if a vector has enough entries to show of which columns it is a sum; any vector is one of enough columns."""
    return entries >= 2 * columns


def least_squares(columns: Vector, target: Vector) -> tuple[list[float], float]:
    """The weights of the columns in a vector, and the relative size of what they leave unexplained.

    It is infinite where the numbers are not finite, or so few that chance would explain them (see ``tells_weights``).
    """
    finite = np.isfinite(columns).all() and np.isfinite(target).all()
    if not finite or not tells_weights(len(target), columns.shape[1]):
        return [0.0] * columns.shape[1], math.inf
    weights = np.linalg.lstsq(columns, target, rcond=None)[0]
    rest = float(np.linalg.norm(target - columns @ weights))
    return [float(each) for each in weights], rest / max(float(np.linalg.norm(target)), 1e-300)


def reported(pair: Pair, step: int) -> Diagnosis | None:
    """Finds a reported loss that differs from the reference although the losses of all samples do not."""
    mine = [batch.loss for batch in pair.mine(step).batches if batch.loss is not None]
    if not mine:
        return None
    wanted = sum(mine) / len(mine)
    for rank, record in enumerate(pair.other.at(step)):
        found = [batch for batch in record.batches if batch.loss is not None]
        value = sum(batch.loss or 0.0 for batch in found) / max(len(found), 1)
        if found and not pair.is_close(value, wanted):
            own = [loss for batch in found for loss in batch.losses]
            is_own = bool(own) and pair.is_close(value, sum(own) / len(own))
            detail = f"{value:.4g} on rank {rank}{', the mean of its own samples' if is_own else ''}"
            return Diagnosis(Cause.REPORTED, step, "loss", f"{detail}; {wanted:.4g} in the reference")
    return None
