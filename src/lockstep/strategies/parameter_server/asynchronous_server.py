"""An asynchronous server: adds pushes up, answers pulls as far as the clock allows, and runs the barriers.

    worker 1   push -> pull ........ values          push -> pull ... barrier ...... released
    worker 2        push -> pull values                               barrier ...... released
    server     +1 push  +1 push: both make an update            +1 push          all have arrived

All messages are handled in one loop, by the thread that trains. An update is due when as many pushes have arrived as
there are living workers, whichever of them sent them, or when no more can arrive. A worker that pulls while an update
is due gets the values after it, even if its message arrives before this server collects. Only a worker that the server
waits for at a barrier gets the values as they are.
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
from lockstep.errors import NonFiniteError, RankError
from lockstep.numerics.precision import all_finite
from lockstep.numerics.running_buffers import RunningBuffers
from lockstep.strategies.parameter_server.asynchronous_staleness import (
    Barrier,
    BarrierTracker,
    Clock,
    Staleness,
    Stop,
    require_same,
)
from lockstep.strategies.parameter_server.asynchronous_transport import (
    ServerMessage,
    ServerTransport,
    from_bytes,
    server_ended,
)
from lockstep.strategies.parameter_server.asynchronous_worker import (
    get_values,
    require_one_backward,
    set_values,
)
from lockstep.strategies.parameter_server.shards import ParameterShards
from lockstep.strategies.strategy import Compute, StepResult

logger = logging.getLogger(__name__)
_SHUTDOWN_SECONDS = 5.0


class Server:
    """Holds values, and lets the training loop step the optimizer on the gradients that were pushed.

    Args:
        servers: ranks of all servers, including this one; the first of them runs the barriers.
        buffers: the model's running buffers; the first server's are averaged.
    """

    def __init__(
        self,
        transport: ServerTransport,
        servers: Sequence[int],
        rank: int,
        clock: Clock,
        shards: ParameterShards,
        buffers: RunningBuffers,
        step: int,
    ) -> None:
        self._transport, self._servers, self._rank = transport, servers, rank
        self._shards, self._buffers, self._step = shards, buffers, step
        self.clock, self._accumulator = clock, self._new_accumulator()
        self.version = 0
        """Updates so far."""
        self.lost: dict[int, int] = {}
        """Lost workers, and the update after which each was lost."""
        self.staleness = Staleness()
        self._counts: list[float] = []
        self._asking: list[int] = []
        self._stepped: set[int] = set()
        """Workers that have pushed, and wait for the values of their next step."""
        self._arrived: dict[int, ServerMessage] = {}
        self._answers: dict[int, ServerMessage] = {}
        self._left: set[int] = set()
        self._gone: set[int] = set()
        self.barriers = BarrierTracker()
        self._is_ending = self._has_collected = self._is_update = False
        self._loss = 0.0
        self.stop = Stop()
        self.bytes_sent = 0
        """Bytes of values that workers were sent after a step."""

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Waits for the pushes of one update, and sets their mean gradient on what is held here."""
        if self._has_collected:
            raise require_one_backward()
        self.request_stop(stop)
        compute.exchange()
        accumulator = self.collect()
        self._has_collected, self._is_update = True, accumulator.leaves > 0
        if self._is_update:
            # Workers check for themselves, on GPUs only every few steps, so what is not finite must not be used here.
            if not bool(accumulator.set_gradients()) or not math.isfinite(accumulator.loss):
                raise NonFiniteError(
                    f"Update {self.version + 1} was not made: a worker pushed a loss or gradient that is NaN or "
                    "infinite. Lower the learning rate, clip gradients, or run the job with strategy 'ddp', which "
                    "names the samples."
                )
            self._loss = accumulator.loss / accumulator.weight if accumulator.weight else self._loss
            if accumulator.statistics.numel():
                self._buffers.begin_step()
                self._buffers.finish_step(accumulator.statistics, accumulator.leaves, accumulator.counters)
        numbers = [self._loss, accumulator.loss, accumulator.weight]
        loss, total, weight = torch.tensor(numbers, dtype=torch.float64, device=self._shards.device)
        stops = torch.full((), self.stop.reason_after(self._step + 1), device=loss.device)
        return StepResult(loss, total.reshape(1), weight, stops, torch.ones_like(loss).bool())

    def after_step(self) -> None:
        """Sends the new values to the ranks that wait for them."""
        for parameter in self._shards.own.values():
            parameter.grad = None
        self.publish(self._is_update)
        self._step += self._has_collected
        self._has_collected = self._is_update = False

    def fetch(self) -> None:
        """Sets the model to the values of the other servers."""
        for server, rank in enumerate(self._servers):
            if server != self._shards.server:
                set_values(self._shards, self._buffers, server, self.pull_from(rank).body)

    def sum_counts(self, row: Tensor) -> Tensor:
        """The counts that workers have sent since the last call."""
        counts, self._counts = self._counts, []
        return torch.tensor(counts, dtype=row.dtype, device=row.device) if counts else torch.zeros_like(row)

    def metrics(self) -> dict[str, float]:
        """Staleness since the last call, and the workers that live if some were lost."""
        found = self.staleness.recent()
        return {**found, "workers": float(len(self.clock.living))} if self.lost else found

    def summary(self) -> dict[str, str]:
        """Staleness over the run, and which workers were lost."""
        stale = self.staleness
        text = (
            f"{stale.mean:.2f} updates on average, at most {stale.most}; the fastest worker was at most {stale.lead} "
            f"steps ahead (bound {self.clock.staleness} when it begins one)"
        )
        return {"staleness": text, **({"lost": self._losses_as_text()} if self.lost else {})}

    def collect(self) -> GradientAccumulator:
        """Serves until an update is due, and returns its pushes, which may be none. See the module."""
        while not self._is_due:
            self._serve()
        found, self._accumulator = self._accumulator, self._new_accumulator()
        self.staleness.add(self.version - version for version in found.versions)
        return found

    def publish(self, is_update: bool) -> None:
        """Sends the values to the ranks that wait for them, and counts the update if one was made."""
        self.version += is_update
        self._answer()

    def request_stop(self, reason: int) -> None:
        """Makes all ranks stop together, at a step that none has begun; the first request counts."""
        if reason:
            self.stop.adopt({"stop_at": self.clock.farthest + 2, "stop_reason": reason})

    def barrier(self, label: str, value: Any, body: bytes | memoryview = b"") -> Barrier:
        """Waits for all living processes and exchanges a value of each. Collective.

        Args:
            label: names the barrier; must be the same on every rank.
            value: must survive JSON.
            body: sent to the first server only.
        """
        sent = {"label": label, "number": self.barriers.begin(), "value": value}
        if self._rank != self._servers[0]:
            released = self._ask(self._servers[0], ServerMessage("barrier", sent, body))
            self.barriers.end()
            return Barrier(released.content["values"], released.content["living"])
        while self._expected() - self._arrived.keys():
            self._serve()
        arrived, self._arrived = self._arrived, {}
        self.barriers.end()
        for rank, message in arrived.items():
            require_same(rank, message.content, sent)
        last = max(self._servers[-1], *self.clock.living, *arrived)
        values = [arrived[rank].content["value"] if rank in arrived else None for rank in range(last + 1)]
        values[self._rank] = value
        content = {"values": values, "living": self.clock.living, **self.stop.as_content()}
        for rank in arrived:
            self._transport.send(rank, ServerMessage("released", content))
        return Barrier(values, self.clock.living, {rank: each.body for rank, each in arrived.items()})

    def pull_from(self, server: int) -> ServerMessage:
        """Pulls the values of another server, while serving."""
        return self._ask(server, ServerMessage("pull"))

    def shutdown(self) -> None:
        """Serves until every worker has disconnected or ended, then disconnects from the other servers."""
        self._is_ending = True
        self.barriers.begin()
        while set(self.clock.living) - self._left:
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
        if not self.clock.living:
            raise RankError(
                f"All workers of the parameter server have ended ({self._losses_as_text()}), so there are no "
                "gradients. Find out why they ended, then resume the run from its last checkpoint."
            )
        return self._is_full or self.barriers.all_wait(self.clock.living)

    @property
    def _is_full(self) -> bool:
        """True if as many pushes have arrived as there are living workers."""
        return self._accumulator.pushes >= len(self.clock.living)

    def _new_accumulator(self) -> GradientAccumulator:
        buffers = self._buffers
        counts = (buffers.numel, buffers.counters) if self._shards.server == 0 else (0, 0)
        return GradientAccumulator(self._shards, *counts, buffers.dtype)

    def _losses_as_text(self) -> str:
        return ", ".join(f"rank {rank} after update {update}" for rank, update in self.lost.items())

    def _expected(self) -> set[int]:
        """Ranks that take part in a barrier."""
        return (set(self.clock.living) | set(self._servers)) - {self._rank} - self._left

    def _ask(self, rank: int, message: ServerMessage) -> ServerMessage:
        self._answers.pop(rank, None)
        self._transport.send(rank, message)
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
        if rank not in self.clock.living:
            raise Refused("it is not a worker")
        self._accumulator.add(message)
        self._stepped.add(rank)
        self.staleness.lead = max(self.staleness.lead, self.clock.advance(rank))
        self.stop.adopt(message.content)

    def _on_pull(self, rank: int, message: ServerMessage) -> None:
        self._asking.append(rank)

    def _on_barrier(self, rank: int, message: ServerMessage) -> None:
        if rank in self._expected():
            self._arrived[rank] = message
            self.barriers.arrive(rank, int(message.content["number"]))

    def _on_at_barrier(self, rank: int, message: ServerMessage) -> None:
        self.barriers.arrive(rank, int(message.content["number"]))

    def _on_answer(self, rank: int, message: ServerMessage) -> None:
        if rank in self._servers:
            self._answers[rank] = message
            self.stop.adopt(message.content)

    def _on_counts(self, rank: int, message: ServerMessage) -> None:
        row = [float(number) for number in message.content["row"]]
        self._counts = [mine + new for mine, new in zip(self._counts or [0.0] * len(row), row, strict=True)]

    def _on_goodbye(self, rank: int, message: ServerMessage) -> None:
        self._left.add(rank)
        self.barriers.arrive(rank, math.inf)

    _KINDS: dict[str, Callable[[Server, int, ServerMessage], None]] = {  # noqa: RUF012  # a table, never changed
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
        body = get_values(self._shards, self._buffers)
        answer = ServerMessage("values", {"version": self.version, **self.stop.as_content()}, body)
        for rank in ready:
            if self._transport.send(rank, answer) and rank in self._stepped:
                self.bytes_sent += len(body)
                self._stepped.remove(rank)

    def _may_have_values(self, rank: int) -> bool:
        """Returns whether a rank may have the values now. Servers never wait for each other."""
        if rank in self._servers:
            return True
        waits_for_update = self._is_full and not self.barriers.is_awaited(rank)
        return self.clock.may_go_on(rank) and not waits_for_update

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
        if self.clock.lose(rank):
            self.lost[rank] = self.version
            logger.warning(
                "The worker on rank %d ended after update %d. Its samples are skipped until the next epoch, which is "
                "shared by the %d remaining workers.",
                *(rank, self.version, len(self.clock.living)),
            )


class GradientAccumulator:
    """Adds pushes: gradients weighted by samples, and on the first server the statistics of forward passes.

    Args:
        statistics: values of running buffers in a push; 0 on other servers.
        statistics_type: of those values.
    """

    def __init__(self, shards: ParameterShards, statistics: int, counters: int, statistics_type: torch.dtype) -> None:
        self._shards, self._statistics_type = shards, statistics_type
        self._numel = shards.numel(shards.server)
        self._total = torch.zeros(self._numel, dtype=shards.dtype, device=shards.device)
        self.statistics = torch.zeros(statistics, dtype=statistics_type, device=shards.device)
        """Sum over micro-batches."""
        self.counters = torch.zeros(counters, dtype=torch.int64, device=shards.device)
        self.pushes = self.leaves = 0
        """Pushes, and their micro-batches."""
        self.weight = self.loss = 0.0
        self.versions: list[int] = []
        """The version of the values that each gradient was computed on."""
        self._used: set[str] = set()

    def add(self, push: ServerMessage) -> None:
        """Adds a push. Raises ``Refused`` where a worker of this model would not send it."""
        content = _checked(push.content)
        gradient_bytes = self._numel * self._shards.dtype.itemsize
        size = gradient_bytes + self.statistics.numel() * self._statistics_type.itemsize
        if len(push.body) != (size if content["leaves"] else 0):
            raise Refused(f"the push has {len(push.body)} bytes, expected {size}")
        if self.statistics.numel() and len(content["counters"]) != self.counters.numel():
            raise Refused(f"the push counts {len(content['counters'])} buffers, expected {self.counters.numel()}")
        self.pushes += 1
        if not content["leaves"]:
            return
        body, device = memoryview(push.body), self._shards.device
        gradients = from_bytes(body[:gradient_bytes], self._shards.dtype, device)
        self._total.add_(gradients, alpha=content["weight"])
        self.statistics.add_(from_bytes(body[gradient_bytes:], self._statistics_type, device))
        if self.statistics.numel():
            self.counters.add_(torch.tensor(content["counters"], device=device))
        self.leaves, self.weight = self.leaves + content["leaves"], self.weight + content["weight"]
        self.loss += content["loss"]
        self.versions.append(content["version"])
        self._used |= self._shards.own.keys() - set(content["unused"])

    def set_gradients(self) -> Tensor:
        """Sets the mean gradient of this server's parameters; returns whether it is finite, 0-dim bool."""
        if self.weight:
            self._total.div_(self.weight)
        for name, gradient in self._shards.views(self._total).items():
            self._shards.own[name].grad = gradient if name in self._used else None
        return all_finite([self._total], self._total.device)


def _checked(content: dict[str, Any]) -> dict[str, Any]:
    kinds = {"leaves": int, "version": int, "weight": float, "loss": float, "unused": list, "counters": list}
    wrong = [name for name, kind in kinds.items() if not isinstance(content.get(name), kind)]
    if wrong or not 0.0 <= content["weight"] < math.inf or content["leaves"] < 0:
        raise Refused(f"the push has a wrong or missing field: {', '.join(wrong) or 'weight or leaves'}")
    if not all(isinstance(count, int) for count in content["counters"]):
        raise Refused("the push has counters that are not integers")
    return content
