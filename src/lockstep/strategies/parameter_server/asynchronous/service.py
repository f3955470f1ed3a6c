"""What a server does with messages: adds pushes up, answers pulls as far as the clock allows, and holds meetings.

    worker 1   push -> pull ........ values          push -> pull ... meet ......... met
    worker 2        push -> pull values                                   meet ..... met
    server     +1 push  +1 push: both make an update            +1 push          all are there

All runs in the server's one loop. An update is due when as many pushes have come as there are living workers, whichever
of them sent them, or when no more can come. Who asks while one is due gets the values after it, also where the messages
come before this server collects. Only a worker that the server awaits at a meeting gets the values as they are.
"""

from __future__ import annotations

import logging
import math
import queue
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.strategies.parameter_server.asynchronous.attendance import Attendance
from lockstep.strategies.parameter_server.asynchronous.clock import Clock
from lockstep.strategies.parameter_server.asynchronous.inbox import Inbox
from lockstep.strategies.parameter_server.asynchronous.ledger import Ledger
from lockstep.strategies.parameter_server.asynchronous.meeting import Meeting, require_same
from lockstep.strategies.parameter_server.asynchronous.pool import Pool
from lockstep.strategies.parameter_server.asynchronous.stop import Stop
from lockstep.strategies.parameter_server.asynchronous.wire import LOST, Message, Refused

logger = logging.getLogger(__name__)
_LAST_WORDS_SECONDS = 5.0


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
        self._inbox, self._servers, self._rank = inbox, servers, rank
        self._values = values
        self.ledger = Ledger(clock, new_pool)
        self._asking: list[int] = []
        self._arrived: dict[int, Message] = {}
        self._answers: dict[int, Message] = {}
        self._left: set[int] = set()
        self._gone: set[int] = set()
        self._attendance = Attendance()
        self._is_ending = False
        self.stop = Stop()
        self.bytes_sent = 0

    def collect(self) -> Pool:
        """Serves until an update is due, and gives what it is made of; maybe no push at all. See the module."""
        while not self._is_due:
            self._serve()
        return self.ledger.take()

    def publish(self, is_update: bool) -> None:
        """Gives the values to those that wait for them, and counts the update if one was made."""
        self.ledger.version += is_update
        self._answer()

    def request_stop(self, reason: int) -> None:
        """Lets all stop together, at a step that none has begun; the first request counts."""
        if reason:
            self.stop.adopt({"stop_at": self.ledger.clock.farthest + 2, "stop_reason": reason})

    def meet(self, label: str, value: Any, body: bytes | memoryview = b"") -> Meeting:
        """Waits for all living processes, and gives every one what each of them brought. All must call this.

        Args:
            label: what the meeting is about; it must be the same everywhere.
            value: must survive JSON.
            body: for the first server alone.
        """
        told = {"label": label, "number": self._attendance.begin(), "value": value}
        if self._rank != self._servers[0]:
            self._ask(self._servers[0], Message("meet", told, body))
            met = self._await_answer(self._servers[0])
            self._attendance.end()
            return Meeting(met.content["values"], met.content["living"])
        while self._expected() - self._arrived.keys():
            self._serve()
        arrived, self._arrived = self._arrived, {}
        self._attendance.end()
        for rank, message in arrived.items():
            require_same(rank, message.content, told)
        last = max(self._servers[-1], *self.ledger.clock.living, *arrived)
        values = [arrived[rank].content["value"] if rank in arrived else None for rank in range(last + 1)]
        values[self._rank] = value
        content = {"values": values, "living": self.ledger.clock.living, **self.stop.as_content()}
        for rank in arrived:
            self._inbox.send(rank, Message("met", content))
        return Meeting(values, self.ledger.clock.living, {rank: each.body for rank, each in arrived.items()})

    def fetch(self, server: int) -> Message:
        """The values of another server, while serving."""
        self._ask(server, Message("pull"))
        return self._await_answer(server)

    def farewell(self) -> None:
        """Serves until every worker has said goodbye or gone, then parts from the other servers."""
        self._is_ending = True
        self._attendance.begin()
        while set(self.ledger.clock.living) - self._left:
            self._serve()
        others = set(self._servers) - {self._rank}
        for rank in others:
            self._inbox.send(rank, Message("bye"))
        try:
            while others - self._left:
                self._serve(_LAST_WORDS_SECONDS)
        except queue.Empty:
            logger.debug("Servers %s did not say goodbye.", others - self._left)
        self._inbox.close()

    @property
    def _is_due(self) -> bool:
        self.ledger.require_workers()
        return self.ledger.is_full or self._attendance.all_wait(self.ledger.clock.living)

    def _expected(self) -> set[int]:
        """Who comes to a meeting."""
        return (set(self.ledger.clock.living) | set(self._servers)) - {self._rank} - self._left

    def _ask(self, rank: int, message: Message) -> None:
        self._answers.pop(rank, None)
        self._inbox.send(rank, message)

    def _await_answer(self, rank: int) -> Message:
        while rank not in self._answers:
            if rank in self._gone:
                raise _server_has_gone(rank)
            self._serve()
        return self._answers.pop(rank)

    def _serve(self, timeout: float | None = None) -> None:
        """Takes one message, and answers whom it lets go on."""
        self._take(*self._inbox.get(timeout))
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
        self.ledger.add(rank, message)
        self.stop.adopt(message.content)

    def _take_pull(self, rank: int, message: Message) -> None:
        self._asking.append(rank)

    def _take_meeting(self, rank: int, message: Message) -> None:
        if rank in self._expected():
            self._arrived[rank] = message
            self._attendance.come(rank, int(message.content["number"]))

    def _take_rest(self, rank: int, message: Message) -> None:
        self._attendance.come(rank, int(message.content["number"]))

    def _take_answer(self, rank: int, message: Message) -> None:
        if rank in self._servers:
            self._answers[rank] = message
            self.stop.adopt(message.content)

    def _take_tally(self, rank: int, message: Message) -> None:
        self.ledger.tally([float(number) for number in message.content["row"]])

    def _take_goodbye(self, rank: int, message: Message) -> None:
        self._left.add(rank)
        self._attendance.come(rank, math.inf)

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
        ready = [rank for rank in self._asking if self._may_have_values(rank)]
        if not ready:
            return
        self._asking = [rank for rank in self._asking if rank not in ready]
        body = self._values()
        for rank in ready:
            if self._inbox.send(
                rank, Message("values", {"version": self.ledger.version, **self.stop.as_content()}, body)
            ):
                self.bytes_sent += len(body)

    def _may_have_values(self, rank: int) -> bool:
        """Whether they are those that the rank needs; servers, which only show theirs, never wait for each other."""
        if rank in self._servers:
            return True
        waits_for_update = self.ledger.is_full and not self._attendance.is_awaited(rank)
        return self.ledger.clock.may_go_on(rank) and not waits_for_update

    def _lose(self, rank: int) -> None:
        """A process has gone: without a worker the others go on, without a server nobody can."""
        self._gone.add(rank)
        if rank in self._left:
            return
        if rank in self._servers:
            self._left.add(rank)
            if not self._is_ending:
                raise _server_has_gone(rank)
        self._arrived.pop(rank, None)
        self._asking = [other for other in self._asking if other != rank]
        self.ledger.lose(rank)


def _server_has_gone(rank: int) -> ConnectionError:
    return ConnectionResetError(f"{LOST}: the parameter server on rank {rank} has gone.")
