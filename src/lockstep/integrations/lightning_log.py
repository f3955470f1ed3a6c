"""The log of a ``LightningModule``: taken from ``self.log``, averaged over micro-batches, steps and epochs.

self.log(name, value) in a step of a micro-batch -> ModuleLog -> {name: Logged}, one dict for each micro-batch
gather_rows: of all processes, once for each step or evaluation -> Averages, the same on every one
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from lockstep.data.batch import MicroBatch
from lockstep.errors import ConfigError
from lockstep.run.checks.means import Deviation, deviation_over
from lockstep.run.metrics import StepMetrics
from lockstep.strategies import Strategy

STEPS = ("training_step", "validation_step", "test_step")
_NO_MEAN = (
    "self.log({name!r}, ...) in {step} was given a number that {is_what}. Steps run on micro-batches, so its average "
    "would depend on micro_batches. Log a mean over samples; for one over something else, such as tokens, give their "
    "number as batch_size=; leave out a batch_size that is the same for every batch. Compute a number of all samples "
    "together, such as F1, with trainer.run.evaluate. checks='off' takes the average all the same."
)
_KINDS = {
    Deviation.SUM: "is a sum over the samples",
    Deviation.WEIGHTED: "is not a mean over samples, but one over something else",
    Deviation.FUNCTION: "is the root or the exponential of a mean",
    Deviation.OTHER: "is not a mean over samples",
}


class Logged(NamedTuple):
    """A value as one call of a step or hook logged it."""

    value: Tensor
    weight: float | None
    """``batch_size``, where the module gave one."""
    on_step: bool
    on_epoch: bool


class ModuleLog:
    """Stands for those parts of Lightning's Trainer that ``LightningModule.log`` and ``optimizers`` ask for."""

    is_distributed = False

    def __init__(self) -> None:
        self._entries: dict[int, dict[str, Logged]] = {}
        """By thread: micro-batches may run side by side."""
        self._lightning_optimizers: list[Any] = []

    def should_reset_tensors(self, hook: str) -> bool:
        """False: nothing is kept from one call to the next."""
        return False

    def reduce(self, value: Any, *given: Any, **named: Any) -> Any:
        """The value: processes are gathered later."""
        return value

    def all_gather(self, *given: Any, **named: Any) -> Any:
        """Raises ``ConfigError``: a step has one micro-batch of its process."""
        raise ConfigError(
            "self.all_gather(...) would gather the micro-batches that the processes happen to compute at the "
            "same time, so the result would depend on their number. Log means with self.log, which is given those of "
            "the whole batch; a loss of the whole batch needs a loop of your own with run.backward(batch, loss, "
            "whole_batch=True)."
        )

    def log(
        self,
        hook: str,
        name: str,
        value: Any,
        *,
        on_step: bool,
        on_epoch: bool,
        reduce_fx: Any,
        batch_size: int | None,
        **other: Any,
    ) -> None:
        """Takes a value that ``self.log`` was given in the step or hook of that name.

        Raises:
            ConfigError: it cannot be averaged over micro-batches.
        """
        entries = self._entries.setdefault(threading.get_ident(), {})
        if isinstance(value, Metric | Mapping):
            raise ConfigError(
                f"self.log({name!r}, ...) in {hook} was given a {type(value).__name__}, which keeps what it has seen "
                "from one micro-batch to the next. Log a number of this batch alone, such as those of "
                "torchmetrics.functional, or give the object to trainer.run.evaluate."
            )
        if hook in STEPS and on_epoch and reduce_fx not in ("mean", torch.mean):
            raise ConfigError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}) in {hook}: steps run on micro-batches, so only means "
                "over samples are the same for each number of them. Log a mean; a sum over the epoch is the mean "
                "times the number of samples."
            )
        if name in entries:
            raise ConfigError(f"{hook} logged {name!r} twice in one call. Give the second value another name.")
        weight = None if batch_size is None else float(batch_size)
        entries[name] = Logged(value, weight, on_step, on_epoch)

    def begin(self) -> None:
        """Forgets what this thread has logged."""
        self._entries.pop(threading.get_ident(), None)

    def end(self) -> dict[str, Logged]:
        """The values that this thread has logged since ``begin``."""
        return self._entries.pop(threading.get_ident(), {})


