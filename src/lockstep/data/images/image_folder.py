"""Photos in folders named after their classes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from PIL import Image

from lockstep.core.seeding import held_out
from lockstep.data.images.decoding import MAX_BYTES, read_photo
from lockstep.data.images.encoded import EncodedPairs
from lockstep.data.images.image_cache import FolderPhotos
from lockstep.data.images.transforms import SUFFIXES, CenterCrop, RandomResizedCrop, Transform, decode_rgb
from lockstep.data.labels import class_names
from lockstep.errors import ConfigError, DataError, nearest

Split = Literal["train", "validation", "all"]

_TRAIN = ("train", "training")
_VALIDATION = ("validation", "val", "valid", "test")


def _find_photos(
    root: Path,
    split: Split,
    classes: Sequence[str] | str | Path | None,
    fraction: float,
    seed: int,
    split_by: Literal["auto", "folders", "seed"],
) -> tuple[tuple[str, ...], list[tuple[str, int]]]:
    """The class names, and the path below the root and the label of each photo of the split, sorted by path.

    The same on every machine that holds the same files. ``DataError`` for a missing folder, an empty class, or splits
    with different classes.
    """
    if split not in ("train", "validation", "all"):
        raise ConfigError(f"ImageFolder has no split {split!r}.{nearest(split, ['train', 'validation', 'all'])}")
    if not root.is_dir():
        raise DataError(f"The data folder {root} does not exist. Give a folder with one subfolder for each class.")
    if split_by not in (known := ("auto", "folders", "seed")):
        raise ConfigError(f"split_by={split_by!r} is not known.{nearest(str(split_by), known)}")
    folders = _split_folders(root) if split_by != "seed" else {}
    if split_by == "folders" and not folders:
        raise DataError(
            f"split_by='folders' was asked for, and {root} has no subfolders train and validation "
            "(or val, valid, test)."
        )
    places = {name: root / folder for name, folder in (folders or {"all": "."}).items()}
    found = {name: _scan(place, root) for name, place in places.items()}
    names = _class_names(root, set[str]().union(*found.values()), classes)
    for name, place in places.items():  # also of a split that is not asked for
        _check_classes(place, found[name], names)
    if folders:
        parts = [found[name] for name in folders if split in (name, "all")]
    else:
        parts = [_divided(found["all"], split, fraction, seed)]
    return names, sorted((path, names.index(name)) for part in parts for name, paths in part.items() for path in paths)


def _split_folders(root: Path) -> dict[str, str]:
    """The folders of the two splits by split, or nothing if there are not both."""
    present = {path.name.lower(): path.name for path in sorted(root.iterdir()) if path.is_dir()}
    train = [present[name] for name in _TRAIN if name in present]
    validation = [present[name] for name in _VALIDATION if name in present]
    return {"train": train[0], "validation": validation[0]} if train and validation else {}


def _scan(folder: Path, root: Path) -> dict[str, list[str]]:
    """The photos of each class folder, at any depth, as paths below the root. Hidden folders are left out."""
    return {
        entry.name: sorted(_photos_below(entry, root))
        for entry in sorted(folder.iterdir())
        if entry.is_dir() and not entry.name.startswith(".")
    }


def _photos_below(folder: Path, root: Path) -> Iterator[str]:
    """The photos in a folder, at any depth, as paths below the root. Hidden files and folders are left out."""
    for place, inner, files in os.walk(folder):
        inner[:] = [name for name in inner if not name.startswith(".")]
        relative = Path(place).relative_to(root).as_posix().removeprefix(".")
        for name in files:
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES:  # noqa: PTH122 - 5x faster
                yield f"{relative}/{name}" if relative else name


def _class_names(root: Path, found: set[str], asked: Sequence[str] | str | Path | None) -> tuple[str, ...]:
    """The names that were asked for, else those of the folders that were found."""
    if asked is None:
        if not found:
            raise DataError(f"{root} has no subfolders. It needs one for each class, with the class's photos in it.")
        return tuple(sorted(found))
    names = _read_names(Path(asked)) if isinstance(asked, (str, Path)) else class_names(asked)
    if len(set(names)) < len(names) or not names:
        raise DataError(f"The classes of {root} must be named once each, and there are {len(names)} names: {names}.")
    unknown = sorted(found - set(names))
    if unknown:
        raise DataError(f"{root} has folders that are not classes: {', '.join(unknown)}. Classes: {', '.join(names)}.")
    return names


def _read_names(path: Path) -> tuple[str, ...]:
    if not path.is_file():
        raise DataError(f"The file of class names {path} does not exist.")
    return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


def _check_classes(folder: Path, found: dict[str, list[str]], names: Sequence[str]) -> None:
    absent = [name for name in names if name not in found]
    if absent:
        raise DataError(f"{folder} has no folder for the classes {', '.join(absent)}, which exist elsewhere.")
    empty = [name for name in names if not found[name]]
    if empty:
        raise DataError(
            f"{folder} has folders without photos: {', '.join(map(repr, empty))}. "
            f"Add some, or remove these folders. Photos end in {', '.join(sorted(SUFFIXES))}."
        )


def _divided(found: dict[str, list[str]], split: Split, fraction: float, seed: int) -> dict[str, list[str]]:
    if split == "all":
        return found
    result = {}
    for name, paths in found.items():
        kept = held_out(paths, fraction, seed, f"Class {name}")
        result[name] = [path for path in paths if (path in kept) == (split == "validation")]
    return result


class PhotoFiles(EncodedPairs):
    """The photos of a folder, at any depth, without labels; ``dataset[i]`` is the pair ``(picture, i)``.

    For ``run.predict``. Pictures and transforms are as in ``ImageFolder``.

    Args:
        root: the folder, or one photo.
        transform: ``None`` for ``CenterCrop(size)``.
        size: height and width of the pictures, where no transform is given.
        paths: the photos below ``root``, in order; ``None`` for all, sorted.
        max_file_size: bytes; a photo whose file has more is refused unread, as a broken one is.

    Raises:
        ConfigError: ``max_file_size`` is less than 1.
        DataError: there is no such folder, or no photo in it.
    """

    decodes_photos = True
    get_batch = EncodedPairs.get_batch
    rows_independent = True  # of this get_batch

    def __init__(
        self,
        root: str | Path,
        *,
        transform: Transform | None = None,
        size: int = 224,
        paths: Sequence[str] | None = None,
        max_file_size: int = MAX_BYTES,
    ) -> None:
        super().__init__(CenterCrop(size) if transform is None else transform)
        if max_file_size < 1:
            raise ConfigError(f"max_file_size={max_file_size} was given; it must be at least 1 byte.")
        self.max_file_size = max_file_size
        self.root = Path(root)
        if paths is None and self.root.is_file():
            self.root, paths = self.root.parent, [self.root.name]
        self.paths = sorted(_photos_below(self.root, self.root)) if paths is None else list(paths)
        if not self.paths:
            raise DataError(f"{root} is not a folder with photos in it. Photos end in {', '.join(sorted(SUFFIXES))}.")

    def __len__(self) -> int:
        return len(self.paths)

    def __repr__(self) -> str:
        return f"PhotoFiles {self.root.name}: {len(self):,} photos"

    def sample_path(self, index: int) -> str:
        """The photo's path below ``root``."""
        return self.paths[index]

    def _photos(self) -> FolderPhotos:
        return FolderPhotos(self.root, self.paths, self.max_file_size)

    def _picture(self, index: int) -> bytes:
        return read_photo(f"{self.root}/{self.paths[index]}", self.max_file_size)

    def _input(self, index: int) -> Image.Image:
        if self.cache is None:
            return decode_rgb(self._picture(index))
        return Image.fromarray(self.cache.photo(index).pixels())

    def _target(self, index: int) -> int:
        return index


