"""What workers have pushed to a server since its last update, added up."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lockstep.strategies.parameter_server.asynchronous.tensors import from_bytes
from lockstep.strategies.parameter_server.asynchronous.wire import Message, Refused
from lockstep.strategies.parameter_server.holding import Holding


class Pool:
    """Adds pushes up: gradients weighted by samples, and on the first server what forward passes left in buffers.

    Args:
        holding: what this server holds.
        statistics: how many values of running buffers come with a push; 0 on other servers.
        counters: how many numbers tell which buffers were used.
        statistics_type: of those values.
    """

    def __init__(
        self, holding: Holding, statistics: int, counters: int, statistics_type: torch.dtype
    ) -> None:
        self._holding, self._statistics_type = holding, statistics_type
        self._numel = holding.numel(holding.server)
        self._total = torch.zeros(self._numel, dtype=holding.dtype, device=holding.device)
        self.statistics = torch.zeros(statistics, dtype=statistics_type, device=holding.device)
        """Sum over micro-batches."""
        self.counters = torch.zeros(counters, dtype=torch.int64, device=holding.device)
        self.pushes = self.leaves = 0
        """Pushes, and the micro-batches of which they are."""
        self.weight = self.loss = 0.0
        self.versions: list[int] = []
        """On which values each gradient was computed."""
        self._used: set[str] = set()

    def add(self, push: Message) -> None:
        """Takes a push. Raises ``Refused`` where it is not what a worker of this model sends."""
        content = _checked(push.content)
        gradient_bytes = self._numel * self._holding.dtype.itemsize
        size = gradient_bytes + self.statistics.numel() * self._statistics_type.itemsize
        if len(push.body) != (size if content["leaves"] else 0):
            raise Refused(f"a push of {len(push.body)} bytes came, and {size} make one")
        if self.statistics.numel() and len(content["counters"]) != self.counters.numel():
            raise Refused(f"a push counts {len(content['counters'])} buffers of {self.counters.numel()}")
        self.pushes += 1
        if not content["leaves"]:
            return
        body, device = memoryview(push.body), self._holding.device
        self._total.add_(
            from_bytes(body[:gradient_bytes], self._holding.dtype, device), alpha=content["weight"]
        )
        self.statistics.add_(from_bytes(body[gradient_bytes:], self._statistics_type, device))
        if self.statistics.numel():
            self.counters.add_(torch.tensor(content["counters"], device=device))
        self.leaves, self.weight = self.leaves + content["leaves"], self.weight + content["weight"]
        self.loss += content["loss"]
        self.versions.append(content["version"])
        self._used |= self._holding.own.keys() - set(content["unused"])

    def set_gradients(self) -> Tensor:
        """Sets the mean gradient on what this server holds; whether it is finite, 0-dim bool."""
        if self.weight:
            self._total.div_(self.weight)
        for name, gradient in self._holding.views(self._total).items():
            self._holding.own[name].grad = gradient if name in self._used else None
        return self._total.sum().isfinite()


def _checked(content: dict[str, Any]) -> dict[str, Any]:
    kinds = {"leaves": int, "version": int, "weight": float, "loss": float, "unused": list, "counters": list}
    wrong = [name for name, kind in kinds.items() if not isinstance(content.get(name), kind)]
    if wrong or not 0.0 <= content["weight"] < math.inf or content["leaves"] < 0:
        raise Refused(f"a push does not say rightly {', '.join(wrong) or 'what it weighs'}")
    if not all(isinstance(count, int) for count in content["counters"]):
        raise Refused("a push counts with what are no numbers")
    return content
