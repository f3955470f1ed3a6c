"""What a rank computes in one step: some of the step's micro-batches, each with its samples collated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lockstep.permutation import Indices
from lockstep.plan import StepPlan


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one micro-batch, collated."""

    k: int
    """Position among the micro-batches of the step, or of the whole set where it is evaluated. One that is not below
    their number is a spare (see ``lockstep.plan.Share.rounds``)."""
    indices: Indices
    """The samples' numbers in the data set, in the order of the rows of ``data``."""
    data: Any
    """The pair ``(input, target)``, or the dict, of tensors on the CPU."""

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True)
class Batch:
    """One step of one rank. A rank that has no micro-batch in a ragged step still gets its ``Batch``."""

    plan: StepPlan
    """The whole step, the same on every rank."""
    micro_batches: tuple[MicroBatch, ...]
    """This rank's micro-batches, in order of ``k``."""

    def __len__(self) -> int:
        return sum(len(part) for part in self.micro_batches)
