"""What a server does with messages: adds pushes up, answers pulls as far as the clock allows, and holds meetings.

    worker 1   push -> pull ........ values          push -> pull ... meet ......... met
    worker 2        push -> pull values                                   meet ..... met
    server     +1 push  +1 push: both make an update            +1 push          all are there

All runs in the server's one loop. An update is due when as many pushes have come as there are living workers, whichever
of them sent them, or when no more can come.
"""

from __future__ import annotations

import logging
import math
import queue
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.errors import RankError
from lockstep.strategies.parameter_server.asynchronous.clock import Clock
from lockstep.strategies.parameter_server.asynchronous.inbox import Inbox
from lockstep.strategies.parameter_server.asynchronous.meeting import Meeting, require_same
from lockstep.strategies.parameter_server.asynchronous.pool import Pool
from lockstep.strategies.parameter_server.asynchronous.staleness import Staleness
from lockstep.strategies.parameter_server.asynchronous.stop import Stop
from lockstep.strategies.parameter_server.asynchronous.wire import LOST, Message, Refused

logger = logging.getLogger(__name__)
_LAST_WORDS_SECONDS = 5.0
_LOST_WORKER = (
    "The worker on rank %d has gone after update %d. Its samples are left out until the next epoch, which the %d "
    "others share."
)