Values = dict[int, tuple[int, Mapping[str, Logged]]]
"""How many samples a micro-batch has, and what was logged for it, by its number."""


class StepLog(StepMetrics):
    """Takes what ``training_step`` logs for the micro-batches of this process; outputs are (loss, logged)."""

    def __init__(self) -> None:
        super().__init__({}, set())
        self.values: Values = {}

    def note(self, output: Any, target: Any, micro_batch: MicroBatch) -> None:
        """Keeps what was logged for one micro-batch."""
        self.values[micro_batch.k] = len(micro_batch), output[1]


class Averages:
    """Means by name, of sums and weights that are added in the order of micro-batches and steps."""

    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        self.sums: dict[str, list[Any]] = {name: list(each) for name, each in (kept or {}).items()}
        """Sum, weight, ``on_step`` and ``on_epoch``, by name."""

    def add(self, name: str, value: float, weight: float, on_step: bool, on_epoch: bool) -> None:
        """Adds one value."""
        total = self.sums.setdefault(name, [0.0, 0.0, on_step, on_epoch])
        total[0] += value * weight
        total[1] += weight

    def add_all(self, other: Averages) -> None:
        """Adds the sums of a step."""
        for name, (value, weight, on_step, on_epoch) in other.sums.items():
            total = self.sums.setdefault(name, [0.0, 0.0, on_step, on_epoch])
            total[0] += value
            total[1] += weight

    def means(self, *, of_step: bool) -> dict[str, Tensor]:
        """The means that are known at the end of a step, or of an epoch, float64, 0-dim, under Lightning's names."""
        found = {}
        for name, (total, weight, on_step, on_epoch) in self.sums.items():
            if not (on_step if of_step else on_epoch):
                continue
            if not weight:
                raise ConfigError(f"self.log({name!r}, ...) has a total weight of zero, so it has no mean.")
            mean = torch.tensor(total / weight, dtype=torch.float64)
            found[name] = mean
            if on_step and on_epoch:
                found[f"{name}_step" if of_step else f"{name}_epoch"] = mean
        return found


def gathered(step: str, values: Values, reasons: Mapping[str, str], strategy: Strategy) -> Averages:
    """The averages over the micro-batches of all processes, of what a step has logged here. Collective.

    Raises:
        ConfigError: a process has found that a value is not a mean over samples: ``reasons``, see ``unequal_means``.
    """
    rows = [
        [
            k,
            name,
            float(each.value),
            samples if each.weight is None else each.weight,
            each.on_step,
            each.on_epoch,
        ]
        for k, (samples, entries) in values.items()
        for name, each in entries.items()
    ]
    everyone = strategy.gather_records([rows, dict(reasons)])
    for name, is_what in sorted({item for _, found in everyone for item in found.items()}):
        raise ConfigError(_NO_MEAN.format(name=name, step=step, is_what=is_what))
    averages = Averages()
    # Some share a micro-batch.
    once = {(k, name): tuple(row) for theirs, _ in everyone for k, name, *row in theirs}
    for (_, name), row in sorted(once.items()):
        averages.add(name, *row)
    return averages


def unequal_means(logged: Callable[[slice], Mapping[str, Logged]], samples: int, most: float) -> dict[str, str]:
    """The kinds of the logged values that are not means over the rows of a micro-batch; see ``deviation_over``."""
    found: dict[str, str] = {}
    for name in logged(slice(None)):

        def sums(rows: slice, name: str = name) -> tuple[float, float]:
            each = logged(rows)[name]
            weight = float(len(range(samples)[rows])) if each.weight is None else each.weight
            return float(each.value) * weight, weight

        deviation = deviation_over(sums, samples, most)
        if deviation in _KINDS:
            found[name] = _KINDS[deviation]
    return found
