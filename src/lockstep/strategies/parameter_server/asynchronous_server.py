"""An asynchronous server: adds pushes up, answers pulls as far as the clock allows, and runs the barriers.

    worker 1   push -> pull ........ values          push -> pull ... barrier ...... released
    worker 2        push -> pull values                               barrier ...... released
    server     +1 push  +1 push: both make an update            +1 push          all have arrived

``Service`` handles all messages in one loop. An update is due when as many pushes have arrived as there are living
workers, whichever of them sent them, or when no more can arrive. A worker that pulls while an update is due gets the
values after it, even if its message arrives before this server collects. Only a worker that the server waits for at a
barrier gets the values as they are. ``Server`` is the participant that the training loop drives.
"""

from __future__ import annotations

import logging
import math
import queue
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.data.batch import Batch
from lockstep.distributed.authentication import Refused
from lockstep.errors import NonFiniteError
from lockstep.numerics.running_buffers import RunningBuffers
from lockstep.strategies.parameter_server.asynchronous_participant import (
    Barrier,
    BarrierTracker,
    Participant,
    Stop,
    require_same,
)
from lockstep.strategies.parameter_server.asynchronous_staleness import (
    Clock,
    GradientAccumulator,
    ServerState,
)
from lockstep.strategies.parameter_server.asynchronous_transport import (
    ModelBuffers,
    ServerMessage,
    ServerTransport,
    server_ended,
)
from lockstep.strategies.parameter_server.asynchronous_worker import require_one_backward, set_values
from lockstep.strategies.parameter_server.shards import ParameterShards
from lockstep.strategies.strategy import Compute, StepResult

logger = logging.getLogger(__name__)
_SHUTDOWN_SECONDS = 5.0


