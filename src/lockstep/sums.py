"""Tree sums of many small numbers at once."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_of_squares(tensor: Tensor) -> Tensor:
    """The float64 sum of squares, 0-dim: within each row (index of dim 0), then over the rows in the tree's order.

    Whoever holds some rows can compute theirs, so the sum does not depend on how rows are shared out.
    """
    return fold_rows(row_squares(tensor))


def row_squares(tensor: Tensor) -> Tensor:
    """The float64 sum of squares of each row (index of dim 0), shape (rows,); a 0-dim tensor is one row."""
    if not tensor.numel():
        return torch.zeros(1, dtype=torch.float64, device=tensor.device)
    rows = tensor.detach().reshape(tensor.shape[0] if tensor.dim() else 1, -1).double()
    squares: Tensor = torch.linalg.vecdot(rows, rows)
    return squares


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
