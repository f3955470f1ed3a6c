"""An LSTM that classifies sequences of tokens or of vectors."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from lockstep.errors import ConfigError


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
        raise ConfigError(
            "An LSTM needs vocabulary_size (for tokens) or in_features (for vectors), and not both."
        )
    layers: list[tuple[str, nn.Module]] = []
    if vocabulary_size is not None:
        layers.append(("embed", nn.Embedding(vocabulary_size, hidden_size)))
    body = LastOutput(in_features or hidden_size, hidden_size, num_layers, dropout)
    layers += [("lstm", body), ("dropout", nn.Dropout(dropout)), ("fc", nn.Linear(hidden_size, num_classes))]
    return nn.Sequential(OrderedDict(layers))
