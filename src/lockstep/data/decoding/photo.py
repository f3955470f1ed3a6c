"""What a photo is before its pixels are decoded, and at which scale they need to be."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError

Pixels = npt.NDArray[np.uint8]
"""RGB, of shape (height, width, 3)."""

MAX_PIXELS = 89_478_485
"""Photos with more pixels are refused before they are decoded (Pillow's own limit; 256 MiB as RGB)."""

_SMALLEST = 8


class Photo(Protocol):
    """A photo whose header has been read."""

    @property
    def width(self) -> int:
        """Pixels of an upright row, at full scale."""

    @property
    def height(self) -> int:
        """Upright rows, at full scale."""

    def pixels(self, factor: int = 1) -> Pixels:
        """The photo, upright, in RGB, at 1/``factor`` where its format can be decoded so, else at full scale.

        Args:
            factor: 1, 2, 4 or 8, from ``reduction``; no side is shorter. Sizes are rounded up.

        Raises:
            OSError, SyntaxError: the file is broken.
            DataError: it has a mode whose range of values is not known.
        """


def reduction(width: int, height: int, spare: int) -> int:
    """The largest of 1, 2, 4 and 8 by which a photo of that size may be reduced if ``spare`` times is too large."""
    if max(width, height) < _SMALLEST:
        return 1  # two scales of a photo as small as this can have one size, and decoders then differ
    return next(factor for factor in (8, 4, 2, 1) if factor <= max(spare, 1))


def reduced(size: int, factor: int) -> int:
    """How long a side is at 1/``factor``."""
    return -(-size // factor)


def check_size(width: int, height: int) -> None:
    """Raises a ``DataError`` for a photo of more pixels than are decoded."""
    if width * height > MAX_PIXELS:
        raise DataError(
            f"the photo has {width} x {height} pixels, "
            f"more than the {MAX_PIXELS:,} that are decoded. Make it smaller first."
        )
