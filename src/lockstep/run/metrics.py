"""Metrics, such as an accuracy: what they are, and those of a step, which are computed beside its loss (``also=``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lockstep.core.plan import Share, StepPlan
from lockstep.core.summation_tree import fold_rows
from lockstep.data.batch import MicroBatch, tensors_in
from lockstep.errors import ConfigError
from lockstep.run.checks.calls import require_same_names, watching_once
from lockstep.run.checks.means import Changes, Deviation, held_by, judge_metrics, reasons, reasons_with_model
from lockstep.run.checks.rows import RowCopies, copies_of, has_rows
from lockstep.run.step import sum_and_weight, with_exact_mean
from lockstep.run.step_errors import explain_loss
from lockstep.runtime.torch_internals import OVERWRITTEN
from lockstep.strategies import IndependentStrategy, Strategy

Metric = Callable[[Any, Any], Any]


@runtime_checkable
class SetMetric(Protocol):
    """Sees all samples before it gives its value, as the metrics of torchmetrics do."""

    def update(self, output: Tensor, target: Tensor, /) -> Any:
        """Takes the next samples."""

    def compute(self) -> Any:
        """A number of all samples since ``reset``, or a dict or list of numbers, such as one for each class."""

    def reset(self) -> Any:
        """Forgets all samples."""


class SumsAndWeights:
    """The sum and the weight of each metric for each micro-batch of this holder, and those of all holders together."""

    def __init__(self, names: Iterable[Any], strategy: Strategy, share: Share, count: int) -> None:
        # Ranks may have the names in other orders, as from a set.
        self._columns = {name: column for column, name in enumerate(sorted(names, key=repr))}
        self._strategy, self._share, self._count = strategy, share, count
        shape = share.longest(count), len(self._columns), 2
        self._rows = torch.zeros(shape, dtype=torch.float64, device=strategy.device)

    def put(self, place: int, name: Any, found: tuple[Tensor, Tensor]) -> None:
        """Notes what a metric gave for this holder's micro-batch number ``place``."""
        cell = self._rows[place, self._columns[name]]
        cell[0], cell[1] = found

    def of_all(self) -> dict[Any, Tensor]:
        """For each metric those of all micro-batches in order of ``k``, shape (count, 2). Collective."""
        ordered = self._strategy.gather_in_order(self._rows, self._count, self._share)
        return {name: ordered[:, column] for name, column in self._columns.items()}


class LossEntries:
    """A loss function that returns a dict, as one that returns its entry ``"loss"`` and keeps the ``names``."""

    def __init__(self, function: Callable[..., Any], names: Collection[str]) -> None:
        self.function, self.names = function, names
        self._kept: dict[int, Mapping[str, Any]] = {}
        """The value that was returned last, by thread: strategy dp computes losses in several."""

    def __call__(self, output: Any, target: Any) -> Any:
        """The loss."""
        found, names, said = self.function(output, target), ("loss", *self.names), ""
        if not isinstance(found, Mapping):
            said = f"is a {type(found).__name__}"
        elif missing := [name for name in names if name not in found]:
            said = f"has no {missing[0]!r}"
        if said:
            raise ConfigError(
                f"also={list(self.names)!r} of run.backward names entries of the dict that the loss returns, and what "
                f"it returned {said}. Return a dict with {', '.join(map(repr, names))}, or give functions: "
                "also={'name': function}."
            )
        self._kept[threading.get_ident()] = found
        return found["loss"]

    def values(self) -> list[Any]:
        """The other entries, as this thread's last call returned them."""
        found = self._kept.pop(threading.get_ident())
        return [found[name] for name in self.names]

    def entry(self, name: str) -> Callable[[Any, Any], Any]:
        """A function that computes one of them."""
        return lambda output, target: self.function(output, target)[name]


