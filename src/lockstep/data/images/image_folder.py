"""Photos in folders named after their classes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.core.plan import Indices
from lockstep.data.images.image_cache import FolderPhotos, ImageCache, Tell, default_folder, open_cache
from lockstep.data.images.transforms import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    SUFFIXES,
    CenterCrop,
    DeviceTransform,
    FinishAlias,
    ImageTransform,
    Normalize,
    RandomResizedCrop,
    Uniforms,
    decode_into,
    decode_rgb,
)
from lockstep.data.keyed import SampleKeys
from lockstep.data.naming import held_out
from lockstep.data.reader import BrokenSample
from lockstep.data.shared_buffers import image_buffer
from lockstep.errors import ConfigError, DataError, nearest

Split = Literal["train", "validation", "all"]

_TRAIN = ("train", "training")
_VALIDATION = ("validation", "val", "valid", "test")


@dataclass(frozen=True)
class FoundPhotos:
    """The photos of a split: the same on every machine that holds the same files."""

    classes: tuple[str, ...]
    """Class names; a label is a position here."""
    paths: list[str]
    """Photos below the root, with forward slashes, sorted."""
    labels: list[int]
    """The label of each photo."""


def find_photos(
    root: Path,
    split: Split,
    *,
    classes: Sequence[str] | str | Path | None = None,
    held_out_part: float = 0.2,
    seed: int = 0,
    split_by: Literal["auto", "folders", "seed"] = "auto",
) -> FoundPhotos:
    """Lists the photos of a split; ``DataError`` for a missing folder, an empty class, or unequal splits.

    See ``ImageFolder`` for the arguments.
    """
    if split not in ("train", "validation", "all"):
        raise ConfigError(
            f"ImageFolder has no split {split!r}.{nearest(split, ['train', 'validation', 'all'])}"
        )
    if not root.is_dir():
        raise DataError(
            f"The data folder {root} does not exist. Give a folder with one subfolder for each class."
        )
    folders = _split_folders(root) if split_by != "seed" else {}
    if split_by == "folders" and not folders:
        raise DataError(
            f"split_by='folders' was asked for, and {root} has no subfolders train and validation "
            "(or val, valid, test)."
        )
    if folders:
        names, parts = _parts_in_folders(root, folders, split, classes)
    else:
        found = _scan(root, root)
        names = _class_names(root, found, classes)
        _check_classes(root, found, names)
        parts = [_divided(found, split, held_out_part, seed)]
    labelled = sorted(
        (path, names.index(name)) for part in parts for name, paths in part.items() for path in paths
    )
    return FoundPhotos(names, [path for path, _ in labelled], [label for _, label in labelled])


def _parts_in_folders(
    root: Path, folders: dict[str, str], split: Split, classes: Sequence[str] | str | Path | None
) -> tuple[tuple[str, ...], list[dict[str, list[str]]]]:
    """The class names, and the photos of the wanted splits; both splits are checked in any case."""
    found = {name: _scan(root / folder, root) for name, folder in folders.items()}
    names = _class_names(root, found["train"] | found["validation"], classes)
    for name, folder in folders.items():
        _check_classes(root / folder, found[name], names)
    return names, [found[name] for name in folders if split in (name, "all")]


def _split_folders(root: Path) -> dict[str, str]:
    """The folders of the two splits by split, or nothing if there are not both."""
    present = {path.name.lower(): path.name for path in root.iterdir() if path.is_dir()}
    train = [present[name] for name in _TRAIN if name in present]
    validation = [present[name] for name in _VALIDATION if name in present]
    return {"train": train[0], "validation": validation[0]} if train and validation else {}


def _scan(folder: Path, root: Path) -> dict[str, list[str]]:
    """The photos of each class folder, at any depth, as paths below the root. Hidden folders are left out."""
    found = {}
    for entry in sorted(folder.iterdir()):
        if not entry.is_dir() or entry.name.startswith("."):
            continue
        paths = []
        for place, inner, files in os.walk(entry):
            inner[:] = [name for name in inner if not name.startswith(".")]
            relative = Path(place).relative_to(root).as_posix()
            paths += [f"{relative}/{name}" for name in files if _is_photo(name)]
        found[entry.name] = sorted(paths)
    return found


def _is_photo(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES  # noqa: PTH122 - 5x faster


def _class_names(
    root: Path, found: dict[str, list[str]], asked: Sequence[str] | str | Path | None
) -> tuple[str, ...]:
    if asked is None:
        if not found:
            raise DataError(
                f"{root} has no subfolders. It needs one for each class, with the class's photos in it."
            )
        return tuple(sorted(found))
    names = _read_names(Path(asked)) if isinstance(asked, (str, Path)) else tuple(asked)
    if len(set(names)) < len(names) or not names:
        raise DataError(
            f"The classes of {root} must be named once each, and there are {len(names)} names: {names}."
        )
    unknown = sorted(set(found) - set(names))
    if unknown:
        raise DataError(
            f"{root} has folders that are no class: {', '.join(unknown)}. Classes: {', '.join(names)}."
        )
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
            f"{folder} has no photos of the classes {', '.join(empty)}. "
            f"Add some, or remove the empty folders. Photos end in {', '.join(sorted(SUFFIXES))}."
        )


def _divided(found: dict[str, list[str]], split: Split, fraction: float, seed: int) -> dict[str, list[str]]:
    if split == "all":
        return found
    result = {}
    for name, paths in found.items():
        kept = held_out(paths, fraction, seed, f"Class {name}")
        result[name] = [path for path in paths if (path in kept) == (split == "validation")]
    return result


class ImageFolder(FinishAlias, Dataset[Any]):
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
    """

    rows_independent = True

    def __init__(
        self,
        root: str | Path,
        split: Split = "all",
        *,
        transform: ImageTransform | Callable[[Any], Any] | None = None,
        size: int = 224,
        classes: Sequence[str] | str | Path | None = None,
        held_out: float = 0.2,
        seed: int = 0,
        split_by: Literal["auto", "folders", "seed"] = "auto",
    ) -> None:
        self.root = Path(root)
        found = find_photos(
            self.root, split, classes=classes, held_out_part=held_out, seed=seed, split_by=split_by
        )
        self.classes = found.classes
        self.paths = found.paths
        self.labels = torch.tensor(found.labels, dtype=torch.int64)
        self.split = split
        if transform is None:
            transform = RandomResizedCrop(size) if split == "train" else CenterCrop(size)
        self.transform = transform
        own = isinstance(transform, ImageTransform)
        self.device_transform: DeviceTransform | None = (
            Normalize(IMAGENET_MEAN, IMAGENET_STD) if own else None
        )
        self.cache: ImageCache | None = None
        self.decodes_photos = True

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """The picture and its label. Random numbers come from torch's generator."""
        label = int(self.labels[index])
        transform = self.transform
        if not isinstance(transform, ImageTransform):
            return transform(self._photo(index)), label
        uniforms = torch.rand(transform.draws, dtype=torch.float64).numpy()
        picture = torch.empty(3, transform.size, transform.size, dtype=torch.uint8)
        self._cut_into(index, transform, uniforms, picture)
        return picture, label

    def __repr__(self) -> str:
        return f"ImageFolder {self.root.name}, {self.split}: {len(self)} photos, {len(self.classes)} classes"

    def use_cache(
        self, folder: str | Path | None = None, *, workers: int = 0, tell: Tell = lambda done, count: None
    ) -> Self:
        """Reads decoded photos from a file from now on, and makes that file if it is not there; no bit changes.

        The file is found by the names of the photos and the settings, and made anew when a photo has changed. For
        ``CenterCrop`` and ``Resize`` it holds the pictures, for other transforms the whole photos.

        Args:
            folder: where the file is kept; ``None`` for ``lockstep`` in the user's cache folder.
            workers: processes that decode; 0 decodes here. Other processes that ask for the same file wait.
            tell: called now and then with the number of photos that are done and of all.

        Raises:
            ConfigError: the folder cannot be written to, or has not enough room.
        """
        place = default_folder() if folder is None else Path(folder).expanduser()
        photos = FolderPhotos(self.root, self.paths)
        self.cache = open_cache(photos, self.transform, place, workers=workers, tell=tell)
        return self

    def sample_path(self, index: int) -> str:
        """The photo's path below ``root``."""
        return self.paths[index]

    @property
    def get_batch(self) -> Callable[[Indices, SampleKeys], tuple[Tensor, Tensor]] | None:
        """Decodes a whole micro-batch; ``None`` with a transform that takes one photo at a time."""
        return self._read_batch if isinstance(self.transform, ImageTransform) else None

    def _read_batch(self, indices: Indices, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        transform = self.transform
        assert isinstance(transform, ImageTransform)
        uniforms = keys.uniforms(transform.draws)
        pictures = image_buffer(len(indices), transform.size)
        for position, (index, numbers) in enumerate(zip(indices.tolist(), uniforms, strict=True)):
            try:
                self._cut_into(index, transform, numbers, pictures[position])
            except Exception as error:
                raise BrokenSample(position) from error
        return pictures, self.labels.index_select(0, torch.from_numpy(indices))

    def _cut_into(self, index: int, transform: ImageTransform, uniforms: Uniforms, out: Tensor) -> None:
        if self.cache is None:
            decode_into(f"{self.root}/{self.paths[index]}", transform, uniforms, out)
        else:
            self.cache.cut_into(index, transform, uniforms, out)

    def _photo(self, index: int) -> Image.Image:
        if self.cache is None:
            return decode_rgb(f"{self.root}/{self.paths[index]}")
        return Image.fromarray(self.cache.photo(index).pixels())
