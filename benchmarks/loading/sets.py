"""The data sets: the bundled digits, and files of the published sizes with random pixels in a temporary folder."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from lockstep.data import CIFAR10, IDX, Digits, PadCropFlip

_RANDOM = np.random.default_rng(0)


@contextmanager
def data_sets() -> Iterator[dict[str, tuple[Any, int]]]:
    """Each training set by name, with the numbers of one sample."""
    with TemporaryDirectory(prefix="lockstep-loading-") as folder:
        cifar10, idx = Path(folder) / "cifar10", Path(folder) / "idx"
        _write_cifar10(cifar10)
        _write_idx(idx)
        yield {
            "digits": (Digits(split="train"), 64),
            "IDX (60,000 of 28 x 28)": (IDX(idx), 784),
            "CIFAR-10": (CIFAR10(cifar10), 3072),
            "CIFAR-10 with pad, crop, flip": (CIFAR10(cifar10, transform=PadCropFlip()), 3072),
        }


def _write_cifar10(folder: Path) -> None:
    folder.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        labels = _RANDOM.integers(0, 10, (10_000, 1), dtype=np.uint8)
        pixels = _RANDOM.integers(0, 256, (10_000, 3072), dtype=np.uint8)
        (folder / f"{name}.bin").write_bytes(np.concatenate([labels, pixels], axis=1).tobytes())


def _write_idx(folder: Path) -> None:
    folder.mkdir()
    images = _RANDOM.integers(0, 256, (60_000, 28, 28), dtype=np.uint8)
    labels = _RANDOM.integers(0, 10, 60_000, dtype=np.uint8)
    for array, name in ((images, "train-images-idx3-ubyte"), (labels, "train-labels-idx1-ubyte")):
        head = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        (folder / name).write_bytes(head + array.tobytes())
