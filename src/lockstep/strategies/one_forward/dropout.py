"""Dropout whose masks belong to micro-batches although one forward pass runs several of them.

    rows        | k0 | k2 | k4 |            of one forward pass
    mask        | m0 | m2 | m4 |            each drawn with the key (seed, step, k, module, call)

So a sample's mask does not depend on which samples share its forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.seeding import derive_seed


class MicroBatchKeys:
    """Which rows of the current forward pass are of which micro-batch, and the key of each.

    Copies of a model share it: generators cannot be copied.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[int, int]] = []
        self._calls: dict[str, int] = {}
        self._generators: dict[torch.device, torch.Generator] = {}
        self.is_drawing = False
        """Whether masks are being drawn, with a key each."""

    def begin(self, parts: Sequence[tuple[int, int]]) -> None:
        """Starts a forward pass over micro-batches of (rows, key), in the order of the rows."""
        self._parts, self._calls = list(parts), {}

    def end(self) -> None:
        """Ends the step: until the next, modules draw as torch's do."""
        self._parts = []

    @property
    def is_active(self) -> bool:
        """Whether a step is under way."""
        return bool(self._parts)

    def draw(self, unit: str, shape: Sequence[int], keep: float, device: torch.device) -> Tensor:
        """Ones with probability ``keep``, else zeros; float32.

        Args:
            unit: name of the module.
            shape: the first entry is the number of rows.
            keep: a probability.
            device: of the result.

        Raises:
            ConfigError: the rows are not those of the micro-batches, or the call cannot be told when it is run again.
        """
        rows = sum(size for size, _ in self._parts)
        if not shape or shape[0] != rows:
            raise ConfigError(
                f"With sync_batch_norm, dropout belongs to samples, and {unit or 'the model'!r} was given a tensor of "
                f"shape {tuple(shape)} where this process has {rows} samples. Apply it where the first dimension is "
                "the sample."
            )
        call = self._call(unit)
        generator = self._generators.setdefault(device, torch.Generator(device))
        masks = []
        self.is_drawing = True
        for size, key in self._parts:
            generator.manual_seed(derive_seed(key, "dropout", unit, call))
            masks.append(torch.empty((size, *shape[1:]), device=device).bernoulli_(keep, generator=generator))
        self.is_drawing = False
        return torch.cat(masks)

    def _call(self, unit: str) -> int:
        """The number of this call in the forward pass; that of the only one where backward runs it again."""
        calls = self._calls.get(unit, 0)
        if torch._C._current_graph_task_id() == -1:
            self._calls[unit] = calls + 1
            return calls
        if calls != 1:
            raise ConfigError(
                f"With sync_batch_norm, {unit or 'the model'!r} is called {calls} times in one forward pass and run "
                "again in backward by activation checkpointing; which call is meant is not known. Use a module for "
                "each."
            )
        return 0

    def __deepcopy__(self, memo: dict[int, object]) -> MicroBatchKeys:
        return self

    def __reduce__(self) -> tuple[type[MicroBatchKeys], tuple[()]]:
        return MicroBatchKeys, ()


class _Keyed(nn.Module):
    """A dropout module that takes its masks from ``MicroBatchKeys`` while a step is under way."""

    keys: MicroBatchKeys
    unit: str
    p: float
    _whole_channels = False

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        """Zeroes entries, or channels, with probability p and scales the others by 1 / (1 - p)."""
        if not (self.training and self.keys.is_active and self.p > 0):
            output: Tensor = super().forward(input)
            return output
        if self.p == 1:
            return input * 0
        shape = input.shape
        if self._whole_channels:
            shape = torch.Size([*shape[:2], *[1] * (len(shape) - 2)])
        mask = self.keys.draw(self.unit, shape, 1 - self.p, input.device)
        return input * mask.div_(1 - self.p).to(input.dtype)


class KeyedDropout(_Keyed, nn.Dropout):
    """``nn.Dropout`` with masks of micro-batches."""


class KeyedDropout1d(_Keyed, nn.Dropout1d):
    """``nn.Dropout1d`` with masks of micro-batches."""

    _whole_channels = True


class KeyedDropout2d(_Keyed, nn.Dropout2d):
    """``nn.Dropout2d`` with masks of micro-batches."""

    _whole_channels = True


class KeyedDropout3d(_Keyed, nn.Dropout3d):
    """``nn.Dropout3d`` with masks of micro-batches."""

    _whole_channels = True


_KEYED: dict[type[nn.Module], type[_Keyed]] = {
    nn.Dropout: KeyedDropout,
    nn.Dropout1d: KeyedDropout1d,
    nn.Dropout2d: KeyedDropout2d,
    nn.Dropout3d: KeyedDropout3d,
}


def key_dropouts(model: nn.Module) -> MicroBatchKeys:
    """Lets the dropout modules of a model draw a mask for each micro-batch; returns what tells them which those are."""
    keys = MicroBatchKeys()
    for name, module in model.named_modules():
        if type(module) in _KEYED:
            module.__class__ = _KEYED[type(module)]
            module.keys, module.unit = keys, name
    return keys
