"""What is done to a whole input on its device: pixels of 8 bits become normalised floats there.

Pixels travel from the workers to the device as ``uint8``, a quarter of the bytes. A data set says what is
left to do in its attribute ``finish``; whoever moves the input to the device applies it there, before the
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import ConfigError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_BLOCK = 1 << 17
"""Elements that are finished before the next are begun: half a megabyte of floats stays in a core's cache."""


@dataclass(frozen=True)
class Normalize:
    """Turns ``uint8`` images (n, channels, height, width) into ``(x / 255 - mean) / std``, in float32.

    An input of another type passes as it is: a transform has already made floats of it.

    Args:
        mean: one number for each channel, or one for all.
        std: one number for each channel, or one for all; not zero.
    """

    mean: Sequence[float] = (0.0,)
    std: Sequence[float] = (1.0,)

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not all(self.std):
            raise ConfigError(
                f"Normalize has mean={list(self.mean)} and std={list(self.std)}; "
                "it needs as many of one as of the other, and no std of 0."
            )

    def __call__(self, images: Tensor) -> Tensor:
        """The normalised images, on the device they are on."""
        if images.dtype != torch.uint8:
            return images
        scale = [1.0 / (255.0 * std) for std in self.std]
        shift = [-mean / std for mean, std in zip(self.mean, self.std, strict=True)]
        factors = torch.tensor([scale, shift], device=images.device)[:, :, None, None]
        if images.device.type != "cpu" or not images.numel():
            return images.to(torch.float32).mul_(factors[0]).add_(factors[1])
        result = torch.empty_like(images, dtype=torch.float32)
        rows = -(-_BLOCK // images[0].numel())
        for first in range(0, len(images), rows):
            block = result[first : first + rows]
            block.copy_(images[first : first + rows]).mul_(factors[0]).add_(factors[1])
        return result
