"""Decodes photos: any mode, upright, only as large as needed, into 8-bit RGB.

Cutting and resizing are torch's ``uint8`` kernel with antialiasing. It gives Pillow's (and so torchvision's)
result within one grey level, in less than half the time at 224 pixels (``benchmarks/images``).
"""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from lockstep.data.image_transforms import Cut, ImageTransform, Uniforms
from lockstep.errors import DataError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
"""Endings, in lower case, of the files that count as photos."""

MAX_PIXELS = 89_478_485
"""Photos with more pixels are refused before they are decoded (Pillow's own limit; 256 MiB as RGB)."""

_ORIENTATION = 0x0112


def decode_rgb(source: bytes | Path) -> Image.Image:
    """The whole photo, upright and in RGB; the first picture of an animation."""
    with _opened(source) as image:
        return _upright(_rgb(image), _orientation(image))


def decode_into(source: bytes | Path, transform: ImageTransform, uniforms: Uniforms, out: Tensor) -> None:
    """Decodes what ``transform`` cuts out of the photo into ``out``, uint8 of shape (3, size, size).

    A JPEG is decoded at 1/2, 1/4 or 1/8 where the part stays at least as large as it is resized to.
    """
    with _opened(source) as image:
        orientation = _orientation(image)
        width, height = image.size if orientation < 5 else image.size[::-1]
        cut = transform.cut(width, height, uniforms)
        left, top, right, bottom = cut.box
        spare = min((bottom - top) // cut.resized[0], (right - left) // cut.resized[1])
        if spare >= 2:
            image.draft(None, (image.size[0] // spare, image.size[1] // spare))
        photo = _upright(_rgb(image), orientation)
    x, y = photo.width / width, photo.height / height
    box = (round(left * x), round(top * y), round(right * x), round(bottom * y))
    out.copy_(_resized(photo if box == (0, 0, *photo.size) else photo.crop(box), cut, out.shape[1:]))


def _resized(part: Image.Image, cut: Cut, size: torch.Size) -> Tensor:
    pixels = torch.from_numpy(np.array(part)).permute(2, 0, 1).contiguous()
    if tuple(pixels.shape[1:]) != cut.resized:
        pixels = interpolate(pixels[None], cut.resized, mode="bilinear", antialias=True)[0]
    top, left = cut.offset
    window = pixels[:, top : top + size[0], left : left + size[1]]
    return window.flip(2) if cut.flip else window


def _opened(source: bytes | Path) -> Image.Image:
    image = Image.open(io.BytesIO(source if isinstance(source, bytes) else source.read_bytes()))
    if image.width * image.height > MAX_PIXELS:
        raise DataError(
            f"the photo has {image.width} x {image.height} pixels, "
            f"more than the {MAX_PIXELS:,} that are decoded. Make it smaller first."
        )
    return image


def _rgb(image: Image.Image) -> Image.Image:
    """The photo in 8-bit RGB. Transparency is dropped, 16-bit grey keeps its upper 8 bits."""
    if image.mode == "RGB":
        image.load()
        return image
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in {"PNG", "PPM"}):
        return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in {"I", "F"}:
        raise DataError(
            f"the photo has mode {image.mode}, whose range is not known. Convert it to 8 or 16 bits."
        )
    if image.mode in {"P", "PA", "La"} and "transparency" in image.info:
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    """How the camera was held, 1 to 8, after EXIF; 1 where nothing or nothing readable is said."""
    if "exif" not in image.info:
        return 1
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except (SyntaxError, ValueError, TypeError, KeyError, OSError, struct.error):
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _upright(photo: Image.Image, orientation: int) -> Image.Image:
    if orientation == 1:
        return photo
    return photo.transpose(_UPRIGHT[orientation])


_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
