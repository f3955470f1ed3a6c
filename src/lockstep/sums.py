"""Tree sums of many small numbers at once."""

from __future__ import annotations

import torch
from torch import Tensor


def fold_rows(rows: Tensor) -> Tensor:
    """The sum over dim 0 in the order of ``lockstep.tree``: neighbours first, level by level.

    Args:
        rows: shape (n, ...), n at least 1.

    Returns:
        Shape (...).
    """
    while rows.shape[0] > 1:
        paired = rows.shape[0] // 2 * 2
        folded = rows[0:paired:2] + rows[1:paired:2]
        rows = folded if paired == rows.shape[0] else torch.cat([folded, rows[paired:]])
    return rows[0]
