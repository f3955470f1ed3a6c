"""Lets all ranks leave an evaluation at the same micro-batch when any of them is asked to stop.

    round      0 | 1          9          17 ...                      a rank's first, second, ... micro-batch
    agreement    ^ after the first, then about once a second: the slowest rank's rounds say how many that is

Every rank comes to every agreement, also one that has fewer micro-batches or none, and also where the forward pass is
itself collective. An evaluation that is over within its first round is never asked about.
"""

from __future__ import annotations

import time

import torch

from lockstep.launch.control import StopReason
from lockstep.launch.heartbeat import Heartbeat
from lockstep.strategies import Strategy

AGREE_EVERY = 1.0
"""Seconds, about."""


class EvaluationLeft(Exception):
    """All ranks have left an evaluation, because one was asked to stop."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(f"left because of {reason.name}")
        self.reason = reason


class Leaving:
    """The agreements of one evaluation.

    Args:
        strategy: its ranks agree.
        heartbeat: says whether this rank has been asked to stop.
    """

    def __init__(self, strategy: Strategy, heartbeat: Heartbeat) -> None:
        self._strategy, self._heartbeat = strategy, heartbeat
        self._last, self._next, self._since = 0, 1, time.monotonic()

    def agree(self, round_number: int, result: torch.Tensor) -> None:
        """Called before each round, with the same number on every rank. Collective where an agreement is due.

        Args:
            round_number: of the micro-batch that comes, counted from 0.
            result: of the one before, which is waited for; any shape, on the device.

        Raises:
            EvaluationLeft: some rank has been asked to stop; on every rank.
        """
        if round_number < self._next:
            return
        result.sum().item()  # a device may be behind, and its time counts
        seconds = (time.monotonic() - self._since) / (round_number - self._last)
        said = [float(self._heartbeat.stop_reason), seconds]
        row = self._strategy.any_rank(torch.tensor(said, dtype=torch.float64, device=self._strategy.device))
        reason, slowest = self._strategy.gather(row).amax(0).tolist()
        if reason:
            raise EvaluationLeft(StopReason(int(reason)))
        self._last, self._since = round_number, time.monotonic()
        self._next = round_number + max(1, int(AGREE_EVERY / max(slowest, 1e-6)))
