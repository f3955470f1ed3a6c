"""Keeps one loader for each data set of a run, so that worker processes stay over the epochs."""

from __future__ import annotations

import logging
from typing import Any

import torch

from lockstep.data import EvaluationLoader, StepLoader, adopt
from lockstep.plan import SamplePlan
from lockstep.run.options import RunOptions
from lockstep.strategies import Strategy

logger = logging.getLogger(__name__)


class Feeder:
    """Makes loaders for the share of one process.

    Args:
        options: batch shape and seed.
        strategy: which share.
    """

    def __init__(self, options: RunOptions, strategy: Strategy) -> None:
        self._options, self._strategy = options, strategy
        self._training: dict[tuple[Any, ...], tuple[StepLoader, Any, Any]] = {}
        self._evaluation: dict[tuple[Any, ...], tuple[EvaluationLoader, Any, Any]] = {}
        self._pin_memory = strategy.device.type == "cuda" and torch.cuda.is_available()

    def training(
        self, data: Any, shuffle: bool, drop_last: bool, workers: int | None, smallest: int
    ) -> tuple[StepLoader, Any]:
        """The loader of a training set, and the set; ``smallest`` is the smallest micro-batch that can be computed."""
        key = (id(data), shuffle, drop_last, workers)
        if key not in self._training:
            source = adopt(data)
            plan = SamplePlan(
                samples=len(source.dataset),
                shape=self._options.shape,
                seed=self._options.seed,
                shuffle=shuffle if source.shuffle is None else source.shuffle,
                drop_last=drop_last or bool(source.drop_last),
                smallest_micro_batch=smallest,
            )
            if plan.dropped_samples and not plan.drop_last:
                logger.warning(
                    "The last micro-batch of each epoch would hold %d sample, too few for BatchNorm: it is left out.",
                    plan.dropped_samples,
                )
            loader = StepLoader(
                source.dataset,
                plan,
                holder=self._strategy.holder,
                holders=self._strategy.holders,
                seed=self._options.seed,
                workers=source.workers if workers is None else workers,
                collate=source.collate,
                prefetch=self._options.prefetch,
                pin_memory=self._pin_memory,
                timeout=self._options.loader_timeout,
            )
            self._training[key] = (loader, source.dataset, data)
        loader, dataset, _ = self._training[key]
        return loader, dataset

    def evaluation(self, data: Any, workers: int | None) -> tuple[EvaluationLoader, Any]:
        """The loader of an evaluation set, and the set."""
        key = (id(data), workers)
        if key not in self._evaluation:
            source = adopt(data)
            loader = EvaluationLoader(
                source.dataset,
                micro_batch_size=self._options.evaluation_batch or self._options.shape.micro_batch_size,
                holder=self._strategy.holder,
                holders=self._strategy.holders,
                seed=self._options.seed,
                workers=source.workers if workers is None else workers,
                collate=source.collate,
                pin_memory=self._pin_memory,
            )
            self._evaluation[key] = (loader, source.dataset, data)
        reader, dataset, _ = self._evaluation[key]
        return reader, dataset

    def close(self) -> None:
        """Ends all worker processes."""
        for loader, *_ in self._training.values():
            loader.close()
        for reader, *_ in self._evaluation.values():
            reader.close()
        self._training.clear()
        self._evaluation.clear()
