"""Reads what a loss or metric function returned as a sum and a weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.errors import ConfigError


def split_batch(data: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """What a micro-batch gives the model (positional, by keyword) and what it gives the loss (its target).

    A pair is ``(input, target)``; a longer tuple has several inputs; a dict goes to the model by keyword and to the
    loss whole.
    """
    if isinstance(data, dict):
        return (), data, data
    if isinstance(data, tuple | list) and len(data) >= 2:
        return tuple(data[:-1]), {}, data[-1]
    raise ConfigError(
        f"A batch should be a pair (input, target), a longer tuple, or a dict; it is a {type(data).__name__}. "
        "Let the data set's samples be pairs, or pass forward= and take it apart there."
    )


def sum_and_weight(value: Any, samples: int) -> tuple[Tensor, Tensor]:
    """The sum and the weight that a returned value stands for, both 0-dim.

    Args:
        value: a 0-dim tensor, taken as the mean over the samples; a tensor of one entry per sample or token; or the
            pair ``(sum, weight)``.
        samples: rows of the micro-batch.
    """
    if isinstance(value, tuple) and len(value) == 2:
        total = value[0] if isinstance(value[0], Tensor) else torch.tensor(float(value[0]))
        weight = value[1] if isinstance(value[1], Tensor) else torch.tensor(float(value[1]), device=total.device)
        return total.sum(), weight.detach().sum()
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"A loss or metric function should return a tensor or the pair (sum, weight), not {type(value).__name__}."
        )
    if value.dim() == 0:
        return value * samples, torch.tensor(float(samples), device=value.device)
    numbers = value if value.is_floating_point() else value.to(torch.float64)
    return numbers.sum(), torch.tensor(float(value.numel()), device=value.device)