class Service:
    """The message loop of a server.

    Args:
        transport: connected with all workers and servers.
        servers: ranks of all servers, including this one; the first of them runs the barriers.
        rank: this server's.
        clock: of the workers.
        new_accumulator: makes an empty one.
        values: returns the body of an answer to a pull.
    """

    def __init__(
        self,
        transport: ServerTransport,
        servers: Sequence[int],
        rank: int,
        clock: Clock,
        new_accumulator: Callable[[], GradientAccumulator],
        values: Callable[[], bytes],
    ) -> None:
        self._transport, self._servers, self._rank = transport, servers, rank
        self._values = values
        self.state = ServerState(clock, new_accumulator)
        self._asking: list[int] = []
        self._arrived: dict[int, ServerMessage] = {}
        self._answers: dict[int, ServerMessage] = {}
        self._left: set[int] = set()
        self._gone: set[int] = set()
        self._barriers = BarrierTracker()
        self._is_ending = False
        self.stop = Stop()
        self.bytes_sent = 0

    def collect(self) -> GradientAccumulator:
        """Serves until an update is due, and returns its pushes, which may be none. See the module."""
        while not self._is_due:
            self._serve()
        return self.state.take()

    def publish(self, is_update: bool) -> None:
        """Sends the values to the ranks that wait for them, and counts the update if one was made."""
        self.state.version += is_update
        self._answer()

    def request_stop(self, reason: int) -> None:
        """Makes all ranks stop together, at a step that none has begun; the first request counts."""
        if reason:
            self.stop.adopt({"stop_at": self.state.clock.farthest + 2, "stop_reason": reason})

    def barrier(self, label: str, value: Any, body: bytes | memoryview = b"") -> Barrier:
        """Waits for all living processes and exchanges a value of each. Collective.

        Args:
            label: names the barrier; must be the same on every rank.
            value: must survive JSON.
            body: sent to the first server only.
        """
        sent = {"label": label, "number": self._barriers.begin(), "value": value}
        if self._rank != self._servers[0]:
            self._ask(self._servers[0], ServerMessage("barrier", sent, body))
            released = self._await_answer(self._servers[0])
            self._barriers.end()
            return Barrier(released.content["values"], released.content["living"])
        while self._expected() - self._arrived.keys():
            self._serve()
        arrived, self._arrived = self._arrived, {}
        self._barriers.end()
        for rank, message in arrived.items():
            require_same(rank, message.content, sent)
        last = max(self._servers[-1], *self.state.clock.living, *arrived)
        values = [arrived[rank].content["value"] if rank in arrived else None for rank in range(last + 1)]
        values[self._rank] = value
        content = {"values": values, "living": self.state.clock.living, **self.stop.as_content()}
        for rank in arrived:
            self._transport.send(rank, ServerMessage("released", content))
        return Barrier(values, self.state.clock.living, {rank: each.body for rank, each in arrived.items()})

    def fetch(self, server: int) -> ServerMessage:
        """Pulls the values of another server, while serving."""
        self._ask(server, ServerMessage("pull"))
        return self._await_answer(server)

    def shutdown(self) -> None:
        """Serves until every worker has disconnected or ended, then disconnects from the other servers."""
        self._is_ending = True
        self._barriers.begin()
        while set(self.state.clock.living) - self._left:
            self._serve()
        others = set(self._servers) - {self._rank}
        for rank in others:
            self._transport.send(rank, ServerMessage("bye"))
        try:
            while others - self._left:
                self._serve(_SHUTDOWN_SECONDS)
        except queue.Empty:
            logger.debug("Servers %s did not disconnect in time.", others - self._left)
        self._transport.close()

    @property
    def _is_due(self) -> bool:
        self.state.require_workers()
        return self.state.is_full or self._barriers.all_wait(self.state.clock.living)

    def _expected(self) -> set[int]:
        """Ranks that take part in a barrier."""
        return (set(self.state.clock.living) | set(self._servers)) - {self._rank} - self._left

    def _ask(self, rank: int, message: ServerMessage) -> None:
        self._answers.pop(rank, None)
        self._transport.send(rank, message)

    def _await_answer(self, rank: int) -> ServerMessage:
        while rank not in self._answers:
            if rank in self._gone:
                raise server_ended(rank)
            self._serve()
        return self._answers.pop(rank)

    def _serve(self, timeout: float | None = None) -> None:
        """Handles one message, and answers the ranks that may now continue."""
        self._take(*self._transport.get(timeout))
        self._answer()

    def _take(self, rank: int, message: ServerMessage | None) -> None:
        if message is None:
            self._lose(rank)
            return
        try:
            self._KINDS[message.kind](self, rank, message)
        except (KeyError, TypeError, ValueError, Refused) as error:
            logger.warning("Disconnected rank %d from the parameter server: %s.", rank, error)
            self._transport.cut(rank)

    def _on_push(self, rank: int, message: ServerMessage) -> None:
        self.state.add(rank, message)
        self.stop.adopt(message.content)

    def _on_pull(self, rank: int, message: ServerMessage) -> None:
        self._asking.append(rank)

    def _on_barrier(self, rank: int, message: ServerMessage) -> None:
        if rank in self._expected():
            self._arrived[rank] = message
            self._barriers.arrive(rank, int(message.content["number"]))

    def _on_at_barrier(self, rank: int, message: ServerMessage) -> None:
        self._barriers.arrive(rank, int(message.content["number"]))

    def _on_answer(self, rank: int, message: ServerMessage) -> None:
        if rank in self._servers:
            self._answers[rank] = message
            self.stop.adopt(message.content)

    def _on_counts(self, rank: int, message: ServerMessage) -> None:
        self.state.sum_counts([float(number) for number in message.content["row"]])

    def _on_goodbye(self, rank: int, message: ServerMessage) -> None:
        self._left.add(rank)
        self._barriers.arrive(rank, math.inf)

    _KINDS: dict[str, Callable[[Service, int, ServerMessage], None]] = {  # noqa: RUF012  # a table, never changed
        "push": _on_push,
        "pull": _on_pull,
        "barrier": _on_barrier,
        "released": _on_answer,
        "values": _on_answer,
        "at_barrier": _on_at_barrier,
        "sum_counts": _on_counts,
        "bye": _on_goodbye,
    }

    def _answer(self) -> None:
        """Sends the values to all ranks that asked and may continue."""
        ready = [rank for rank in self._asking if self._may_have_values(rank)]
        if not ready:
            return
        self._asking = [rank for rank in self._asking if rank not in ready]
        body = self._values()
        for rank in ready:
            if self._transport.send(
                rank, ServerMessage("values", {"version": self.state.version, **self.stop.as_content()}, body)
            ):
                self.bytes_sent += len(body)

    def _may_have_values(self, rank: int) -> bool:
        """Returns whether a rank may have the values now. Servers never wait for each other."""
        if rank in self._servers:
            return True
        waits_for_update = self.state.is_full and not self._barriers.is_awaited(rank)
        return self.state.clock.may_go_on(rank) and not waits_for_update

    def _lose(self, rank: int) -> None:
        """Handles the end of a process: a run survives the loss of a worker, not of a server."""
        self._gone.add(rank)
        if rank in self._left:
            return
        if rank in self._servers:
            self._left.add(rank)
            if not self._is_ending:
                raise server_ended(rank)
        self._arrived.pop(rank, None)
        self._asking = [other for other in self._asking if other != rank]
        self.state.lose(rank)


