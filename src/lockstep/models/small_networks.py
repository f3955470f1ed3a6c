"""Small networks: a convolutional one for the bundled digits, a multilayer perceptron, and an LSTM classifier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from lockstep.errors import ConfigError


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


def perceptron(
    *, in_features: int = 784, hidden: Sequence[int] = (256, 128), num_classes: int = 10, dropout: float = 0.0
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
        raise ConfigError(f"A perceptron of sizes {[*sizes, num_classes]} cannot be made: each must be 1 or more.")
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(sizes[-1], num_classes))


class LastOutput(nn.Module):
    """An LSTM that gives its last layer's output at the last position."""

    def __init__(self, inputs: int, hidden_size: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        # torch warns about dropout in one layer, since it applies it between layers only.
        between = dropout if num_layers > 1 else 0.0
        self.cells = nn.LSTM(inputs, hidden_size, num_layers, batch_first=True, dropout=between)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, T, inputs) to (N, hidden_size)."""
        outputs, _ = self.cells(x)
        last: Tensor = outputs[:, -1]
        return last


def lstm(
    *,
    num_classes: int,
    vocabulary_size: int | None = None,
    in_features: int | None = None,
    hidden_size: int = 128,
    num_layers: int = 1,
    dropout: float = 0.0,
) -> nn.Sequential:
    """A classifier of tokens (N, T), with ``vocabulary_size``, or of vectors (N, T, F), with ``in_features``.

    Args:
        num_classes: number of logits.
        vocabulary_size: number of different tokens; they are embedded in ``hidden_size`` numbers.
        in_features: size of each vector.
        hidden_size: size of the LSTM's state.
        num_layers: LSTM layers, one above the other.
        dropout: share of activations left out in training, between the layers and before the logits.
    """
    if (vocabulary_size is None) == (in_features is None):
        raise ConfigError("An LSTM needs vocabulary_size (for tokens) or in_features (for vectors), and not both.")
    layers: list[tuple[str, nn.Module]] = []
    if vocabulary_size is not None:
        layers.append(("embed", nn.Embedding(vocabulary_size, hidden_size)))
    body = LastOutput(in_features or hidden_size, hidden_size, num_layers, dropout)
    layers += [("lstm", body), ("dropout", nn.Dropout(dropout)), ("fc", nn.Linear(hidden_size, num_classes))]
    return nn.Sequential(OrderedDict(layers))
