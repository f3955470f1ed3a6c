"""Crops of photos and what is done to a whole input on its device.

A transform says where to cut before anything is decoded, so the decoder can leave out what is not needed, and cutting,
resizing and mirroring are one pass over the pixels. Resizing is torch's ``uint8`` kernel with antialiasing, on pixels
that lie one after the other. It gives Pillow's (and so torchvision's) result within one grey level, in a third of the
time at 224 pixels (``benchmarks/images``).

Pixels travel from the workers to the device as ``uint8``, a quarter of the bytes. A data set's ``device_transform``,
such as ``Normalize``, is applied there, before the model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from lockstep.data.batch import DeviceTransform
from lockstep.data.images.decoding import Photo, PillowPhoto, Pixels, open_photo, reduction
from lockstep.errors import ConfigError


def warn_renamed(old: str, new: str) -> None:
    """Warns whoever called the caller that ``old`` is now called ``new``."""
    warnings.warn(f"lockstep.data: {old} is deprecated; use {new}.", DeprecationWarning, stacklevel=3)


def renamed_finish(device_transform: DeviceTransform | None, finish: Any) -> DeviceTransform | None:
    """The argument ``device_transform``, or the one given under its old name ``finish``, which is ``...`` if absent."""
    if finish is ...:
        return device_transform
    warn_renamed("the argument finish", "device_transform")
    return cast("DeviceTransform | None", finish)


def device_transform_of(dataset: Any) -> DeviceTransform | None:
    """The ``device_transform`` of a data set, or what an older one calls ``finish``; None where it has neither."""
    if hasattr(dataset, "device_transform"):
        found = dataset.device_transform
    elif callable(found := getattr(dataset, "finish", None)):
        warn_renamed(f"the attribute finish of {type(dataset).__name__}", "device_transform")
    return found if callable(found) else None


class FinishAlias:
    """Keeps the attribute ``finish``, the old name of ``device_transform``."""

    device_transform: Any

    @property
    def finish(self) -> DeviceTransform | None:
        """Deprecated; see ``device_transform``."""
        warn_renamed("the attribute finish", "device_transform")
        return cast("DeviceTransform | None", self.device_transform)

    @finish.setter
    def finish(self, value: DeviceTransform | None) -> None:
        warn_renamed("the attribute finish", "device_transform")
        self.device_transform = value


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
        factors = _factors(tuple(self.mean), tuple(self.std), images.device, torch.get_default_dtype())
        if images.device.type != "cpu" or not images.numel():
            return images.to(torch.float32).mul_(factors[0]).add_(factors[1])
        result = torch.empty_like(images, dtype=torch.float32)
        rows = -(-_BLOCK // images[0].numel())
        for first in range(0, len(images), rows):
            block = result[first : first + rows]
            block.copy_(images[first : first + rows]).mul_(factors[0]).add_(factors[1])
        return result


@lru_cache
def _factors(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The factor and the summand for pixels; kept, as a host waits for what it copies to a device."""
    scale = [1.0 / (255.0 * each) for each in std]
    shift = [-centre / each for centre, each in zip(mean, std, strict=True)]
    with torch.inference_mode(False):
        return torch.tensor([scale, shift], device=device, dtype=dtype)[:, :, None, None]


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
        """The number of uniform numbers that one photo takes."""

    def cut(self, width: int, height: int, uniforms: Uniforms) -> Cut:
        """The cut for a photo of that size; ``uniforms`` are ``draws`` numbers in [0, 1)."""


Transform = ImageTransform | Callable[[Any], Any]
"""Of a photo: one of ours, or any callable of a photo."""


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
    draws = 2 * _TRIES + 3
    """Two for each try, two for the place, one for mirroring."""

    def __post_init__(self) -> None:
        _check_size(self.size)
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if not 0 < low <= high:
                raise ConfigError(
                    f"RandomResizedCrop {name}=({low:g}, {high:g}) must be two numbers above 0 in ascending order."
                )
        if not 0 <= self.flip <= 1:
            raise ConfigError(f"RandomResizedCrop flip={self.flip:g} must be a probability from 0 to 1.")

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
        if width / height < narrow:  # no try fits: the largest part of an allowed ratio
            return width, min(height, round(width / narrow))
        if width / height > wide:
            return min(width, round(height * wide)), height
        return width, height


