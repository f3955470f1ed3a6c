"""Layers of which a rank holds a part.

    x (whole) -> enter -> column: some of the outputs -> activation -> row: from some of the inputs -> sum -> y (whole)

A layer becomes its split kind in place, by its class: its name, its hooks and its place in the model stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import ConfigError
from lockstep.strategies.tensor.exchange import Exchange

if TYPE_CHECKING:
    _Layer = nn.Linear
else:
    _Layer = object


class _Column(_Layer):
    """Computes some of the outputs from the whole input."""

    exchange: Exchange

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        """Maps the whole input to this rank's outputs."""
        return super().forward(self.exchange.enter(input))


class _Row(_Layer):
    """Computes the whole output from some of the inputs, together with the other ranks."""

    exchange: Exchange

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        """Maps this rank's part of the input to the whole output."""
        convolve = getattr(self, "_conv_forward", None)
        # An image may come without its batch: channels are counted from the end.
        dim = 1 - self.weight.dim() if convolve is not None else -1
        if input.shape[dim] != self.weight.shape[1]:
            raise ConfigError(
                f"tensor.plan splits the inputs of a layer over {self.exchange.ranks} ranks, "
                f"{self.weight.shape[1]} for each, and it was given {input.shape[dim]}. "
                "Split the layer before it with 'column'."
            )
        if convolve is not None:
            total = self.exchange.leave(convolve(input, self.weight, None))
        else:
            total = self.exchange.leave(F.linear(input, self.weight))
        if self.bias is None:
            return total
        bias = self.bias.to(total.dtype)
        return total + (bias.view(-1, *[1] * (self.weight.dim() - 2)) if convolve is not None else bias)


class ColumnLinear(_Column, nn.Linear):
    """A Linear with some of its output features."""


class RowLinear(_Row, nn.Linear):
    """A Linear with some of its input features."""


class ColumnConv1d(_Column, nn.Conv1d):  # type: ignore[misc]  # _Column is a Linear to the checker only
    """A Conv1d with some of its output channels."""


class ColumnConv2d(_Column, nn.Conv2d):  # type: ignore[misc]  # as above
    """A Conv2d with some of its output channels."""


class ColumnConv3d(_Column, nn.Conv3d):  # type: ignore[misc]  # as above
    """A Conv3d with some of its output channels."""


class RowConv1d(_Row, nn.Conv1d):  # type: ignore[misc]  # as above
    """A Conv1d with some of its input channels."""


class RowConv2d(_Row, nn.Conv2d):  # type: ignore[misc]  # as above
    """A Conv2d with some of its input channels."""


class RowConv3d(_Row, nn.Conv3d):  # type: ignore[misc]  # as above
    """A Conv3d with some of its input channels."""


class _Part(nn.modules.dropout._DropoutNd):
    """Draws the mask of the whole activation, as one device does, and applies this rank's part of it."""

    exchange: Exchange
    split_dim: int
    """The dim of the activation that is split: -1 for features, 1 for channels."""

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        """Maps this rank's part of an activation to its part of what is kept."""
        if not self.training or self.p == 0:
            return input
        shape = list(input.shape)
        shape[self.split_dim] *= self.exchange.ranks
        ones = torch.ones(shape, dtype=input.dtype, device=input.device)
        if input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last):
            ones = ones.contiguous(memory_format=torch.channels_last)
        # A draw depends on the shape alone, so this is the mask of the whole, with 1 / (1 - p) where it keeps.
        mask: Tensor = super().forward(ones)
        return input * mask.chunk(self.exchange.ranks, self.split_dim)[self.exchange.rank]


class PartDropout(_Part, nn.Dropout):
    """A Dropout of a split activation."""


class PartDropout1d(_Part, nn.Dropout1d):
    """A Dropout1d of a split activation."""


class PartDropout2d(_Part, nn.Dropout2d):
    """A Dropout2d of a split activation."""


class PartDropout3d(_Part, nn.Dropout3d):
    """A Dropout3d of a split activation."""


COLUMNS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: ColumnLinear,
    nn.Conv1d: ColumnConv1d,
    nn.Conv2d: ColumnConv2d,
    nn.Conv3d: ColumnConv3d,
}
ROWS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RowLinear,
    nn.Conv1d: RowConv1d,
    nn.Conv2d: RowConv2d,
    nn.Conv3d: RowConv3d,
}
DROPOUTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: PartDropout,
    nn.Dropout1d: PartDropout1d,
    nn.Dropout2d: PartDropout2d,
    nn.Dropout3d: PartDropout3d,
}
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