class ImageFolder(PhotoFiles):
    """Photos under ``root/<class>/``, at any depth, in any file format that Pillow reads.

    ``dataset[i]`` is the pair ``(picture, label)``. With the transforms of ``lockstep.data`` a picture is
    ``uint8`` of shape (3, size, size) and is decoded, cut, resized and mirrored straight into its place in
    the micro-batch; the attribute ``device_transform`` then normalises on the device. Any other callable gets the photo
    as a PIL image in RGB.

    Args:
        root: the folder. If it has subfolders ``train`` and ``validation`` (or ``val``, ``valid``, ``test``)
            that hold the classes, they are the splits; else the photos of each class are divided by the seed.
        split: ``train``, ``validation`` or ``all``.
        transform: ``None`` for ``RandomResizedCrop(size)`` in training and ``CenterCrop(size)`` elsewhere.
        size: height and width of the pictures, where no transform is given.
        classes: the class names in the order of their labels, or a text file with one in each line; ``None``
            for the folders in alphabetical order.
        held_out: the part of each class that is for validation, where the seed divides.
        seed: another seed holds out other photos; training and validation need the same one.
        split_by: ``auto`` as said under ``root``, or ``folders`` or ``seed`` to insist on one.
        max_file_size: bytes; a photo whose file has more is refused unread, as a broken one is.
    """

    def __init__(
        self,
        root: str | Path,
        split: Split = "all",
        *,
        transform: Transform | None = None,
        size: int = 224,
        classes: Sequence[str] | str | Path | None = None,
        held_out: float = 0.2,
        seed: int = 0,
        split_by: Literal["auto", "folders", "seed"] = "auto",
        max_file_size: int = MAX_BYTES,
    ) -> None:
        self.classes, labelled = _find_photos(Path(root), split, classes, held_out, seed, split_by)
        if transform is None:
            transform = RandomResizedCrop(size) if split == "train" else CenterCrop(size)
        paths = [path for path, _ in labelled]
        super().__init__(root, transform=transform, paths=paths, max_file_size=max_file_size)
        self.labels = torch.tensor([label for _, label in labelled], dtype=torch.int64)
        self.split = split

    def __repr__(self) -> str:
        return f"ImageFolder {self.root.name}, {self.split}: {len(self):,} photos, {len(self.classes)} classes"

    def _target(self, index: int) -> int:
        return int(self.labels[index])
