"""What workers have pushed to a server, how far each of them is, and which of them have gone."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lockstep.errors import RankError
from lockstep.strategies.parameter_server.asynchronous.clock import Clock
from lockstep.strategies.parameter_server.asynchronous.pool import Pool
from lockstep.strategies.parameter_server.asynchronous.staleness import Staleness
from lockstep.strategies.parameter_server.asynchronous.wire import Message, Refused

logger = logging.getLogger(__name__)
_LOST_WORKER = (
    "The worker on rank %d has gone after update %d. Its samples are left out until the next epoch, which the %d "
    "others share."
)


class Ledger:
    """Everything that a server counts.

    Args:
        clock: of the workers.
        new_pool: makes an empty pool.
    """

    def __init__(self, clock: Clock, new_pool: Callable[[], Pool]) -> None:
        self.clock, self._new_pool = clock, new_pool
        self._pool = new_pool()
        self.version = 0
        """Updates so far."""
        self.lost: dict[int, int] = {}
        """Workers that have gone, and the update at which they did."""
        self.staleness = Staleness()
        self.tallied: list[float] = []
        """Sum of the counts that workers sent since it was emptied."""

    @property
    def is_full(self) -> bool:
        """Whether as many pushes have come as there are living workers."""
        return self._pool.pushes >= len(self.clock.living)

    def add(self, rank: int, push: Message) -> None:
        """Takes a push. Raises ``Refused`` where a worker of this run would not send it."""
        if rank not in self.clock.living:
            raise Refused("it is no worker")
        self._pool.add(push)
        self.staleness.add_lead(self.clock.advance(rank))

    def take(self) -> Pool:
        """What was pushed since the last call."""
        found, self._pool = self._pool, self._new_pool()
        self.staleness.add(self.version - version for version in found.versions)
        return found

    def tally(self, row: list[float]) -> None:
        """Adds up counts that workers send."""
        former = self.tallied or [0.0] * len(row)
        self.tallied = [mine + theirs for mine, theirs in zip(former, row, strict=True)]

    def lose(self, rank: int) -> None:
        """A process has gone; if it was a worker, nobody waits for it any more."""
        if self.clock.lose(rank):
            self.lost[rank] = self.version
            logger.warning(_LOST_WORKER, rank, self.version, len(self.clock.living))

    def require_workers(self) -> None:
        """Raises ``RankError`` where none is left."""
        if not self.clock.living:
            lost = ", ".join(f"rank {rank} after update {update}" for rank, update in self.lost.items())
            raise RankError(
                f"All workers of the parameter server have gone ({lost}), so nobody computes gradients. "
                "Look at why they ended; the run can be resumed from its last checkpoint."
            )
