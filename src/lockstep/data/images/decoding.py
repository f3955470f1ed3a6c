"""Decodes photos: Pillow for every format and mode, simplejpeg (TurboJPEG) for JPEGs where it gives Pillow's bits.

Both hand JPEGs to libjpeg-turbo with the exact DCT and smooth chroma, so they give the same bits in half the time
(``tests/data/images/test_decoding.py``). What TurboJPEG cannot decode, or finds broken, is left to Pillow. A photo is
opened first, which reads its header; its pixels are then decoded at the scale that the transform needs.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import struct
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image, UnidentifiedImageError, features
from torch.utils.data import Subset

from lockstep.errors import DataError

Pixels = npt.NDArray[np.uint8]
"""RGB, of shape (height, width, 3)."""

MAX_PIXELS = 89_478_485
"""Photos with more pixels are refused before they are decoded (Pillow's own limit; 256 MiB as RGB)."""

MAX_BYTES = 256 << 20
"""The most bytes of a photo's file, unless its data set says otherwise; a larger one is refused unread."""

_AVIF = ("AVIF",) if find_spec("PIL.AvifImagePlugin") else ()  # since Pillow 11.3
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", *_AVIF, "JPEG2000", "TGA")
"""Of what Pillow reads; for some others, such as EPS, it would start a program."""

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


def reduction(width: int, height: int, excess: int) -> int:
    """The largest of 1, 2, 4 and 8 by which a photo of that size may be reduced if it is ``excess`` times too large."""
    if max(width, height) < _SMALLEST:
        return 1  # two scales of a photo as small as this can have one size, and decoders then differ
    return next(factor for factor in (8, 4, 2, 1) if factor <= max(excess, 1))


def reduced(size: int, factor: int) -> int:
    """The length of a side at 1/``factor``."""
    return -(-size // factor)


def check_size(width: int, height: int) -> None:
    """Raises a ``DataError`` for a photo of more pixels than are decoded."""
    if width * height > MAX_PIXELS:
        raise DataError(
            f"the photo has {width} x {height} pixels, "
            f"more than the {MAX_PIXELS:,} that are decoded. Make it smaller first."
        )


_ORIENTATION = 0x0112


class PillowPhoto:
    """A photo that Pillow has opened, from the content of its file."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._image: Image.Image | None = _opened(source)
        self.orientation = _orientation(self._image)
        """The EXIF orientation, 1 to 8."""
        size = self._image.size
        self.width, self.height = size if self.orientation < 5 else size[::-1]

    def pixels(self, factor: int = 1) -> Pixels:
        """See ``Photo``."""
        return np.array(self.image(factor))

    def image(self, factor: int = 1) -> Image.Image:
        """The same as a Pillow image, without the file's further data: by its EXIF it would be turned once more."""
        image = self._image or _opened(self._source)
        self._image = None  # an image is decoded at one scale only
        if factor > 1:
            image.draft(None, (image.width // factor, image.height // factor))
        photo = _rgb(image)
        upright = photo if self.orientation == 1 else photo.transpose(_UPRIGHT[self.orientation])
        upright.info = {}
        return upright


def _opened(source: bytes) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(source), formats=_FORMATS)
    except UnidentifiedImageError:  # whose words name an object in memory
        raise UnidentifiedImageError(
            f"Pillow found no picture in its {len(source):,} bytes ({', '.join(_FORMATS)})"
        ) from None
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
            f"the photo has mode {image.mode}, whose range of values is unknown. Convert it to 8 or 16 bits."
        )
    if image.mode in {"P", "PA", "La"} and "transparency" in image.info:
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1 where it is absent or invalid."""
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


JPEG = b"\xff\xd8\xff"
_EXIF = b"Exif\0\0"
_COLOURS = {"YCbCr", "RGB", "Gray"}


class TurboPhoto:
    """A JPEG whose header simplejpeg has read; ``ValueError`` if TurboJPEG cannot decode it. Pillow may."""

    def __init__(self, simplejpeg: Any, source: bytes) -> None:
        self._simplejpeg, self._source = simplejpeg, source
        height, width, colours, _ = simplejpeg.decode_jpeg_header(source)
        check_size(width, height)
        if colours not in _COLOURS:
            raise ValueError(f"{colours} cannot be converted to RGB")
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
            found: Pixels = self._simplejpeg.decode_jpeg(self._source, **smallest)
        except ValueError:
            return PillowPhoto(self._source).pixels(factor)
        if self._orientation == 1:
            return found
        return np.array(Image.fromarray(found).transpose(_UPRIGHT[self._orientation]))


def read_photo(path: str | Path, limit: int = MAX_BYTES) -> bytes:
    """The content of a photo's file; ``DataError`` for one of more than ``limit`` bytes, or no regular file."""
    # Half the time of Path.read_bytes; and a pipe without a writer would be waited for.
    with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise DataError("the photo is not a regular file, but a device or a pipe")
        if state.st_size > limit:
            raise DataError(
                f"the file of the photo has {state.st_size:,} bytes, more than the {limit:,} that are read. Make it "
                "smaller first, or raise the argument max_file_size of the data set."
            )
        return file.read()


def open_photo(source: bytes | str | Path) -> Photo:
    """Reads the header of a photo, given as the path of a file or as its content.

    ``OSError`` if the file cannot be read or is not a photo, ``DataError`` if it has more than ``MAX_BYTES`` or
    ``MAX_PIXELS``, or is not a regular file.
    """
    content = source if isinstance(source, bytes) else read_photo(source)
    simplejpeg = turbo_module() if content.startswith(JPEG) else None
    if simplejpeg is not None:
        try:
            return TurboPhoto(simplejpeg, content)
        except ValueError:
            pass  # an unusual or broken file: Pillow reads it, or says what is wrong
    return PillowPhoto(content)


def jpeg_decoder() -> str:
    """The JPEG decoder and its version, for people."""
    turbo = features.version("libjpeg_turbo")
    library = f"libjpeg-turbo {turbo}" if turbo else f"libjpeg {features.version('jpg')}"
    pillow = f"Pillow {PIL.__version__} ({library})"
    simplejpeg = turbo_module()
    return f"simplejpeg {simplejpeg.__version__}, else {pillow}" if simplejpeg is not None else pillow


@cache
def pixels_digest() -> str:
    """A hash of test photos as decoded here; equal wherever JPEGs are decoded to the same bits."""
    digest = hashlib.sha256()
    for source, factor in _trials():
        digest.update(PillowPhoto(source).pixels(factor).tobytes())
    return digest.hexdigest()[:16]


@cache
def turbo_module() -> Any:
    """simplejpeg; ``None`` where it is not installed, or gives another pixel than Pillow on the test photos."""
    try:
        simplejpeg = import_module("simplejpeg")
    except ImportError:
        return None
    return simplejpeg if agrees_with_pillow(simplejpeg) else None


def agrees_with_pillow(simplejpeg: Any) -> bool:
    """True if the module decodes the test photos to Pillow's bits (about 3 milliseconds)."""
    try:
        return all(
            np.array_equal(TurboPhoto(simplejpeg, source).pixels(factor), PillowPhoto(source).pixels(factor))
            for source, factor in _trials()
        )
    except ValueError:
        return False


def _trials() -> Iterator[tuple[bytes, int]]:
    """Photos of noise, whose every pixel depends on how chroma is smoothed, and the scales to decode them at."""
    noise = np.random.RandomState(0).randint(0, 256, (51, 83, 3)).astype(np.uint8)
    for subsampling in (0, 1, 2):
        file = io.BytesIO()
        Image.fromarray(noise).save(file, "JPEG", quality=90, subsampling=subsampling)
        for factor in (1, 2, 4, 8):
            yield file.getvalue(), factor


def decoded_as(dataset: Any) -> str:
    """``pixels_digest()`` of a set that decodes photos, also within ``Subset`` and our sets around sets; else empty.

    A set says so with the attribute ``decodes_photos``.
    """
    while not hasattr(dataset, "decodes_photos"):
        inner = getattr(dataset, "dataset", None)
        if inner is None or not (type(dataset) is Subset or hasattr(dataset, "inner_batch")):
            return ""
        dataset = inner
    return pixels_digest() if dataset.decodes_photos else ""
