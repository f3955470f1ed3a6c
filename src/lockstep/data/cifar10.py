"""CIFAR-10 in each form it is found in, wholly in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import torch

from lockstep.data.archive import files_of
from lockstep.data.finish import Normalize
from lockstep.data.image_arrays import ArrayTransform, Finish, ImageArrays
from lockstep.data.images import SUFFIXES, decode_rgb
from lockstep.data.safe_pickle import load_arrays
from lockstep.errors import ConfigError, DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)

_FILES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "validation": ["test_batch"]}
_FOLDERS = {"train": ("train",), "validation": ("test", "validation", "val")}
_RECORD = 1 + 3 * 32 * 32

Arrays = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]


class CIFAR10(ImageArrays):
    """50,000 images for training and 10,000 for validation, ``uint8`` of shape (3, 32, 32), in 10 classes.

    Reads the python version, the binary version, or a folder ``train/<class>``, ``test/<class>`` of image
    files; each unpacked or as a tar archive. The pickles of the python version are read without running them.

    Args:
        root: folder or archive.
        split: ``train`` or ``validation`` (published as "test").
        transform: see ``ImageArrays``; ``PadCropFlip()`` is the usual one for training.
        finish: applied on the device; by default the usual normalisation.
        images_per_file: how many images each published file must hold; ``None`` takes any number.
    """

    def __init__(
        self,
        root: str | Path,
        split: Literal["train", "validation"] = "train",
        *,
        transform: ArrayTransform | Callable[[Any], Any] | None = None,
        finish: Finish | None = Normalize(CIFAR10_MEAN, CIFAR10_STD),  # noqa: B008 - a frozen value
        images_per_file: int | None = 10_000,
    ) -> None:
        if split not in _FILES:
            raise ConfigError(f"CIFAR10 has no split {split!r}. Known: train, validation.")
        self._files: list[tuple[str, int]] = []
        images, labels = self._load(Path(root), split, images_per_file)
        super().__init__(
            torch.from_numpy(images),
            torch.from_numpy(labels),
            classes=CLASSES,
            name=f"CIFAR-10, {split}",
            transform=transform,
            finish=finish,
        )

    def sample_path(self, index: int) -> str:
        """The file a sample comes from, and its number there."""
        entry = index
        for path, count in self._files:
            if entry < count:
                return path if count == 1 else f"{path}, entry {entry}"
            entry -= count
        raise IndexError(index)

    def _load(self, root: Path, split: str, images_per_file: int | None) -> Arrays:
        files = {str(path): content for path, content in files_of(root, lambda path: _is_wanted(path, split))}
        published = {
            PurePosixPath(path).name.removesuffix(".bin"): path for path in files if not _is_photo(path)
        }
        if not published:
            return self._load_photos(root, split, files)
        missing = [name for name in _FILES[split] if name not in published]
        if missing:
            raise DataError(
                f"{root} has {', '.join(published)} but not {', '.join(missing)}. Download it again."
            )
        parts = []
        for path in (published[name] for name in _FILES[split]):
            images, labels = (_binary if path.endswith(".bin") else _pickled)(files[path], path)
            if images_per_file is not None and len(images) != images_per_file:
                raise DataError(f"{path} holds {len(images):,} images instead of {images_per_file:,}.")
            self._files.append((path, len(images)))
            parts.append((images, labels))
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def _load_photos(self, root: Path, split: str, files: dict[str, bytes]) -> Arrays:
        self._files = [(path, 1) for path in sorted(files)]
        labels = [CLASSES.index(PurePosixPath(path).parts[-2]) for path, _ in self._files]
        empty = [name for label, name in enumerate(CLASSES) if label not in labels]
        if empty:
            raise DataError(
                f"{root} has no images of {', '.join(empty)} for {split}. It needs the python version "
                f"({_FILES[split][0]}), the binary version ({_FILES[split][0]}.bin), or folders "
                f"{_FOLDERS[split][0]}/<class> for all ten classes."
            )
        return np.stack([_pixels(files.pop(path), path) for path, _ in self._files]), np.array(labels)


def _is_wanted(path: PurePosixPath, split: str) -> bool:
    if path.name.removesuffix(".bin") in _FILES[split]:
        return True
    folders = path.parts[-3:-1]
    return _is_photo(path) and len(folders) == 2 and folders[0] in _FOLDERS[split] and folders[1] in CLASSES


def _is_photo(path: str | PurePosixPath) -> bool:
    return PurePosixPath(path).suffix.lower() in SUFFIXES


def _pickled(content: bytes, path: str) -> Arrays:
    found = load_arrays(content, path)
    images, labels = found.get("data"), found.get("labels")
    if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != _RECORD - 1:
        raise DataError(f"{path} has no array 'data' of {_RECORD - 1} bytes for each image.")
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise DataError(f"{path} has no list 'labels' of whole numbers.")
    if len(labels) != len(images):
        raise DataError(f"{path} holds {len(images)} images and {len(labels)} labels.")
    return images.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64)


def _binary(content: bytes, path: str) -> Arrays:
    if not content or len(content) % _RECORD:
        raise DataError(
            f"{path} has {len(content):,} bytes, which is no multiple of {_RECORD:,} "
            "(a label and 3 x 32 x 32 pixels). Download it again."
        )
    records = np.frombuffer(bytearray(content), dtype=np.uint8).reshape(-1, _RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def _pixels(content: bytes, path: str) -> np.ndarray[Any, Any]:
    try:
        photo = decode_rgb(content)
    except Exception as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if photo.size != (32, 32):
        raise DataError(f"{path} has {photo.width} x {photo.height} pixels instead of 32 x 32.")
    return np.asarray(photo).transpose(2, 0, 1)
