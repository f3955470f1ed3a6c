"""A small convolutional network for the bundled 8x8 digits."""

from __future__ import annotations

from torch import nn


def digits_net(*, num_classes: int = 10, width: int = 16, dropout: float = 0.25) -> nn.Sequential:
    """Two convolutions and two linear layers with BatchNorm and dropout, from 64 grey values to logits.

    Args:
        num_classes: number of logits.
        width: channels of the first convolution; the second has twice as many.
        dropout: share of activations left out in training, before each linear layer.

    Takes samples of shape (64,), (8, 8) or (1, 8, 8), scaled to about one.
    """
    return nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * width * 16, 4 * width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(4 * width, num_classes),
    )