class Server(Participant):
    """Holds values, and lets the loop step the optimizer on the gradients that were pushed."""

    def __init__(
        self,
        service: Service,
        servers: Sequence[int],
        shards: ParameterShards,
        buffers: RunningBuffers,
        sent: ModelBuffers,
        step: int,
        bound: int,
    ) -> None:
        self._service, self._state, self._servers, self._shards = service, service.state, servers, shards
        self._buffers, self._sent, self._step, self._bound = buffers, sent, step, bound
        self._loss = 0.0
        self._has_collected = self._is_update = False

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Waits for the pushes of one update, and sets their mean gradient on what is held here."""
        if self._has_collected:
            raise require_one_backward()
        service = self._service
        service.request_stop(stop)
        accumulator = service.collect()
        self._has_collected, self._is_update = True, accumulator.leaves > 0
        if self._is_update:
            self._require_finite(accumulator.set_gradients(), accumulator.loss)
            self._loss = accumulator.loss / accumulator.weight if accumulator.weight else self._loss
            if accumulator.statistics.numel():
                self._buffers.begin_step()
                self._buffers.finish_step(accumulator.statistics, accumulator.leaves, accumulator.counters)
        loss = torch.tensor(self._loss, dtype=torch.float64, device=self._shards.device)
        stops = torch.tensor(service.stop.reason_after(self._step + 1))
        return StepResult(loss, loss.reshape(1), stops, torch.ones((), dtype=torch.bool, device=loss.device))

    def _require_finite(self, gradient: Tensor, loss: float) -> None:
        """Workers check for themselves, on GPUs only every few steps, so the server must not use what is not finite."""
        if not bool(gradient) or not math.isfinite(loss):
            raise NonFiniteError(
                f"Update {self._state.version + 1} was not made: a worker pushed a loss or gradient that is NaN or "
                "infinite. Lower the learning rate, clip gradients, or run the job with strategy 'ddp', which "
                "names the samples."
            )

    def after_step(self) -> None:
        """Sends the new values to the ranks that wait for them."""
        for parameter in self._shards.own.values():
            parameter.grad = None
        self._service.publish(self._is_update)
        self._step += self._has_collected
        self._has_collected = self._is_update = False

    def barrier(self, label: str, value: Any, body: bytes | memoryview = b"") -> Barrier:
        """See ``Participant.barrier``."""
        return self._service.barrier(label, value, body)

    def fetch(self) -> None:
        """Sets the model to the values of the other servers."""
        for server, rank in enumerate(self._servers):
            if server != self._shards.server:
                set_values(self._shards, self._sent, server, self._service.fetch(rank).body)

    def sum_counts(self, row: Tensor) -> Tensor:
        """The counts that workers have sent since the last call."""
        counts, self._state.counts = self._state.counts, []
        return torch.tensor(counts, dtype=row.dtype, device=row.device) if counts else torch.zeros_like(row)

    def shutdown(self) -> None:
        """Serves until all workers have disconnected."""
        self._service.shutdown()

    def metrics(self) -> dict[str, float]:
        """Staleness since the last call, and the workers that live if some were lost."""
        found = self._state.staleness.recent()
        return {**found, "workers": float(len(self._state.clock.living))} if self._state.lost else found

    def summary(self) -> dict[str, str]:
        """Staleness over the run, and which workers were lost."""
        stale, lost = self._state.staleness, self._state.lost
        text = (
            f"{stale.mean:.2f} updates on average, at most {stale.most}; the fastest worker was at most {stale.lead} "
            f"steps ahead (bound {self._bound} when it begins one)"
        )
        gone = ", ".join(f"rank {rank} after update {update}" for rank, update in lost.items())
        return {"staleness": text, **({"lost": gone} if lost else {})}

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]  # counted by the service
        """Bytes of values."""
        return self._service.bytes_sent