class Service:
    """A server's loop.

    Args:
        inbox: connected with all workers and servers.
        servers: the ranks of all servers, this one's among them; the first of them holds the meetings.
        rank: this server's.
        clock: of the workers.
        new_pool: makes an empty pool.
        values: gives the body of an answer to a pull.
    """

    def __init__(
        self,
        inbox: Inbox,
        servers: Sequence[int],
        rank: int,
        clock: Clock,
        new_pool: Callable[[], Pool],
        values: Callable[[], bytes],
    ) -> None:
        self._inbox, self._servers, self._rank, self.clock = inbox, servers, rank, clock
        self._new_pool, self._values = new_pool, values
        self._pool = new_pool()
        self._asking: list[int] = []
        self._arrived: dict[int, Message] = {}
        self._answers: dict[int, Message] = {}
        self._left: set[int] = set()
        self._held = 0
        self._is_collecting = self._is_ending = False
        self.version = 0
        """Updates so far."""
        self.stop = Stop()
        self.lost: dict[int, int] = {}
        """Workers that have gone, and the update at which they did."""
        self.staleness = Staleness()
        self.tallied: list[float] = []
        """Sum of the counts that workers sent since it was emptied."""
        self.bytes_sent = 0

    def collect(self) -> Pool:
        """Serves until an update is due, and gives what it is made of; maybe no push at all. See the module."""
        self._is_collecting = True
        while not self._is_due:
            self._serve()
        self._is_collecting = False
        found, self._pool = self._pool, self._new_pool()
        self.staleness.add(self.version - version for version in found.versions)
        return found

    def publish(self, is_update: bool) -> None:
        """Gives the values to those that wait for them, and counts the update if one was made."""
        self.version += is_update
        self._answer()

    def request_stop(self, reason: int) -> None:
        """Lets all stop together, at a step that none has begun; the first request counts."""
        if reason:
            self.stop.adopt({"stop_at": self.clock.farthest + 2, "stop_reason": reason})

    def meet(self, label: str, value: Any, body: bytes | memoryview = b"") -> Meeting:
        """Waits for all living processes, and gives every one what each of them brought. All must call this.

        Args:
            label: what the meeting is about; it must be the same everywhere.
            value: must survive JSON.
            body: for the first server alone.
        """
        told = {"label": label, "number": self._held + 1, "value": value}
        if self._rank != self._servers[0]:
            self._ask(self._servers[0], Message("meet", told, body))
            met = self._await_answer(self._servers[0])
            self._held += 1
            return Meeting(met.content["values"], met.content["living"])
        while self._expected() - self._arrived.keys():
            self._serve()
        arrived, self._arrived, self._held = self._arrived, {}, self._held + 1
        for rank, message in arrived.items():
            require_same(rank, message.content, told)
        last = max(self._servers[-1], *self.clock.living, *arrived)
        values = [arrived[rank].content["value"] if rank in arrived else None for rank in range(last + 1)]
        values[self._rank] = value
        content = {"values": values, "living": self.clock.living, **self.stop.as_content()}
        for rank in arrived:
            self._inbox.send(rank, Message("met", content))
        return Meeting(values, self.clock.living, {rank: each.body for rank, each in arrived.items()})

    def fetch(self, server: int) -> Message:
        """The values of another server, while serving."""
        self._ask(server, Message("pull"))
        return self._await_answer(server)

    def farewell(self) -> None:
        """Serves until every worker has said goodbye or gone, then parts from the other servers."""
        self._is_ending = True
        while set(self.clock.living) - self._left:
            self._serve()
        others = set(self._servers) - {self._rank}
        for rank in others:
            self._inbox.send(rank, Message("bye"))
        try:
            while others - self._left:
                self._take(*self._inbox.get(_LAST_WORDS_SECONDS))
        except queue.Empty:
            logger.debug("Servers %s did not say goodbye.", others - self._left)
        self._inbox.close()

    @property
    def _is_due(self) -> bool:
        if not self.clock.living:
            raise RankError(
                f"All workers of the parameter server have gone ({_losses(self.lost)}), so nobody computes gradients. "
                "Look at why they ended; the run can be resumed from its last checkpoint."
            )
        return self._pool.pushes >= len(self.clock.living) or self.clock.all_rest(self._held)

    def _expected(self) -> set[int]:
        """Who comes to a meeting."""
        return (set(self.clock.living) | set(self._servers)) - {self._rank} - self._left

    def _ask(self, rank: int, message: Message) -> None:
        self._answers.pop(rank, None)
        self._inbox.send(rank, message)

    def _await_answer(self, rank: int) -> Message:
        while rank not in self._answers:
            self._serve()
        return self._answers.pop(rank)

    def _serve(self) -> None:
        """Takes one message, and answers whom it lets go on."""
        self._take(*self._inbox.get())
        if not (self._is_collecting and self.clock.living and self._is_due):
            self._answer()

    def _take(self, rank: int, message: Message | None) -> None:
        if message is None:
            self._lose(rank)
            return
        try:
            self._KINDS[message.kind](self, rank, message)
        except (KeyError, TypeError, ValueError, Refused) as error:
            logger.warning("Rank %d is cut off from the parameter server: %s.", rank, error)
            self._inbox.cut(rank)

    def _take_push(self, rank: int, message: Message) -> None:
        if rank not in self.clock.living:
            raise Refused("it is no worker")
        self._pool.add(message)
        self.staleness.add_lead(self.clock.advance(rank))
        self.stop.adopt(message.content)

    def _take_pull(self, rank: int, message: Message) -> None:
        self._asking.append(rank)

    def _take_meeting(self, rank: int, message: Message) -> None:
        if rank in self._expected():
            self._arrived[rank] = message
            self.clock.rest(rank, int(message.content["number"]))

    def _take_rest(self, rank: int, message: Message) -> None:
        self.clock.rest(rank, int(message.content["number"]))

    def _take_answer(self, rank: int, message: Message) -> None:
        if rank in self._servers:
            self._answers[rank] = message
            self.stop.adopt(message.content)

    def _take_tally(self, rank: int, message: Message) -> None:
        row = [float(number) for number in message.content["row"]]
        former = self.tallied or [0.0] * len(row)
        self.tallied = [mine + theirs for mine, theirs in zip(former, row, strict=True)]

    def _take_goodbye(self, rank: int, message: Message) -> None:
        self._left.add(rank)
        self.clock.rest(rank, math.inf)

    _KINDS: dict[str, Callable[[Service, int, Message], None]] = {  # noqa: RUF012  # a table, never changed
        "push": _take_push,
        "pull": _take_pull,
        "meet": _take_meeting,
        "met": _take_answer,
        "values": _take_answer,
        "rest": _take_rest,
        "tally": _take_tally,
        "bye": _take_goodbye,
    }

    def _answer(self) -> None:
        """Gives the values to all that ask and may go on."""
        ready = [rank for rank in self._asking if self.clock.may_go_on(rank)]
        if not ready:
            return
        self._asking = [rank for rank in self._asking if rank not in ready]
        body = self._values()
        for rank in ready:
            if self._inbox.send(
                rank, Message("values", {"version": self.version, **self.stop.as_content()}, body)
            ):
                self.bytes_sent += len(body)

    def _lose(self, rank: int) -> None:
        """A process has gone: without a worker the others go on, without a server nobody can."""
        if rank in self._left:
            return
        if rank in self._servers:
            self._left.add(rank)
            if not self._is_ending:
                raise ConnectionResetError(f"{LOST}: the parameter server on rank {rank} has gone.")
        self._arrived.pop(rank, None)
        self._asking = [other for other in self._asking if other != rank]
        if self.clock.lose(rank):
            self.lost[rank] = self.version
            logger.warning(_LOST_WORKER, rank, self.version, len(self.clock.living))


def _losses(lost: dict[int, int]) -> str:
    return ", ".join(f"rank {rank} after update {update}" for rank, update in lost.items())
