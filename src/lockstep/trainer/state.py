"""The values of a trainer: its parts, the readings of an epoch, its progress and its outcome."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sized
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lockstep.config.strategy_options import Level
from lockstep.core.summation_tree import fold_rows
from lockstep.data.batch import Batch, MicroBatch
from lockstep.errors import ConfigError
from lockstep.runtime.events import Callback
from lockstep.strategies import IndependentStrategy, StepResult, Strategy

logger = logging.getLogger(__name__)


@dataclass
class MeterSums:
    """Sums over steps, added step by step in their order, so that they don't depend on when they are read."""

    loss: float = 0.0
    """Of the losses, not divided by anything."""
    weight: float = 0.0
    """The divisor of the sum of the losses: samples, tokens, or their weights."""
    right: float = 0.0
    answers: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0

    def add(self, **amounts: float) -> None:
        """Adds to the sums of these names."""
        for name, amount in amounts.items():
            setattr(self, name, getattr(self, name) + amount)

    def means(self) -> dict[str, float]:
        """Mean loss, accuracy, and samples per second; without what nothing was added of."""
        parts = [
            ("loss", self.loss, self.weight),
            ("accuracy", self.right, self.answers),
            ("samples_per_second", self.samples, self.seconds),
        ]
        return {name: total / count for name, total, count in parts if count}


class Meter(Callback):
    """Adds up losses, right answers and samples of the steps of an epoch; every rank has one.

    ``accuracy`` counts right answers, where outputs are class scores.
    """

    def __init__(self, strategy: Strategy, accuracy: Accuracy | None) -> None:
        self._strategy, self._accuracy = strategy, accuracy
        self._answers: list[Tensor] = []
        """Of each micro-batch not read yet: right answers and all of them, on the device."""
        self._samples = 0
        self._losses: list[Tensor] = []
        """Of each step not read yet: the sums of its micro-batches' losses and its weight, on the device."""
        self._since = time.monotonic()
        self.scale = 1.0
        """The loss scale of the last step."""
        self.process = MeterSums()
        """Of all steps that this process has made."""
        self.begin(-1)

    def begin(self, epoch: int, stored: Mapping[str, Any] | None = None) -> None:
        """Begins an epoch, or continues it from what ``as_dict`` gave beside a checkpoint of the same epoch."""
        known: Mapping[str, Any] = stored if stored is not None and stored.get("epoch") == epoch else {}
        if known and "totals" not in known:
            logger.warning(
                "The checkpoint was written by an earlier version, which kept no sums: the loss and accuracy of epoch "
                "%d are those of the steps from here on.",
                epoch + 1,
            )
        self._epoch, self._since = epoch, time.monotonic()
        self._totals = MeterSums(**known.get("totals", {}))
        self._reading = MeterSums(**known.get("reading", {}))

    def on_output(self, micro_batch: MicroBatch, output: Any, target: Any) -> None:
        """Counts right answers, on the device."""
        if self._accuracy is not None:
            self._answers.append(torch.stack(self._accuracy(output, target)))

    def on_backward_begin(self, batch: Batch, scale: float) -> None:
        """Notes the loss scale."""
        self.scale = scale

    def on_backward_end(self, batch: Batch, result: StepResult) -> None:
        """Takes the losses of a step; a copy, since they may lie in memory that the next step uses."""
        self._losses.append(torch.cat([result.losses, result.weight.reshape(1)]))
        self._samples += batch.plan.samples

    def read(self) -> dict[str, float]:
        """The means of all steps since the last reading. Collective."""
        self.collect()
        reading, self._reading = self._reading, MeterSums()
        return reading.means()

    def collect(self) -> None:
        """Reads from the device what the steps have left there, and adds it up over the ranks. Collective."""
        if not self._losses:
            return
        row = torch.zeros(2, dtype=torch.float64, device=self._strategy.device)
        if self._answers:
            row.copy_(torch.stack(self._answers).sum(0))
        right, answers = self._strategy.sum_counts(row).tolist()
        numbers = torch.split(torch.cat(self._losses).cpu(), [len(step) for step in self._losses])
        steps = [(float(fold_rows(step[:-1])), float(step[-1])) for step in numbers]
        now = time.monotonic()
        for totals in (self._totals, self._reading, self.process):
            for loss, weight in steps:
                totals.add(loss=loss, weight=weight)
            totals.add(right=right, answers=answers, samples=self._samples, seconds=now - self._since)
        self._losses, self._answers, self._samples, self._since = [], [], 0, now

    def go_on(self) -> None:
        """Leaves out the time since ``collect``, in which nothing was trained."""
        self._since = time.monotonic()

    def wait_for_counts(self) -> None:
        """Adds what independent processes have counted in the epoch and not told yet. Collective."""
        if isinstance(self._strategy, IndependentStrategy):
            self._strategy.gather_records(None)  # the counts come before it
            right, answers = self._strategy.sum_counts(torch.zeros(2, dtype=torch.float64)).tolist()
            for totals in (self._totals, self._reading):
                totals.add(right=right, answers=answers)

    def means(self) -> dict[str, float]:
        """The means of all steps of the epoch up to the last reading."""
        return self._totals.means()

    def as_dict(self) -> dict[str, Any]:
        """The sums up to the last ``collect``, ready for JSON."""
        return {"epoch": self._epoch, "totals": asdict(self._totals), "reading": asdict(self._reading)}


def is_of_classes(loss: Any) -> bool:
    """True for a loss of classes, so that the model's outputs are their scores."""
    function = getattr(loss, "func", loss)
    return isinstance(loss, nn.CrossEntropyLoss) or function is cross_entropy or is_of_log_probabilities(loss)


