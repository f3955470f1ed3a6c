"""Cuts pictures out of photos: decoded only as large as needed, resized, mirrored, into their place.

Resizing is torch's ``uint8`` kernel with antialiasing, on pixels that lie one after the other. It gives Pillow's
(and so torchvision's) result within one grey level, in a third of the time at 224 pixels (``benchmarks/images``).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from lockstep.data.decoding import MAX_PIXELS, Photo, open_photo, reduction
from lockstep.data.decoding.photo import Pixels
from lockstep.data.decoding.pillow import PillowPhoto
from lockstep.data.image_transforms import Cut, ImageTransform, Uniforms

__all__ = ["MAX_PIXELS", "SUFFIXES", "cut_into", "decode_into", "decode_rgb"]

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
"""Endings, in lower case, of the files that count as photos."""


def decode_rgb(source: bytes | str | Path) -> Image.Image:
    """The whole photo, upright and in RGB; the first picture of an animation."""
    photo = open_photo(source)
    return photo.image() if isinstance(photo, PillowPhoto) else Image.fromarray(photo.pixels())


def decode_into(
    source: bytes | str | Path, transform: ImageTransform, uniforms: Uniforms, out: Tensor
) -> None:
    """Decodes what ``transform`` cuts out of the photo into ``out``, uint8 of shape (3, size, size).

    A JPEG is decoded at 1/2, 1/4 or 1/8 where the part stays at least as large as it is resized to.
    """
    cut_into(open_photo(source), transform, uniforms, out)


def cut_into(photo: Photo, transform: ImageTransform, uniforms: Uniforms, out: Tensor) -> None:
    """The same from a photo whose header has been read."""
    width, height = photo.width, photo.height
    cut = transform.cut(width, height, uniforms)
    left, top, right, bottom = cut.box
    spare = min((bottom - top) // cut.resized[0], (right - left) // cut.resized[1])
    pixels = photo.pixels(reduction(width, height, spare))
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
