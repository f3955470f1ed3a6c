"""The part of a worker: its own micro-batches of a step, a push, a pull."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lockstep.buffers import RunningBuffers
from lockstep.data.batch import Batch
from lockstep.errors import ConfigError
from lockstep.strategies.contract import Compute, StepResult
from lockstep.strategies.gradients import GradientTree
from lockstep.strategies.parameter_server.asynchronous.client import Client
from lockstep.strategies.parameter_server.asynchronous.meeting import Meeting
from lockstep.strategies.parameter_server.asynchronous.role import Role
from lockstep.strategies.parameter_server.holding import Holding
from lockstep.sums import sum_of_squares


class Worker(Role):
    """Computes gradients on the values it pulled last.

    Args:
        client: connected with the servers.
        holding: which server holds what.
        buffers: the model's running buffers.
        step: steps that the run has done.
    """

    def __init__(self, client: Client, holding: Holding, buffers: RunningBuffers, step: int) -> None:
        self._client, self._parameters, self._buffers = client, holding.parameters, buffers
        self._device = holding.device
        self._tree = GradientTree(self._parameters, None)
        self._step = step
        self._report: dict[str, Any] | None = None
        self._statistics = torch.empty(0)
        self._loss = 0.0
        self._checked = False
        buffers.begin_step()

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Sets the mean gradient of this worker's part on the parameters; ``after_step`` pushes it."""
        if self._report is not None:
            raise require_one_backward()
        losses = torch.zeros(batch.plan.leaves, dtype=torch.float64, device=self._device)
        weights, statistics = torch.zeros_like(losses), self._no_statistics()
        advanced = torch.zeros(self._buffers.counters, dtype=torch.int64, device=self._buffers.device)
        self._buffers.begin_step()
        if not self._checked:
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
        finite = self._finish(batch, losses, weights.sum(), advanced)
        self._statistics = statistics
        if not self._checked:
            self._buffers.refuse_changed_others()
            self._checked = True
        mean = torch.tensor(self._loss, dtype=torch.float64, device=losses.device)
        return StepResult(
            mean,
            losses,
            torch.tensor(self._client.stop.reason_after(self._step + 1)),
            losses.sum().isfinite() & finite,
        )

    def after_step(self) -> None:
        """Pushes and pulls; waits if it is too far ahead."""
        if self._report is None:
            return
        named = self._parameters.items()
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}
        self._client.push(gradients if self._report["leaves"] else {}, self._statistics, self._report)
        for parameter in self._parameters.values():
            parameter.grad = None
        self._report, self._step = None, self._step + 1
        self._client.pull()

    def meet(self, label: str, value: Any, body: bytes | memoryview = b"") -> Meeting:
        """See ``Service.meet``."""
        if self._report is not None:
            raise ConfigError(
                "The ranks of an asynchronous parameter server meet, to evaluate or to save for example, after "
                "optimizer.step(), and this rank came between run.backward and it. Call optimizer.step() first."
            )
        return self._client.meet(label, value, body)

    def fetch(self) -> None:
        """Pulls."""
        self._client.pull()

    def tally(self, row: Tensor) -> Tensor:
        """Sends the row; the first server adds them up."""
        self._client.tally(row.tolist())
        return row

    def farewell(self) -> None:
        """Says goodbye."""
        self._client.farewell()

    def gradients(self) -> Iterable[Tensor]:
        """The mean gradient of this worker's part."""
        return [p.grad for p in self._parameters.values() if p.grad is not None]

    def squares(self) -> Tensor:
        """Of the mean gradient of this worker's part."""
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        gradients = [parameter.grad for _, parameter in sorted(self._parameters.items())]
        return torch.stack([zero if g is None else sum_of_squares(g).to(zero.device) for g in gradients])

    @property
    def bytes_sent(self) -> int:
        """Bytes of gradients."""
        return self._client.bytes_sent

    def _finish(self, batch: Batch, losses: Tensor, weight: Tensor, advanced: Tensor) -> Tensor:
        """Divides the sums, and notes what is to be told of them; whether all gradients are finite."""
        used, count = self._tree.used(), len(batch.micro_batches)
        total = float(weight)
        if count and total:
            self._loss = float(losses.sum()) / total
        sums = self._tree.finish(used, weight.clamp(min=1e-30).float()) if count else []
        self._report = {
            "leaves": count,
            "weight": total,
            "loss": float(losses.sum()),
            "unused": [name for name, times in zip(self._parameters, used) if not times],
            "counters": advanced.tolist(),
        }
        return torch.stack([*sums, torch.zeros((), device=weight.device)]).sum().isfinite()

    def _no_statistics(self) -> Tensor:
        return torch.zeros(self._buffers.numel, dtype=self._buffers.dtype, device=self._buffers.device)


def require_one_backward() -> ConfigError:
    """The refusal of a second backward pass before the step."""
    return ConfigError(
        "run.backward was called twice before optimizer.step(), and an asynchronous parameter server pushes one "
        "gradient for each step. To accumulate, give lockstep.init a larger global_batch and more micro_batches; to "
        "add losses, add them in one loss function; or use parameter_server.mode='synchronous'."
    )
