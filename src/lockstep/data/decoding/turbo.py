"""Decodes JPEGs with simplejpeg, which calls TurboJPEG: the pixels of Pillow, in half the time.

Both hand the file to libjpeg-turbo with the exact DCT and smooth chroma, so they give the same bits
(``tests/data/decoding``). What TurboJPEG cannot decode, or finds broken, is left to Pillow.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.data.decoding.photo import Pixels, check_size, reduced
from lockstep.data.decoding.pillow import PillowPhoto

JPEG = b"\xff\xd8\xff"
_EXIF = b"Exif\0\0"
_COLOURS = {"YCbCr", "RGB", "Gray"}


class TurboPhoto:
    """A JPEG whose header simplejpeg has read.

    Args:
        simplejpeg: the module.
        source: the file's content.

    Raises:
        ValueError: TurboJPEG cannot decode it; Pillow may.
    """

    def __init__(self, simplejpeg: Any, source: bytes) -> None:
        self._simplejpeg, self._source = simplejpeg, source
        height, width, colours, _ = simplejpeg.decode_jpeg_header(source)
        check_size(width, height)
        if colours not in _COLOURS:
            raise ValueError(f"{colours} is not made into RGB")
        self._orientation = PillowPhoto(source).orientation if _EXIF in source else 1
        self._size = (int(width), int(height))
        self.width, self.height = self._size if self._orientation < 5 else self._size[::-1]

    def pixels(self, factor: int = 1) -> Pixels:
        """See ``Photo``."""
        smallest = {}
        if factor > 1:
            width, height = (reduced(size, factor) for size in self._size)
            smallest = {"min_width": width, "min_height": height}
        try:
            found = self._simplejpeg.decode_jpeg(self._source, **smallest)
        except ValueError:
            return PillowPhoto(self._source).pixels(factor)
        return _upright(found, self._orientation)


def _upright(pixels: Pixels, orientation: int) -> Pixels:
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    rows, columns = _MIRRORED[orientation]
    return np.ascontiguousarray(pixels[:: -1 if rows else 1, :: -1 if columns else 1])


_MIRRORED = {
    2: (False, True),
    3: (True, True),
    4: (True, False),
    5: (False, False),
    6: (False, True),
    7: (True, True),
    8: (True, False),
}
"""Whether rows and columns are reversed, from 5 on after they have changed places."""
