"""An asynchronous worker: computes its micro-batches of a step, pushes their gradient, and pulls the values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lockstep.core.summation_tree import sum_of_squares
from lockstep.data.batch import Batch
from lockstep.distributed.authentication import Refused
from lockstep.errors import ConfigError
from lockstep.numerics.running_buffers import RunningBuffers
from lockstep.runtime.events import StepEvents
from lockstep.strategies.gradients import GradientTree
from lockstep.strategies.parameter_server.asynchronous_staleness import Barrier, Stop
from lockstep.strategies.parameter_server.asynchronous_transport import (
    ServerMessage,
    TransportSettings,
    as_bytes,
    connect,
    from_bytes,
    server_ended,
)
from lockstep.strategies.parameter_server.shards import ParameterShards
from lockstep.strategies.strategy import Compute, StepResult


def get_values(shards: ParameterShards, buffers: RunningBuffers) -> bytes:
    """The body of a server's answer to a pull: its values, on the first server the running buffers too."""
    sent = buffers.tensors() if shards.server == 0 else []
    return b"".join(map(as_bytes, [shards.flat(shards.server, shards.parameters), *sent]))


def set_values(shards: ParameterShards, buffers: RunningBuffers, server: int, body: Any) -> None:
    """Sets the model to a server's answer to a pull."""
    size = shards.numel(server) * shards.dtype.itemsize
    view = memoryview(body)
    shards.set_values(server, from_bytes(view[:size], shards.dtype, shards.device))
    for tensor in buffers.tensors() if server == 0 else []:
        part, size = view[size : size + tensor.nbytes], size + tensor.nbytes
        tensor.copy_(from_bytes(bytearray(part), tensor.dtype, tensor.device))


