"""The counts of an asynchronous server: pushes, the progress of each worker, and staleness.

The clock is that of stale synchronous parallel training:

    steps done      worker 1: 9      worker 2: 7      worker 3: 6        staleness 2
    may continue    no, 9 - 6 > 2    yes              yes

A worker that has done ``c`` steps may begin its next while the slowest living worker has done at least ``c`` minus the
staleness (Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013). With a
staleness of 0 all compute on the same values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lockstep.distributed.authentication import Refused
from lockstep.strategies.gradients import all_finite
from lockstep.strategies.parameter_server.asynchronous_transport import ServerMessage, from_bytes
from lockstep.strategies.parameter_server.shards import ParameterShards


class Clock:
    """The steps that each living worker has pushed.

    Args:
        workers: their ranks.
        staleness: steps that a worker may be ahead of the slowest when it begins one.
        step: steps that all have done.
    """

    def __init__(self, workers: Iterable[int], staleness: int, step: int = 0) -> None:
        self._done = dict.fromkeys(workers, step)
        self.staleness = staleness

    @property
    def living(self) -> list[int]:
        """The ranks of the workers that have not been lost, in order."""
        return sorted(self._done)

    @property
    def farthest(self) -> int:
        """The steps of the fastest living worker."""
        return max(self._done.values(), default=0)

    def advance(self, worker: int) -> int:
        """Counts a pushed step of a worker; returns how many steps it is ahead of the slowest."""
        if worker in self._done:
            self._done[worker] += 1
        return self.lead(worker)

    def lose(self, worker: int) -> bool:
        """Removes a worker; returns whether it was among the living."""
        return self._done.pop(worker, None) is not None

    def lead(self, worker: int) -> int:
        """Steps that a worker is ahead of the slowest living one; 0 for a lost worker."""
        return self._done[worker] - min(self._done.values()) if worker in self._done else 0

    def may_go_on(self, worker: int) -> bool:
        """Returns whether a worker may begin its next step now."""
        return self.lead(worker) <= self.staleness


class Staleness:
    """Counts missed updates, over the run and since the last reading."""

    def __init__(self) -> None:
        self._count = self._total = self._recent_count = self._recent_total = 0
        self.most = self._recent_most = self.lead = 0
        """``most``: updates that any gradient missed; ``lead``: steps that a worker was ahead of the slowest."""

    def add(self, missed: Iterable[int]) -> None:
        """Adds the number of updates that each gradient missed."""
        for number in missed:
            self._count, self._recent_count = self._count + 1, self._recent_count + 1
            self._total, self._recent_total = self._total + number, self._recent_total + number
            self.most, self._recent_most = max(self.most, number), max(self._recent_most, number)

    @property
    def mean(self) -> float:
        """Missed updates of a gradient, over the whole run."""
        return self._total / self._count if self._count else 0.0

    def recent(self) -> dict[str, float]:
        """Mean and maximum since the last call, for a logger; empty without gradients."""
        if not self._recent_count:
            return {}
        found = {
            "staleness": self._recent_total / self._recent_count,
            "staleness_max": float(self._recent_most),
        }
        self._recent_count = self._recent_total = self._recent_most = 0
        return found


class GradientAccumulator:
    """Adds pushes: gradients weighted by samples, and on the first server the statistics of forward passes.

    Args:
        shards: of this server.
        statistics: values of running buffers in a push; 0 on other servers.
        counters: numbers that tell which buffers were used.
        statistics_type: of those values.
    """

    def __init__(
        self, shards: ParameterShards, statistics: int, counters: int, statistics_type: torch.dtype
    ) -> None:
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
            raise Refused(
                f"the push counts {len(content['counters'])} buffers, expected {self.counters.numel()}"
            )
        self.pushes += 1
        if not content["leaves"]:
            return
        body, device = memoryview(push.body), self._shards.device
        self._total.add_(
            from_bytes(body[:gradient_bytes], self._shards.dtype, device), alpha=content["weight"]
        )
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
