"""Decodes with Pillow: every format and mode, JPEGs at a reduced scale by its draft mode."""

from __future__ import annotations

import io
import struct

import numpy as np
from PIL import Image

from lockstep.data.decoding.photo import Pixels, check_size
from lockstep.errors import DataError

_ORIENTATION = 0x0112


class PillowPhoto:
    """A photo that Pillow has opened.

    Args:
        source: the file's content.
    """

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._image: Image.Image | None = _opened(source)
        self.orientation = _orientation(self._image)
        """How the camera was held, 1 to 8, after EXIF."""
        size = self._image.size
        self.width, self.height = size if self.orientation < 5 else size[::-1]

    def pixels(self, factor: int = 1) -> Pixels:
        """See ``Photo``."""
        return np.array(self.image(factor))

    def image(self, factor: int = 1) -> Image.Image:
        """The same as a Pillow image."""
        image = self._image or _opened(self._source)
        self._image = None  # an image is decoded at one scale only
        if factor > 1:
            image.draft(None, (image.width // factor, image.height // factor))
        photo = _rgb(image)
        return photo if self.orientation == 1 else photo.transpose(_UPRIGHT[self.orientation])


def _opened(source: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(source))
    check_size(*image.size)
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


_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
