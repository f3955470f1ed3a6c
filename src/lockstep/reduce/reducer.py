"""The interface of a reducer: sums buckets over ranks, each rank giving the tree nodes that it could finish alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lockstep.config.strategy_options import Level
from lockstep.core.plan import share
from lockstep.core.summation_tree import Node, nodes_within
from lockstep.distributed.collectives import drop_process_groups


@dataclass(frozen=True)
class BucketShape:
    """One flat tensor that is reduced at once."""

    numel: int
    dtype: torch.dtype
    members: tuple[tuple[int, ...], ...] = ()
    """Shapes of the gradients, and of the gaps after them, that lie in it one after the other; none where it holds
    something else, which no reducer may round or compress."""


@dataclass(frozen=True)
class NodeLayout:
    """The tree nodes that each rank brings to a step: a pure function of the leaves and the number of ranks."""

    leaves: int
    ranks: tuple[tuple[Node, ...], ...]

    @staticmethod
    @lru_cache(maxsize=256)
    def of(leaves: int, holders: int) -> NodeLayout:
        """The nodes when ``leaves`` micro-batches are shared out by ``plan.share``."""
        shares = (share(leaves, holders, rank) for rank in range(holders))
        nodes = tuple(tuple(nodes_within(part.start, part.stop, leaves)) for part in shares)
        return NodeLayout(leaves, nodes)

    @property
    def slots(self) -> int:
        """The most nodes that any rank brings."""
        return max(len(nodes) for nodes in self.ranks)


def most_slots(leaves: int, holders: int) -> int:
    """The most nodes a rank brings in any step with up to ``leaves`` micro-batches."""
    return max(NodeLayout.of(n, holders).slots for n in range(1, leaves + 1))


def shard_edge(numel: int, ranks: int, edge: int) -> int:
    """The index at which shard ``edge`` begins, a multiple of 16; the last shard ends with the bucket."""
    return numel if edge == ranks else min(numel, -(-numel // (16 * ranks)) * 16 * edge)


class Reducer(ABC):
    """Sums buckets over the ranks of a step.

    The calls of one step, on every rank and in this order::

        begin(leaves)
        for each bucket, in the order of ``buckets``:
            staging(bucket, slot)[:] = value of this rank's node number ``slot``     (any time before start)
            start(bucket)                                                            (does not wait)
        finish(header)                                                               (waits; returns all headers)

    Afterwards ``total(bucket)`` holds the sum over all leaves, equal on every rank.
    """

    level: Level
    turns: int = 1
    """Number of staging memories, used in turn, step by step."""
    turn: int = 0
    """The one that the current step uses."""
    bytes_sent: int = 0
    """Bytes this rank has given to others since the run began, by the algorithm's own count."""

    @abstractmethod
    def allocate(self, buckets: list[BucketShape], header: int, leaves: int) -> None:
        """Makes room for the buckets and for ``header`` float64 numbers per rank. Collective."""

    @abstractmethod
    def begin(self, leaves: int) -> None:
        """Starts a step whose tree has ``leaves`` leaves."""

    @abstractmethod
    def staging(self, bucket: int, slot: int, turn: int | None = None) -> Tensor:
        """The flat tensor into which this rank writes its node number ``slot`` of a bucket.

        Args:
            slot: number of the node among this rank's.
            turn: of which staging memory, which stays the same over the run; by default the current step's.
        """

    @abstractmethod
    def start(self, bucket: int) -> None:
        """Marks this rank's nodes of a bucket as complete. Collective, in bucket order; does not wait."""

    @abstractmethod
    def finish(self, header: Tensor) -> Tensor:
        """Waits for all sums and exchanges the headers. Collective.

        Args:
            header: this rank's numbers, float64, shape (header,), on the device of the buckets.

        Returns:
            The headers of all ranks, shape (ranks, header).
        """

    @abstractmethod
    def total(self, bucket: int) -> Tensor:
        """The flat sum of a bucket after ``finish``. The same memory until ``renew``."""

    @abstractmethod
    def renew(self, bucket: int) -> None:
        """Gives other memory to ``total(bucket)`` and ``staging(bucket, ...)``, between steps; on any rank alone."""

    def release(self) -> None:
        """Releases process groups, at the end of the run."""
        drop_process_groups(self)
