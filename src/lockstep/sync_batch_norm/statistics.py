"""Mean and variance of rows that several ranks hold, combined in rank order.

T. F. Chan, G. H. Golub, R. J. LeVeque: Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.
With n rows, mean m and sum of squared deviations s of each rank, all of a channel:

    N = sum n        M = sum n m / N        S = sum s + sum n (m - M)^2

Nothing here is the small difference of large numbers, as ``E[x^2] - E[x]^2`` is. A rank without rows has n = m = s = 0
and changes nothing. The sums over ranks are explicit adds in float64, so every rank gets the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.sums import fold_rows
from lockstep.sync_batch_norm.rank_rows import RankRows


@dataclass(frozen=True)
class Moments:
    """Statistics of each channel over the rows of all ranks."""

    mean: Tensor
    """Shape (channels,), float64."""
    variance: Tensor
    """Mean squared deviation, shape (channels,), float64."""
    count: Tensor
    """Values per channel, 0-dim, float64."""

    @property
    def unbiased(self) -> Tensor:
        """The variance with N - 1 in the place of N, as the running variance has it."""
        return self.variance * (self.count / (self.count - 1))


def gather_moments(x: Tensor, rows: RankRows, counts: bool = True) -> Moments:
    """The moments over all ranks' values. Collective: every rank must call this, with or without values.

    Args:
        x: this rank's values, shape (n, channels, ...); n may be 0.
        rows: exchanges with the other ranks.
        counts: whether this rank's values are part of the batch; without, it only joins.
    """
    channels = x.shape[1]
    row = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
    if counts and x.numel():
        mean, variance = torch.batch_norm_update_stats(x.to(statistics_dtype(x)), None, None, 0.0)
        row[0] = count = x.numel() // channels
        row[1 : channels + 1] = mean
        row[channels + 1 :] = variance.double() * count
    gathered = rows.gather(row)
    n, means, squares = gathered[:, :1], gathered[:, 1 : channels + 1], gathered[:, channels + 1 :]
    count_of_all = fold_rows(n)
    mean_of_all = fold_rows(n * means) / count_of_all
    squares_of_all = fold_rows(squares + n * (means - mean_of_all).square())
    return Moments(mean_of_all, squares_of_all / count_of_all, count_of_all[0])


def statistics_dtype(x: Tensor) -> torch.dtype:
    """The type in which statistics of ``x`` are computed: float64 for float64, float32 for all others."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
