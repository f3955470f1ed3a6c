"""Reads what a loss or metric function returned as a sum and a weight."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

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


def exact(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loss function that gives sum and weight where the mean of ``function`` is not one over the samples.

    torch's ``CrossEntropyLoss`` and ``NLLLoss`` divide by the sum of the targets' class weights, and leave out targets
    equal to ``ignore_index``: the mean over several micro-batches is then not the mean of their means. Any other
    function is returned as it is; a torch loss that sums is refused (``ConfigError``).
    """
    if isinstance(function, nn.Module) and getattr(function, "reduction", "") == "sum":
        raise ConfigError(
            f"{type(function).__name__}(reduction='sum') returns one number, which would be taken for the mean over a "
            "micro-batch. Use reduction='mean', or a function that returns the pair (sum, count)."
        )
    if not isinstance(function, nn.CrossEntropyLoss | nn.NLLLoss) or function.reduction != "mean":
        return function
    summing = copy.copy(function)
    summing.reduction = "sum"

    def sum_and_weight_of(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return summing(output, target), _weight(function, target, output.shape[0])

    return sum_and_weight_of


def _weight(function: nn.CrossEntropyLoss | nn.NLLLoss, target: Tensor, samples: int) -> Tensor:
    if target.is_floating_point():  # class probabilities: torch divides by the number of samples
        return torch.tensor(float(samples), device=target.device)
    counted = target != function.ignore_index
    if function.weight is None:
        return counted.sum()
    return function.weight[target.where(counted, 0)].mul(counted).sum()


def sum_and_weight(value: Any, samples: int) -> tuple[Tensor, Tensor]:
    """The sum and the weight that a returned value stands for, both 0-dim.

    Args:
        value: a 0-dim tensor, taken as the mean over the samples; a tensor of one entry per sample or token; or the
            pair ``(sum, weight)``.
        samples: rows of the micro-batch.
    """
    if isinstance(value, tuple) and len(value) == 2:
        total = value[0] if isinstance(value[0], Tensor) else torch.tensor(float(value[0]))
        weight = (
            value[1] if isinstance(value[1], Tensor) else torch.tensor(float(value[1]), device=total.device)
        )
        return total.sum(), weight.detach().sum()
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"A loss or metric function should return a tensor or the pair (sum, weight), not {type(value).__name__}."
        )
    if value.dim() == 0:
        return value * samples, torch.tensor(float(samples), device=value.device)
    numbers = value if value.is_floating_point() else value.to(torch.float64)
    return numbers.sum(), torch.tensor(float(value.numel()), device=value.device)