class StepMetrics:
    """The metrics of one step.

    Args:
        functions: of (output, target), by name, as ``Run.evaluate`` takes them; or the entries of the loss.
        unchecked: names of those that are to be checked, see ``means``; the same on every rank.
        of_batch: True for entries of a loss that is computed once, for the whole batch.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]] | LossEntries,
        unchecked: set[str],
        *,
        of_batch: bool = False,
    ) -> None:
        self._of_batch = of_batch
        self._entries = functions if isinstance(functions, LossEntries) else None
        if isinstance(functions, LossEntries):
            functions = {name: functions.entry(name) for name in functions.names}
        for name, function in functions.items():
            if not callable(function):
                raise ConfigError(
                    f"also={{{name!r}: ...}} of run.backward takes a function of (output, target), and was given a "
                    f"{type(function).__name__}."
                )
        self._given, self._unchecked = dict(functions), unchecked
        self._functions = {name: with_exact_mean(function) for name, function in functions.items()}
        self._reasons: dict[str, str] = {}
        self._untold: set[str] = set()
        """Those that are one number, of outputs without several rows."""
        self._has_asked_model = False
        self.checked: list[Any] = []
        """Functions that need not be checked again."""
        self._seen: list[RowCopies] = []
        self._kept: Changes = {}
        self._sums: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._writing: list[str] = []
        """Of those that have written into the output or the target, the names."""

    @classmethod
    def of(
        cls,
        also: Mapping[str, Callable[..., Any]] | Collection[str],
        loss: Callable[..., Any],
        new: Callable[[Mapping[str, Any]], set[str]],
        *,
        whole_batch: bool,
    ) -> StepMetrics:
        """Those that ``also`` of ``Run.backward`` asks for.

        Args:
            also: functions by name, or names of entries of what ``loss`` returns.
            loss: as the user gave it.
            new: the names of those that were not checked yet; the same on every rank.
            whole_batch: as in ``Run.backward``.
        """
        if isinstance(also, Mapping):
            return cls(also, new(also))
        if not isinstance(also, Collection):
            raise ConfigError(f"also={also!r:.60} was given. Give functions by name: also={{'accuracy': accuracy}}.")
        names = [also] if isinstance(also, str) else list(also)
        unchecked = set(names) if new({"loss": loss}) else set()
        return cls(LossEntries(loss, names), unchecked, of_batch=whole_batch)

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """Those that are called beside the loss."""
        return [*self._given.values()] if self._entries is None else []

    def loss_of(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """The loss function of the step, where the user gave ``loss``."""
        return with_exact_mean(loss) if self._entries is None else self._entries

    def judge(self, *how: Any) -> None:
        """Notes which are not means where outputs have no row for each sample; see ``deviation_with_model``."""
        self._reasons |= reasons_with_model(self._waiting(), *how)
        self._has_asked_model = True

    def _waiting(self) -> dict[str, Callable[..., Any]]:
        """Those that are to be checked and of which no fault is known."""
        names = () if self._of_batch else sorted(self._unchecked, key=repr)
        return {name: self._given[name] for name in names if not self._reasons.get(name)}

    @torch.no_grad()
    def note(self, output: Any, target: Any, micro_batch: MicroBatch) -> None:
        """Computes them for one micro-batch of this process."""
        if self._of_batch:
            return
        samples = len(micro_batch)
        if waiting := self._waiting():
            self._seen.append((*copies_of((output, target)), samples))
            self._reasons |= reasons(waiting, self._seen)
        if self._entries is None:
            looked_at = set[str]() if self._sums else self._unchecked
            before, versions = held_by(self._given, looked_at), _versions_of(output, target)
            found = [value for _, value in metric_values(self._functions, "run.backward", output, target, looked_at)]
            if _versions_of(output, target) != versions:
                # The last one has, or another would have been refused.
                self._writing.append(next(reversed(self._functions)))
            self._kept |= before.changed(held_by(self._given, looked_at))
        else:
            found = self._entries.values()
        if waiting:
            rows_tell = has_rows((output, target), samples) and (samples > 1 or len(self._seen) > 1)
            values = () if rows_tell else zip(self._given, found, strict=True)
            self._untold = {name for name, each in values if isinstance(each, Tensor) and each.dim() == 0}
        self._sums[micro_batch.k] = [sum_and_weight(each, samples) for each in found]

    def note_batch(self) -> None:
        """Takes the entries of the loss that was computed for the whole batch; they count for micro-batch 0."""
        if self._of_batch and self._entries is not None:
            self._sums[0] = [sum_and_weight(each, 1) for each in self._entries.values()]

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Surrounds the backward pass; says which metric has written into a tensor that this still needed."""
        try:
            yield
        except RuntimeError as error:
            if self._writing and OVERWRITTEN.is_in(str(error)):
                raise _writes(self._writing[0], "run.backward", "the backward pass still needs") from error
            raise

    @torch.no_grad()
    def means(self, strategy: Strategy, plan: StepPlan, *, is_main: bool) -> dict[str, Tensor]:
        """The means over the global batch, float64, 0-dim, equal on every rank, on the device. Collective.

        Raises:
            ConfigError: one is not a mean over samples, or processes do not wait for each other.
        """
        if isinstance(strategy, IndependentStrategy):
            raise ConfigError(
                f"also= of run.backward needs processes that wait for each other, and those of {strategy.name!r} in "
                "asynchronous mode do not. Compute these numbers with run.evaluate."
            )
        if self._unchecked:
            require_same_names("The metrics in also= of run.backward", self._functions, strategy)
            if plan.leaves > 1 and not self._has_asked_model:
                for name in self._untold:
                    self._reasons[name] = self._reasons.get(name) or Deviation.WITHOUT_ROWS.reason
            clear = judge_metrics(strategy.gather_records([self._reasons, self._kept]), warns=is_main)
            self.checked = [self._given[name] for name in clear]
            if self._entries is not None:
                self.checked = [self._entries.function] if clear == self._unchecked else []
        sums = SumsAndWeights(self._functions, strategy, strategy.share, plan.leaves)
        for place, k in enumerate(strategy.share.of(plan.leaves)):
            for name, found in zip(self._functions, self._sums.get(k, ())):
                sums.put(place, name, found)
        totals = {name: fold_rows(rows) for name, rows in sums.of_all().items()}
        return {name: totals[name][0] / totals[name][1] for name in self._functions}


def metric_values(
    functions: Mapping[Any, Callable[..., Any]], caller: str, output: Any, target: Any, unchecked: set[str]
) -> Iterator[tuple[Any, Any]]:
    """The values of metrics by name, computed one by one; ``ConfigError`` if one writes and another follows."""
    versions, last = _versions_of(output, target) if len(functions) > 1 else [], None
    for number, (name, function) in enumerate(functions.items()):
        if number and _versions_of(output, target) != versions:
            raise _writes(last, caller, "other metrics are given, too")
        with watching_once(f"the metric {name!r}", looks=name in unchecked):
            try:
                value = function(output, target)
            except Exception as error:
                explain_loss(error, output, target, f"The metric {name!r}", caller)
                raise
        yield name, value
        last = name


def _versions_of(*values: Any) -> list[int]:
    """How often each tensor in them was written into, as far as torch knows."""
    return [tensor._version for tensor in tensors_in(values) if not tensor.is_inference()]


def _writes(name: object, caller: str, readers: str) -> ConfigError:
    """The error for a metric that has changed what others read."""
    return ConfigError(
        f"The metric {name!r} of {caller} writes into the output or the target, which {readers}. Let it make new "
        "tensors, as output.sigmoid() in place of output.sigmoid_(), or write into output.clone()."
    )
