"""Numbers of a step beside its loss, such as an accuracy or the parts of a loss, put together as the loss is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.plan import StepPlan
from lockstep.core.summation_tree import fold_rows
from lockstep.data.batch import MicroBatch
from lockstep.errors import ConfigError
from lockstep.run.evaluation import gathered_in_order
from lockstep.run.means import Part, reasons, require_means
from lockstep.run.step import exact, sum_and_weight
from lockstep.strategies import IndependentStrategy, Strategy, gather_records


class StepMetrics:
    """The metrics of one step.

    Args:
        functions: of (output, target), by name, as ``Run.evaluate`` takes them.
        unchecked: names of those that are to be checked, see ``means``; the same on every rank.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], unchecked: set[str]) -> None:
        for name, function in functions.items():
            if not callable(function):
                raise ConfigError(
                    f"also={{{name!r}: ...}} of run.backward takes a function of (output, target), and was given a "
                    f"{type(function).__name__}."
                )
        self._given, self._unchecked = dict(functions), unchecked
        self._functions = {name: exact(function) for name, function in functions.items()}
        self._reasons: dict[str, str] = {}
        self._seen: list[Part] = []
        self._sums: dict[int, list[tuple[Tensor, Tensor]]] = {}

    @torch.no_grad()
    def note(self, output: Any, target: Any, micro_batch: MicroBatch) -> None:
        """Computes them for one micro-batch of this process."""
        samples = len(micro_batch)
        if waiting := sorted(self._unchecked - self._reasons.keys()):
            self._seen.append((output, target, samples))
            self._reasons |= reasons({name: self._given[name] for name in waiting}, self._seen)
        values = [sum_and_weight(each(output, target), samples) for each in self._functions.values()]
        self._sums[micro_batch.k] = values

    @torch.no_grad()
    def means(self, strategy: Strategy, group: dist.ProcessGroup | None, plan: StepPlan) -> dict[str, Tensor]:
        """The means over the global batch, float64, 0-dim, equal on every rank, on the device. Collective.

        Args:
            strategy: over whose processes they are gathered.
            group: all ranks; None for a world of one.
            plan: of the step.

        Raises:
            ConfigError: one is no mean over samples, or processes do not wait for each other.
        """
        if isinstance(strategy, IndependentStrategy):
            raise ConfigError(
                f"also= of run.backward needs processes that wait for each other, and those of {strategy.name!r} in "
                "asynchronous mode do not. Compute these numbers with run.evaluate."
            )
        share = strategy.share
        if self._unchecked:
            require_means(gather_records(strategy, self._reasons, group))
        rows = torch.zeros(
            *(share.longest(plan.leaves), len(self._functions), 2),
            dtype=torch.float64,
            device=strategy.device,
        )
        for place, k in enumerate(share.of(plan.leaves)):
            for column, (total, weight) in enumerate(self._sums.get(k, ())):
                rows[place, column, 0], rows[place, column, 1] = total, weight
        ordered = gathered_in_order(rows, plan.leaves, share, strategy)
        totals = [fold_rows(ordered[:, column]) for column in range(len(self._functions))]
        return {name: total / weight for name, (total, weight) in zip(self._functions, totals)}
