"""The part of a server: updates from what workers push, in the order in which it comes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.buffers import RunningBuffers
from lockstep.data.batch import Batch
from lockstep.errors import NonFiniteError
from lockstep.strategies.contract import Compute, StepResult
from lockstep.strategies.parameter_server.asynchronous.client import set_values
from lockstep.strategies.parameter_server.asynchronous.meeting import Meeting
from lockstep.strategies.parameter_server.asynchronous.role import Role
from lockstep.strategies.parameter_server.asynchronous.service import Service
from lockstep.strategies.parameter_server.asynchronous.tensors import ModelBuffers
from lockstep.strategies.parameter_server.asynchronous.worker import require_one_backward
from lockstep.strategies.parameter_server.holding import Holding


class Server(Role):
    """Holds values, and lets the loop step the optimizer on what has been pushed.

    Args:
        service: the server's loop.
        servers: the ranks of all servers.
        holding: what this one holds.
        buffers: the model's running buffers, which the first server averages.
        sent: the same buffers as they travel.
        step: steps that the run has done.
        bound: the staleness that is allowed, for the log.
    """

    def __init__(
        self,
        service: Service,
        servers: Sequence[int],
        holding: Holding,
        buffers: RunningBuffers,
        sent: ModelBuffers,
        step: int,
        bound: int,
    ) -> None:
        self._service, self._ledger, self._servers, self._holding = service, service.ledger, servers, holding
        self._buffers, self._sent, self._step, self._bound = buffers, sent, step, bound
        self._loss = 0.0
        self._has_collected = self._is_update = False

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Waits for the pushes of one update, and sets their mean gradient on what is held here."""
        if self._has_collected:
            raise require_one_backward()
        service = self._service
        service.request_stop(stop)
        pool = service.collect()
        self._has_collected, self._is_update = True, pool.leaves > 0
        if self._is_update:
            self._require_finite(pool.set_gradients(), pool.loss)
            self._loss = pool.loss / pool.weight if pool.weight else self._loss
            if pool.statistics.numel():
                self._buffers.begin_step()
                self._buffers.finish_step(pool.statistics, pool.leaves, pool.counters)
        loss = torch.tensor(self._loss, dtype=torch.float64, device=self._holding.device)
        stops = torch.tensor(service.stop.reason_after(self._step + 1))
        return StepResult(loss, loss.reshape(1), stops, torch.ones((), dtype=torch.bool, device=loss.device))

    def _require_finite(self, gradient: Tensor, loss: float) -> None:
        """Workers look for themselves, on GPUs every few steps: so long nothing that is not finite may be used."""
        if not bool(gradient) or not math.isfinite(loss):
            raise NonFiniteError(
                f"Update {self._ledger.version + 1} is NaN or infinite and was not made, since a worker pushed such a "
                "loss or gradient. Lower the learning rate, clip gradients, or run the job with strategy 'ddp', which "
                "names the samples."
            )

    def after_step(self) -> None:
        """Gives the new values to those that wait for them."""
        for parameter in self._holding.own.values():
            parameter.grad = None
        self._service.publish(self._is_update)
        self._step += self._has_collected
        self._has_collected = self._is_update = False

    def meet(self, label: str, value: Any, body: bytes | memoryview = b"") -> Meeting:
        """See ``Service.meet``."""
        return self._service.meet(label, value, body)

    def fetch(self) -> None:
        """Sets the model to the values of the other servers."""
        for server, rank in enumerate(self._servers):
            if server != self._holding.server:
                set_values(self._holding, self._sent, server, self._service.fetch(rank).body)

    def tally(self, row: Tensor) -> Tensor:
        """The counts that workers have sent since the last call."""
        tallied, self._ledger.tallied = self._ledger.tallied, []
        return torch.tensor(tallied, dtype=row.dtype, device=row.device) if tallied else torch.zeros_like(row)

    def farewell(self) -> None:
        """Serves until all workers have parted."""
        self._service.farewell()

    def readings(self) -> dict[str, float]:
        """Staleness since the last call, and the workers that live if some were lost."""
        found = self._ledger.staleness.recent()
        return {**found, "workers": float(len(self._ledger.clock.living))} if self._ledger.lost else found

    def remarks(self) -> dict[str, str]:
        """Staleness over the run, and which workers were lost."""
        stale, lost = self._ledger.staleness, self._ledger.lost
        text = (
            f"{stale.mean:.2f} updates on average, at most {stale.most}; the fastest worker was at most {stale.lead} "
            f"steps ahead (bound {self._bound} when it begins one)"
        )
        gone = ", ".join(f"rank {rank} after update {update}" for rank, update in lost.items())
        return {"staleness": text, **({"lost": gone} if lost else {})}

    @property
    def bytes_sent(self) -> int:
        """Bytes of values."""
        return self._service.bytes_sent
