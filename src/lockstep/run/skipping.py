"""Counts the samples that were skipped, over all processes, and stops a run that skips too many."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lockstep.collectives import gather_json
from lockstep.data import SkipBroken
from lockstep.data.batch import Batch
from lockstep.data.naming import look_through
from lockstep.errors import ConfigError, DataError

logger = logging.getLogger(__name__)
_MOST_NAMED = 10

Read = Callable[[int, int], Iterator[Batch]]


@dataclass
class SkippedSamples:
    """Counts what the processes of a run skip.

    A sample counts at the step that holds it, however far ahead it was read, and in each epoch anew.

    Args:
        group: the processes that go through the steps together; None for one alone.
        device: where their exchange takes place.
        seed: the run's seed.
        says: whether this process logs.
    """

    group: dist.ProcessGroup | None
    device: torch.device
    seed: int
    says: bool

    def counted(self, read: Read, dataset: Any) -> Read:
        """The same steps; of a ``SkipBroken`` set, what was skipped is counted before each, which is collective."""
        inner, numbers = look_through(dataset)
        if not isinstance(inner, SkipBroken):
            return read
        if numbers is not None:
            raise ConfigError(
                "SkipBroken belongs around Subset, not into it: SkipBroken(Subset(dataset, ...))."
            )

        def steps(epoch: int, first: int) -> Iterator[Batch]:
            found: set[int] = set()
            for batch in read(epoch, first):
                new = set(_everyones(_skipped(batch, inner), self.group, self.device)) - found
                if new:
                    found |= new
                    self._report(inner, new, found, epoch)
                yield batch

        return steps

    def _report(self, dataset: SkipBroken, new: set[int], found: set[int], epoch: int) -> None:
        named = {index: dataset.named(self.seed, epoch, index) for index in sorted(found)}
        if len(found) > dataset.limit:
            more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
            raise DataError(
                f"{len(found)} of {len(dataset)} samples could not be read in epoch {epoch}, and at most "
                f"{dataset.limit} ({dataset.most:.3g} of them) may be skipped: "
                f"{', '.join(list(named.values())[:_MOST_NAMED])}{more}. Repair or remove them."
            )
        for index in sorted(new) if self.says else ():
            logger.warning(
                "In epoch %d %s could not be read and was skipped (%d so far, at most %d).",
                epoch,
                named[index],
                len(found),
                dataset.limit,
            )


def _skipped(batch: Batch, dataset: SkipBroken) -> list[int]:
    held = [part.indices for part in batch.micro_batches]
    return [int(index) for index in dataset.skipped(np.concatenate(held))] if held else []


def _everyones(mine: list[int], group: dist.ProcessGroup | None, device: torch.device) -> list[int]:
    """The numbers of all processes; they say first whether there are any, which is the cheap and usual case."""
    if group is None:
        return mine
    anyone = torch.tensor([len(mine)], dtype=torch.int64, device=device)
    dist.all_reduce(anyone, op=dist.ReduceOp.MAX, group=group)
    if not int(anyone):
        return []
    return [index for each in gather_json(mine, group, device) for index in each]
