"""Chooses who decodes a photo: simplejpeg where it is installed and gives Pillow's bits, Pillow for all else."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from PIL import Image, features

from lockstep.data.decoding.photo import Photo, Pixels
from lockstep.data.decoding.pillow import PillowPhoto
from lockstep.data.decoding.turbo import JPEG, TurboPhoto


def open_photo(source: bytes | str | Path) -> Photo:
    """Reads the header of a photo.

    Args:
        source: the path of a file, or its content.

    Raises:
        OSError: the file cannot be read, or is no photo.
        DataError: it has more than ``MAX_PIXELS``.
    """
    content = source if isinstance(source, bytes) else _content(source)
    simplejpeg = turbo_module() if content.startswith(JPEG) else None
    if simplejpeg is not None:
        try:
            return TurboPhoto(simplejpeg, content)
        except ValueError:
            pass  # an unusual or broken file: Pillow reads it, or says what is wrong
    return PillowPhoto(content)


def jpeg_decoder() -> str:
    """What decodes JPEGs here, with versions, for people."""
    pillow = f"Pillow {PIL.__version__} ({_library()})"
    simplejpeg = turbo_module()
    return f"simplejpeg {simplejpeg.__version__}, else {pillow}" if simplejpeg is not None else pillow


@cache
def pixels_digest() -> str:
    """What the bits of JPEGs depend on: a hash of test photos as decoded here, equal wherever their pixels are."""
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
    """Whether the module decodes the test photos to Pillow's bits (about 3 milliseconds)."""
    return all(
        np.array_equal(_turbo_pixels(simplejpeg, source, factor), PillowPhoto(source).pixels(factor))
        for source, factor in _trials()
    )


def _content(path: str | Path) -> bytes:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - half the time of Path.read_bytes
        return file.read()


def _turbo_pixels(simplejpeg: Any, source: bytes, factor: int) -> Pixels:
    try:
        return TurboPhoto(simplejpeg, source).pixels(factor)
    except ValueError:
        return np.empty((0, 0, 3), dtype=np.uint8)


def _trials() -> Iterator[tuple[bytes, int]]:
    """Photos of noise, whose every pixel depends on how chroma is smoothed, and the scales to decode them at."""
    noise = np.random.RandomState(0).randint(0, 256, (51, 83, 3)).astype(np.uint8)
    for subsampling in (0, 1, 2):
        file = io.BytesIO()
        Image.fromarray(noise).save(file, "JPEG", quality=90, subsampling=subsampling)
        for factor in (1, 2, 4, 8):
            yield file.getvalue(), factor


def _library() -> str:
    turbo = features.version("libjpeg_turbo")
    return f"libjpeg-turbo {turbo}" if turbo else f"libjpeg {features.version('jpg')}"
