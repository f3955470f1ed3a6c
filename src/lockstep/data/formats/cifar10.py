"""CIFAR-10 in each form in which it is distributed, wholly in memory.

Files are read from a folder or a tar archive alike, without unpacking to disk. A pickle is a program that may call any
function: here only five names exist, and each stands for an inert record of its arguments. NumPy never sees them; the
array is made from the recorded bytes after type and size are checked.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from lockstep.data.batch import DeviceTransform
from lockstep.data.formats.tar_shards import BoundedTarInfo
from lockstep.data.images.image_arrays import ArrayTransform, ImageArrays
from lockstep.data.images.transforms import SUFFIXES, Normalize, decode_rgb
from lockstep.errors import ConfigError, DataError

LARGEST = 4 << 30
"""Bytes that the wanted files of one archive may hold together: a small archive can unpack to any size."""
_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")


def files_of(source: Path, wanted: Callable[[PurePosixPath], bool]) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Yields the path and content of each wanted regular file of a folder or tar archive, in no particular order.

    Paths are relative to the folder, or as in the archive.
    """
    if source.is_dir():
        for path in source.rglob("*"):
            relative = PurePosixPath(path.relative_to(source).as_posix())
            if wanted(relative) and path.is_file():
                yield relative, path.read_bytes()
        return
    if not source.is_file():
        raise DataError(f"The data folder or archive {source} does not exist.")
    if not source.name.lower().endswith(_SUFFIXES):
        raise DataError(f"{source} is neither a folder nor an archive ({', '.join(_SUFFIXES)}).")
    try:
        with tarfile.open(source, "r|*", tarinfo=BoundedTarInfo) as archive:
            left = LARGEST
            for member in archive:
                name = PurePosixPath(member.name)
                if not (member.isreg() and wanted(name)):
                    continue
                left -= member.size
                if left < 0:
                    raise DataError(
                        f"{source} unpacks to more than {LARGEST:,} bytes (reached at {member.name!r}), too much "
                        "to be read into memory. Unpack it into a folder of images."
                    )
                if (file := archive.extractfile(member)) is not None:
                    yield name, file.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{source} cannot be unpacked: {error}. Download it again.") from error


class _Record:
    """Stands for an object that the pickle wants to build: keeps what it was given and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(_Record):
    pass


class _Type(_Record):
    pass


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in {"latin1", "latin-1"}:
        raise pickle.UnpicklingError(f"bytes have an unknown encoding ({encoding!r})")
    return text.encode("latin1")


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a file of images does not need")
        return _ALLOWED[module, name]


_LARGEST_BITS = 63


def _check_numbers(data: bytes) -> None:
    """Refuses the numbers for which the unpickler would take memory beyond the size of the file."""
    stream = io.BytesIO(data)
    opcodes = {opcode.code.encode("latin1"): opcode for opcode in pickletools.opcodes}
    while (code := stream.read(1)) not in (b"", b"."):
        if code not in opcodes:
            raise pickle.UnpicklingError(f"it has an unknown opcode {code!r}")
        opcode = opcodes[code]
        if opcode.name == "STRING":
            # Of Python 2, where it may hold bytes that the table's reader does not take.
            stream.readline()
            continue
        number = opcode.arg.reader(stream) if opcode.arg else None
        if not isinstance(number, int):
            continue
        if number.bit_length() > _LARGEST_BITS or ("PUT" in opcode.name and number > len(data)):
            raise pickle.UnpicklingError(f"it has a number of {number.bit_length()} bits in {opcode.name}")


def load_arrays(data: bytes, name: str) -> dict[str, Any]:
    """The dictionary in a pickle: arrays of bytes, lists, numbers and strings. ``DataError`` for anything else."""
    try:
        _check_numbers(data)
        found = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:
        raise DataError(f"{name} cannot be read: {error}. Nothing of it was used.") from error
    if not isinstance(found, dict):
        raise DataError(f"{name} holds a {type(found).__name__}, not a dictionary. Nothing of it was used.")
    return {
        key.decode("latin1") if isinstance(key, bytes) else str(key): (
            _array(value, name) if isinstance(value, _Array) else value
        )
        for key, value in found.items()
    }


def _array(record: _Array, name: str) -> npt.NDArray[np.uint8]:
    """The array of a record ``(version, shape, type, in Fortran order, bytes)`` of bytes."""
    state = record.state
    if not (isinstance(state, tuple) and len(state) == 5 and isinstance(state[2], _Type)):
        raise DataError(f"{name} holds an array in an unknown form. Nothing of it was used.")
    _, shape, kind, fortran, body = state
    if kind.arguments[:1] not in {("u1",), (b"u1",)} or not isinstance(body, bytes):
        raise DataError(f"{name} holds an array whose elements are not bytes. Nothing of it was used.")
    if not isinstance(shape, tuple) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise DataError(f"{name} holds an array of unknown shape. Nothing of it was used.")
    if math.prod(shape) != len(body):
        raise DataError(f"{name} holds an array of shape {shape} with {len(body)} bytes. Nothing of it was used.")
    return np.frombuffer(bytearray(body), dtype=np.uint8).reshape(shape, order="F" if fortran else "C")


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
        device_transform: applied on the device; by default the usual normalisation.
        images_per_file: how many images each published file must hold; ``None`` takes any number.
        finish: deprecated name of ``device_transform``.
    """

    def __init__(
        self,
        root: str | Path,
        split: Literal["train", "validation"] = "train",
        *,
        transform: ArrayTransform | Callable[[Any], Any] | None = None,
        device_transform: DeviceTransform | None = Normalize(CIFAR10_MEAN, CIFAR10_STD),  # noqa: B008 - a frozen value
        finish: Any = ...,
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
            device_transform=device_transform,
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
        published = {PurePosixPath(path).name.removesuffix(".bin"): path for path in files if not _is_photo(path)}
        if not published:
            return self._load_photos(root, split, files)
        missing = [name for name in _FILES[split] if name not in published]
        if missing:
            raise DataError(f"{root} has {', '.join(published)} but not {', '.join(missing)}. Download it again.")
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
        raise DataError(f"{path} has no list 'labels' of integers.")
    if len(labels) != len(images):
        raise DataError(f"{path} holds {len(images)} images and {len(labels)} labels.")
    return images.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64)


def _binary(content: bytes, path: str) -> Arrays:
    if not content or len(content) % _RECORD:
        raise DataError(
            f"{path} has {len(content):,} bytes, which is not a multiple of {_RECORD:,} "
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