@dataclass(frozen=True)
class CenterCrop:
    """Resizes the shorter side and cuts the central square, like torchvision's ``Resize`` and ``CenterCrop``.

    Args:
        size: height and width of the pictures.
        resize: length of the shorter side before the cut; ``None`` for ``size * 256 / 224``.
    """

    size: int = 224
    resize: int | None = None
    draws = 0  # the same picture every time

    def __post_init__(self) -> None:
        _check_size(self.size)
        if self.resize is not None and self.resize < self.size:
            raise ConfigError(
                f"CenterCrop cannot cut size={self.size} out of photos resized to {self.resize}. "
                f"Choose resize of at least {self.size}."
            )

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
class Resize:
    """Resizes the whole photo to a square, whatever its shape.

    Args:
        size: height and width of the pictures.
    """

    size: int
    draws = 0  # the same picture every time

    def __post_init__(self) -> None:
        _check_size(self.size)

    def cut(self, width: int, height: int, uniforms: Uniforms) -> Cut:
        """All of the photo."""
        return Cut((0, 0, width, height), (self.size, self.size))


class Squeeze(Resize):
    """The old name of ``Resize``; deprecated."""

    def __post_init__(self) -> None:
        warn_renamed("Squeeze", "Resize")
        super().__post_init__()


def _check_size(size: int) -> None:
    if size < 1:
        raise ConfigError(f"Pictures of size={size} were asked for; it must be at least 1.")


SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
"""Endings, in lower case, of the files that count as photos."""


def decode_rgb(source: bytes | str | Path) -> Image.Image:
    """The whole photo, upright and in RGB; the first picture of an animation."""
    photo = open_photo(source)
    return photo.image() if isinstance(photo, PillowPhoto) else Image.fromarray(photo.pixels())


def decode_into(source: bytes | str | Path, transform: ImageTransform, uniforms: Uniforms, out: Tensor) -> None:
    """Decodes what ``transform`` cuts out of the photo into ``out``, uint8 of shape (3, size, size).

    A JPEG is decoded at 1/2, 1/4 or 1/8 where the part stays at least as large as it is resized to.
    """
    cut_into(open_photo(source), transform, uniforms, out)


def cut_into(photo: Photo, transform: ImageTransform, uniforms: Uniforms, out: Tensor) -> None:
    """The same from a photo whose header has been read."""
    width, height = photo.width, photo.height
    cut = transform.cut(width, height, uniforms)
    left, top, right, bottom = cut.box
    excess = min((bottom - top) // cut.resized[0], (right - left) // cut.resized[1])
    pixels = photo.pixels(reduction(width, height, excess))
    x, y = pixels.shape[1] / width, pixels.shape[0] / height
    part = pixels[round(top * y) : round(bottom * y), round(left * x) : round(right * x)]
    np.copyto(out.numpy(), _resized(part, cut, out.shape[1:]))


def _resized(part: Pixels, cut: Cut, size: torch.Size) -> Pixels:
    """The picture, a view of shape (3, height, width)."""
    if part.shape[:2] != cut.resized:
        # one picture of a batch in channels-last order: torch then takes the pixels as they lie, three times as fast
        planes = torch.from_numpy(part)[None].permute(0, 3, 1, 2)
        part = interpolate(planes, cut.resized, mode="bilinear", antialias=True)[0].permute(1, 2, 0).numpy()
    top, left = cut.offset
    window = part[top : top + size[0], left : left + size[1]]
    return (window[:, ::-1] if cut.flip else window).transpose(2, 0, 1)
