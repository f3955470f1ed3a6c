"""IDX files: the MNIST family (MNIST, Fashion-MNIST, KMNIST, EMNIST), plain or compressed."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from lockstep.data.batch import DeviceTransform
from lockstep.data.images.image_arrays import ArrayTransform, ImageArrays
from lockstep.data.images.transforms import Normalize
from lockstep.data.labels import class_names
from lockstep.errors import ConfigError, DataError

MAX_BYTES = 4 << 30
"""Files that announce more than this are refused."""

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_PREFIX = {"train": "train", "validation": "t10k"}


class IDX(ImageArrays):
    """Labelled images in IDX files, ``uint8`` of shape (1, height, width); ``device_transform`` makes floats of them.

    Reads ``train-images-idx3-ubyte`` and ``train-labels-idx1-ubyte`` for training, ``t10k-…`` for validation,
    with or without ``.gz``, also with a dot before ``idx``.

    Args:
        root: the folder.
        split: ``train`` or ``validation``.
        classes: number of classes, or their names.
        transform: see ``ImageArrays``.
        device_transform: ``None`` leaves the pixels as they are.
        finish: deprecated name of ``device_transform``.
    """

    def __init__(
        self,
        root: str | Path,
        split: Literal["train", "validation"] = "train",
        *,
        classes: int | Sequence[str] = 10,
        transform: ArrayTransform | Callable[[Any], Any] | None = None,
        device_transform: DeviceTransform | None = Normalize(),  # noqa: B008 - a frozen value
        finish: Any = ...,
    ) -> None:
        if split not in _PREFIX:
            raise ConfigError(f"IDX has no split {split!r}. Known: train, validation.")
        image_file, label_file = _find(Path(root), split, "images", 3), _find(Path(root), split, "labels", 1)
        images, labels = read_idx(image_file, dims=3), read_idx(label_file, dims=1)
        for file, array in ((image_file, images), (label_file, labels)):
            if array.dtype != np.uint8:
                raise DataError(f"{file} holds values of type {array.dtype}; images and labels must be bytes.")
        if len(images) != len(labels):
            raise DataError(
                f"{image_file} holds {len(images)} images and {label_file.name} {len(labels)} labels. "
                "Take both files from the same set."
            )
        self._label_file = label_file.name
        super().__init__(
            torch.from_numpy(images)[:, None],
            torch.from_numpy(labels),
            classes=class_names(classes),
            name=f"{Path(root).name}, {split}",
            transform=transform,
            device_transform=device_transform,
            finish=finish,
        )

    def sample_path(self, index: int) -> str:
        """The file of a sample's label and its position there."""
        return f"{self._label_file}, entry {index}"


def read_idx(path: str | Path, *, dims: int | None = None) -> npt.NDArray[Any]:
    """The array in an IDX file, which may be compressed by gzip.

    ``DataError`` if the file is not an IDX file, is shorter or longer than its header says, or does not have
    ``dims`` dimensions.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if compressed else path.open("rb") as stream:
            return _read(stream, path, dims)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be decompressed: {error}. Download it again.") from error
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist.") from error


def _read(stream: IO[bytes] | gzip.GzipFile, path: Path, dims: int | None) -> npt.NDArray[Any]:
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _TYPES or magic[3] == 0:
        raise DataError(
            f"{path} is not an IDX file: it begins with {magic.hex(' ') or 'nothing'}, not with 00 00 and a known type."
        )
    if dims is not None and magic[3] != dims:
        raise DataError(f"{path} has {magic[3]} dimensions, and {dims} are needed. Images have 3, labels have 1.")
    header = stream.read(4 * magic[3])
    if len(header) < 4 * magic[3]:
        raise DataError(f"{path} is truncated within its header. Download it again.")
    shape = struct.unpack(f">{magic[3]}I", header)
    kind = np.dtype(_TYPES[magic[2]])
    size = math.prod(shape) * kind.itemsize
    if size == 0 or size > MAX_BYTES:
        raise DataError(f"{path} should have {size:,} bytes ({shape}); 1 to {MAX_BYTES:,} can be read.")
    body = stream.read(size)
    if len(body) < size or stream.read(1):
        found = f"only {len(body):,}" if len(body) < size else "more"
        raise DataError(f"{path} should have {size:,} bytes ({shape}) and has {found}. Download it again.")
    values = np.frombuffer(bytearray(body), dtype=kind).reshape(shape)
    return values.astype(kind.newbyteorder("="), copy=False)


def _find(root: Path, split: str, what: str, dims: int) -> Path:
    if not root.is_dir():
        raise DataError(f"The data folder {root} does not exist.")
    stem = f"{_PREFIX[split]}-{what}"
    names = [f"{stem}{dot}idx{dims}-ubyte{end}" for dot in "-." for end in ("", ".gz")]
    for name in names:
        if (root / name).is_file():
            return root / name
    raise DataError(f"{root} has no {stem} file. Looked for {', '.join(names)}.")
