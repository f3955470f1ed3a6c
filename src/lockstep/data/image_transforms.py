"""Crops of photos, as values: which part of a photo becomes which picture.

A transform here says where to cut before anything is decoded, so the decoder can leave out what is not
needed, and cutting, resizing and mirroring are one pass over the pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from lockstep.errors import ConfigError

Uniforms = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cut:
    """Cut ``box`` out of a photo, resize it, and cut the window that begins at ``offset`` out of that."""

    box: tuple[int, int, int, int]
    """Left, top, right and bottom in pixels of the upright photo."""
    resized: tuple[int, int]
    """Height and width that the box is resized to."""
    offset: tuple[int, int] = (0, 0)
    """Top and left of the window in the resized box."""
    flip: bool = False
    """Mirror left and right."""


@runtime_checkable
class ImageTransform(Protocol):
    """A transform that is known before the photo is decoded."""

    @property
    def size(self) -> int:
        """Height and width of the pictures."""

    @property
    def draws(self) -> int:
        """How many uniform numbers one photo takes."""

    def cut(self, width: int, height: int, uniforms: Uniforms) -> Cut:
        """Where to cut a photo of that size; ``uniforms`` are ``draws`` numbers in [0, 1)."""


@dataclass(frozen=True)
class RandomResizedCrop:
    """Cuts a random part, resizes it to a square, and mirrors half of the photos.

    Sizes and places have the distribution of torchvision's ``RandomResizedCrop``: an area and the logarithm
    of a ratio, drawn up to ten times until the part fits into the photo, else the largest central part.

    Args:
        size: height and width of the pictures.
        scale: smallest and largest area of the part, relative to the photo's.
        ratio: smallest and largest width : height.
        flip: probability of mirroring.
    """

    size: int = 224
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5

    _TRIES = 10

    def __post_init__(self) -> None:
        _check_size(self.size)
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if not 0 < low <= high:
                raise ConfigError(f"RandomResizedCrop {name}=({low:g}, {high:g}) must rise from above 0.")
        if not 0 <= self.flip <= 1:
            raise ConfigError(f"RandomResizedCrop flip={self.flip:g} is a probability: 0 to 1.")

    @property
    def draws(self) -> int:
        """Two for each try, two for the place, one for mirroring."""
        return 2 * self._TRIES + 3

    def cut(self, width: int, height: int, uniforms: Uniforms) -> Cut:
        """The random part of one photo."""
        numbers = uniforms.tolist()
        w, h = self._part(width, height, numbers)
        left = int(numbers[-3] * (width - w + 1))
        top = int(numbers[-2] * (height - h + 1))
        return Cut((left, top, left + w, top + h), (self.size, self.size), flip=numbers[-1] < self.flip)

    def _part(self, width: int, height: int, numbers: list[float]) -> tuple[int, int]:
        (smallest, largest), (narrow, wide) = self.scale, self.ratio
        for attempt in range(self._TRIES):
            area = width * height * (smallest + (largest - smallest) * numbers[2 * attempt])
            ratio = math.exp(math.log(narrow) + math.log(wide / narrow) * numbers[2 * attempt + 1])
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                return w, h
        return _fitting(width, height, narrow, wide)


@dataclass(frozen=True)
class CenterCrop:
    """Resizes the shorter side and cuts the central square, like torchvision's ``Resize`` and ``CenterCrop``.

    Args:
        size: height and width of the pictures.
        resize: length of the shorter side before the cut; ``None`` for ``size * 256 / 224``.
    """

    size: int = 224
    resize: int | None = None

    def __post_init__(self) -> None:
        _check_size(self.size)
        if self.resize is not None and self.resize < self.size:
            raise ConfigError(
                f"CenterCrop cannot cut size={self.size} out of photos resized to {self.resize}. "
                f"Choose resize of at least {self.size}."
            )

    @property
    def draws(self) -> int:
        """None: the same picture every time."""
        return 0

    def cut(self, width: int, height: int, uniforms: Uniforms) -> Cut:
        """The central square of one photo."""
        shorter = round(self.size * 256 / 224) if self.resize is None else self.resize
        if width <= height:
            resized = (int(shorter * height / width), shorter)
        else:
            resized = (shorter, int(shorter * width / height))
        offset = (round((resized[0] - self.size) / 2), round((resized[1] - self.size) / 2))
        return Cut((0, 0, width, height), resized, offset)


@dataclass(frozen=True)
class Squeeze:
    """Resizes the whole photo to a square, whatever its shape.

    Args:
        size: height and width of the pictures.
    """

    size: int

    def __post_init__(self) -> None:
        _check_size(self.size)

    @property
    def draws(self) -> int:
        """None: the same picture every time."""
        return 0

    def cut(self, width: int, height: int, uniforms: Uniforms) -> Cut:
        """All of the photo."""
        return Cut((0, 0, width, height), (self.size, self.size))


def _check_size(size: int) -> None:
    if size < 1:
        raise ConfigError(f"Pictures of size={size} were asked for; it must be at least 1.")


def _fitting(width: int, height: int, narrow: float, wide: float) -> tuple[int, int]:
    """The largest part of an allowed ratio; where tries fail it takes the place of a random one."""
    if width / height < narrow:
        return width, min(height, round(width / narrow))
    if width / height > wide:
        return min(width, round(height * wide)), height
    return width, height
