"""Losses and weights of a step's micro-batches: the last stage computes them, and every rank needs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.plan import Share
from lockstep.strategies.pipeline.channel import Channel
from lockstep.sums import fold_rows

_KIND = "losses"
"""The kind of what the last stage tells the others."""


class Losses:
    """A row [losses, weights] of one holder, and what the rows of all holders come to.

    Args:
        share: which micro-batches this holder runs.
        micro_batches: K of the recipe.
        device: of the stages.
        channels: to the holder's other ranks on the last one, from the last one on the others.
        is_last: whether this rank has the last stage.
    """

    def __init__(
        self,
        share: Share,
        micro_batches: int,
        device: torch.device,
        channels: Sequence[Channel],
        *,
        is_last: bool,
    ) -> None:
        self._share, self._device, self._channels, self._is_last = share, device, channels, is_last
        self._longest = share.longest(micro_batches)
        self.size = 2 * self._longest
        """How many numbers a row has."""

    def begin(self, count: int) -> None:
        """Starts a step in which this holder runs so many micro-batches."""
        self._row = torch.zeros(self.size, dtype=torch.float64, device=self._device)
        self._count = count

    def put(self, place: int, loss: Tensor, weight: Tensor) -> None:
        """Keeps what the last stage has computed of the holder's micro-batch number ``place``; both are 0-dim."""
        self._row[place], self._row[self._longest + place] = loss.detach(), weight

    def tell(self, place: int) -> None:
        """Sends the row to the holder's other ranks if micro-batch number ``place`` was its last."""
        if place == self._count - 1:
            for channel in self._channels:
                channel.send(_KIND, self._row)

    def told(self) -> Tensor:
        """The row, on every rank of the holder."""
        if not self._count or self._is_last:
            return self._row
        (channel,) = self._channels
        return channel.receive(_KIND)[1][0]

    def flush(self) -> None:
        """Waits until all that was told has arrived."""
        for channel in self._channels:
            channel.flush()

    def of_all(self, rows: Tensor, leaves: int) -> tuple[Tensor, Tensor]:
        """The losses of all micro-batches, float64, shape (leaves,), and the weight of the global batch, 0-dim.

        Args:
            rows: of all holders, shape (holders, size).
            leaves: number of micro-batches in the step.
        """
        pairs = [(row, len(self._share.of(leaves, holder))) for holder, row in enumerate(rows)]
        losses = torch.cat([row[:count] for row, count in pairs])
        weights = torch.cat([row[self._longest : self._longest + count] for row, count in pairs])
        return losses, fold_rows(weights)
