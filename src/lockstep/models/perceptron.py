"""A multilayer perceptron: linear layers with ReLU between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from lockstep.errors import ConfigError


def perceptron(
    *,
    in_features: int = 784,
    hidden: Sequence[int] = (256, 128),
    num_classes: int = 10,
    dropout: float = 0.0,
) -> nn.Sequential:
    """A perceptron from inputs of any shape, flattened, to logits; 784-256-128-10 unless told otherwise.

    Args:
        in_features: numbers per sample.
        hidden: width of each hidden layer.
        num_classes: number of logits.
        dropout: share of hidden activations left out in training.
    """
    sizes = [in_features, *hidden]
    if min(*sizes, num_classes) < 1:
        raise ConfigError(
            f"A perceptron of sizes {[*sizes, num_classes]} cannot be made: each must be 1 or more."
        )
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(sizes[-1], num_classes))