def is_of_log_probabilities(loss: Any) -> bool:
    """True for a loss of classes whose model gives logarithms of probabilities."""
    return isinstance(loss, nn.NLLLoss) or getattr(loss, "func", loss) is nll_loss


@dataclass(frozen=True)
class Accuracy:
    """Counts the samples, or tokens, whose highest score is at their class.

    Args:
        ignore_index: the class that the loss leaves out; it is not counted either.
    """

    ignore_index: int = -100

    @classmethod
    def of(cls, loss: Any) -> Accuracy | None:
        """The counting of a loss of classes; None for another loss."""
        if not is_of_classes(loss):
            return None
        given = getattr(loss, "keywords", {}).get("ignore_index", cls.ignore_index)
        return cls(getattr(loss, "ignore_index", given))

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The number of right answers and that of all answers, both 0-dim; ``ConfigError`` for other shapes.

        Args:
            output: scores, shape (n, classes, ...).
            target: classes, shape (n, ...), or probabilities, shape (n, classes, ...), of which the highest counts.
        """
        scores, shape = (getattr(each, "shape", ()) for each in (output, target))
        of_all = isinstance(target, Tensor) and target.is_floating_point()  # of probabilities
        if len(scores) < 2 or shape != (scores if of_all else scores[:1] + scores[2:]):
            raise ConfigError(
                "The loss is one of classes by its type, so accuracy is counted, and it cannot be for an output of "
                f"{_form(output)} and a target of {_form(target)}. Derive the loss from torch.nn.Module, or make it a "
                "function: then none is counted. An accuracy of your own can be one of the metrics."
            )
        classes, counted = self.labels(target)
        return ((output.argmax(1) == classes) & counted).sum(), counted.sum()

    def labels(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """The class that each target stands for, and whether it counts."""
        if not target.is_floating_point():
            return target, target != self.ignore_index
        classes = target.argmax(1)
        return classes, torch.ones_like(classes, dtype=torch.bool)


def _form(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"


@dataclass(frozen=True, kw_only=True)
class TrainingParts:
    """The parts of a training job, ready to be called."""

    model: torch.nn.Module
    optimizer: Optimizer
    scheduler: Any
    loss: Callable[..., Any]
    accuracy: Accuracy | None
    """Where the model's outputs are class scores."""
    training_set: Sized
    validation_set: Sized | None
    workers: int
    """Loader processes of each rank."""
    average: AveragedModel | None = None
    """A moving average of the model's weights, if there is one."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Computed in evaluations beside the loss, by name."""
    judged: str = ""
    """The loss or accuracy and the validation set of a job, as text; results of others cannot be compared."""


@dataclass
class Progress:
    """The course of a run; stored in its checkpoints."""

    metric: str
    """The judged metric: ``validation_accuracy`` (higher is better) or ``validation_loss`` (lower is)."""
    best: float | None = None
    best_epoch: int = -1
    best_step: int = -1
    since_best: int = 0
    """Evaluations since the best one."""
    judged: str = ""
    """See ``TrainingParts``."""

    def judge(self, epoch: int, step: int, values: Mapping[str, float]) -> bool:
        """Takes the results of an epoch that ended with ``step``; returns whether they are the best so far."""
        if self.metric not in values:
            raise ConfigError("metrics.accuracy gives several numbers, and one is judged. Rename it.")
        value = values[self.metric]
        more_is_better = self.metric.endswith("accuracy")
        better = self.best is None or (value > self.best if more_is_better else value < self.best)
        better = better or (self.best != self.best and value == value)  # any number is better than NaN
        if better:
            self.best, self.best_epoch, self.best_step, self.since_best = value, epoch, step, 0
        else:
            self.since_best += 1
        return better

    def as_dict(self) -> dict[str, Any]:
        """The entries, ready for JSON."""
        return asdict(self)

    def load_state_dict(self, stored: Mapping[str, Any]) -> bool:
        """Continues from what ``as_dict`` gave; False where that is about another metric, loss or validation set."""
        mine = asdict(self)
        is_same = all(stored.get(name, mine[name]) == mine[name] for name in ("metric", "judged"))
        for name in mine.keys() & stored.keys() if is_same else ():
            setattr(self, name, stored[name])
        return is_same


@dataclass(frozen=True, kw_only=True)
class TrainingOutcome:
    """The results of a finished run."""

    fingerprint: str
    values: dict[str, float]
    """Results of the last evaluation."""
    best: float | None
    best_epoch: int
    metric: str
    samples_per_second: float
    """Over all training steps of this process, without evaluations, checkpoints and logs."""
    seconds: float
    """The time that they took."""
    weights: Path | None
    """The exported weights of the last step."""
    skipped_steps: int
    first_step: int = 0
    """Steps that were done before this process began."""
    has_other_data: bool = False
    """True if a resumed run had another training set than before."""
    level: Level = Level.BITWISE
    """The level that the strategy promises of the fingerprint."""
    is_portable: bool = False
    """True if the fingerprint does not depend on the CPU."""
    bytes_per_step: float = 0.0
    """Bytes of gradients that a rank gave to others in a step, on average; of the rank that gave most."""
    peak_memory: int = 0
    """The most bytes of memory that a rank has had; of the rank that has had most."""
    is_memory_of_device: bool = False
    """True if that is memory allocated on one GPU; else it is the resident memory of a process."""
    remarks: dict[str, str] = field(default_factory=dict)
    """Facts of the strategy about the run, by name."""