class Worker:
    """Computes gradients on the values it pulled last, connected with all servers; asks and waits, without threads.

    Args:
        addresses: host and port of the servers, by rank; the first one keeps the clock and the running buffers.
    """

    def __init__(
        self,
        settings: TransportSettings,
        addresses: Mapping[int, tuple[str, int]],
        shards: ParameterShards,
        buffers: RunningBuffers,
        step: int,
        events: StepEvents,
    ) -> None:
        self._shards, self._parameters, self._buffers = shards, shards.parameters, buffers
        self._buffer_bytes = sum(tensor.nbytes for tensor in buffers.tensors())
        self._servers = list(addresses)
        self._channels = [connect(address, settings) for address in addresses.values()]
        self._tree = GradientTree(self._parameters, None)
        self._step, self._version, self._barriers = step, 0, 0
        self._events = events
        self.bytes_sent = 0
        """Bytes of gradients that were sent."""
        self._stop = Stop()
        self._report: dict[str, Any] | None = None
        self._statistics = torch.empty(0)
        self._loss = 0.0
        buffers.begin_step()

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Sets the mean gradient of this worker's part on the parameters; ``after_step`` pushes it."""
        if self._report is not None:
            raise require_one_backward()
        losses = torch.zeros(batch.plan.leaves, dtype=torch.float64, device=self._shards.device)
        weights, statistics = torch.zeros_like(losses), self._buffers.new_rows(1)[0]
        advanced = torch.zeros(self._buffers.counters, dtype=torch.int64, device=self._buffers.device)
        self._buffers.begin_step()
        self._buffers.remember_others()
        self._tree.begin(0, len(batch.micro_batches), len(batch.micro_batches))
        for micro_batch in batch.micro_batches:
            self._buffers.begin_micro_batch()
            loss, weight = compute(micro_batch)
            if self._buffers.numel:
                values, used = self._buffers.take()
                statistics, advanced = statistics.add_(values), advanced.add_(used)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own stub
            self._tree.end_micro_batch()
            losses[micro_batch.k], weights[micro_batch.k] = loss.detach(), weight
            for call in self._events.micro_batch_end:
                call(micro_batch)
        finite = self._finish(batch, losses, weights.sum(), advanced)
        self._statistics = statistics
        self._buffers.refuse_changed_others()
        mean = torch.tensor(self._loss, dtype=torch.float64, device=losses.device)
        stops = torch.full((), self._stop.reason_after(self._step + 1), device=losses.device)
        return StepResult(mean, losses, weights.sum(), stops, losses.sum().isfinite() & finite)

    def after_step(self) -> None:
        """Pushes and pulls; waits if it is too far ahead."""
        if self._report is None:
            return
        self._push(self._report)
        for parameter in self._parameters.values():
            parameter.grad = None
        self._report, self._step = None, self._step + 1
        self.fetch()

    def barrier(self, label: str, value: Any, body: bytes | memoryview = b"") -> Barrier:
        """See ``Server.barrier``."""
        if self._report is not None:
            raise ConfigError(
                "A rank of an asynchronous parameter server reached a barrier, for example to evaluate or to save, "
                "between run.backward and optimizer.step(). Call optimizer.step() first."
            )
        self._barriers += 1
        for server in range(1, len(self._servers)):
            self._send(server, ServerMessage("at_barrier", {"number": self._barriers}))
        sent = {"label": label, "number": self._barriers, "value": value}
        released = self._ask(0, ServerMessage("barrier", sent, body))
        return Barrier(released.content["values"], released.content["living"])

    def fetch(self) -> None:
        """Pulls the servers' values into the model; waits while this worker is too far ahead."""
        for server in range(len(self._servers)):
            values = self._ask(server, ServerMessage("pull"))
            if server == 0:
                self._version = int(values.content["version"])
            set_values(self._shards, self._buffers, server, values.body)

    def sum_counts(self, row: Tensor) -> Tensor:
        """Sends the row; the first server adds them up."""
        self._send(0, ServerMessage("sum_counts", {"row": row.tolist()}))
        return row

    def shutdown(self) -> None:
        """Disconnects from all servers."""
        for channel in self._channels:
            with suppress(OSError):  # the server may have ended
                channel.send(ServerMessage("bye"))
            channel.connection.close()

    def gradients(self) -> Iterable[Tensor]:
        """The mean gradient of this worker's part."""
        return [p.grad for p in self._parameters.values() if p.grad is not None]

    def squares(self) -> Tensor:
        """Of the mean gradient of this worker's part."""
        zero = torch.zeros((), dtype=torch.float64, device=self._shards.device)
        gradients = [parameter.grad for _, parameter in sorted(self._parameters.items())]
        return torch.stack([zero if g is None else sum_of_squares(g).to(zero.device) for g in gradients])

    def _push(self, report: Mapping[str, Any]) -> None:
        """Sends each server its part of the gradients, and the first one the statistics of running buffers."""
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self._parameters.items()}
        content = {**report, "version": self._version, **self._stop.as_content()}
        for server in range(len(self._servers)):
            body = b""
            if report["leaves"]:
                body = bytes(as_bytes(self._shards.flat(server, gradients)))
                body += bytes(as_bytes(self._statistics)) if server == 0 else b""
            self._send(server, ServerMessage("push", content, body))
            self.bytes_sent += len(body)

    def _ask(self, server: int, message: ServerMessage) -> ServerMessage:
        self._send(server, message)
        largest = self._shards.numel(server) * self._shards.dtype.itemsize + self._buffer_bytes
        try:
            answer = self._channels[server].receive(largest)
        except (OSError, Refused) as error:
            raise server_ended(self._servers[server]) from error
        self._stop.adopt(answer.content)
        return answer

    def _send(self, server: int, message: ServerMessage) -> None:
        try:
            self._channels[server].send(message)
        except OSError as error:
            raise server_ended(self._servers[server]) from error

    def _finish(self, batch: Batch, losses: Tensor, weight: Tensor, advanced: Tensor) -> Tensor:
        """Divides the sums and makes the report for the servers; returns whether all gradients are finite."""
        used, count = self._tree.used(), len(batch.micro_batches)
        total = float(weight)
        if count and total:
            self._loss = float(losses.sum()) / total
        finite = torch.ones((), dtype=torch.bool, device=weight.device)
        if count:
            finite = self._tree.finish(used, weight.clamp(min=1e-30).float())
        self._report = {
            "leaves": count,
            "weight": total,
            "loss": float(losses.sum()),
            "unused": [name for name, times in zip(self._parameters, used) if not times],
            "counters": advanced.tolist(),
        }
        return finite


def require_one_backward() -> ConfigError:
    """The refusal of a second backward pass before the step."""
    return ConfigError(
        "run.backward was called twice before optimizer.step(), and an asynchronous parameter server pushes one "
        "gradient for each step. To accumulate, give lockstep.init a larger global_batch and more micro_batches; to "
        "add losses, add them in one loss function; or use parameter_server.mode='synchronous'."
    )
