"""Photos in folders named after their classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.data.finish import IMAGENET_MEAN, IMAGENET_STD, Normalize
from lockstep.data.folders import Split, find_photos
from lockstep.data.image_arrays import Finish
from lockstep.data.image_transforms import CenterCrop, ImageTransform, RandomResizedCrop, Uniforms
from lockstep.data.images import decode_into, decode_rgb
from lockstep.data.keyed import SampleKeys
from lockstep.data.photo_cache import FolderPhotos, PhotoCache, Tell, default_folder, open_cache
from lockstep.data.reader import BrokenSample
from lockstep.data.rooms import room_for_pictures
from lockstep.permutation import Indices


class ImageFolder(Dataset[Any]):
    """Photos under ``root/<class>/``, at any depth, in any file format that Pillow reads.

    ``dataset[i]`` is the pair ``(picture, label)``. With the transforms of ``lockstep.data`` a picture is
    ``uint8`` of shape (3, size, size) and is decoded, cut, resized and mirrored straight into its place in
    the micro-batch; the attribute ``finish`` then normalises on the device. Any other callable gets the photo
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

    rows_alone = True

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
        self.finish: Finish | None = Normalize(IMAGENET_MEAN, IMAGENET_STD) if own else None
        self.cache: PhotoCache | None = None
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
        ``CenterCrop`` and ``Squeeze`` it holds the pictures, for other transforms the whole photos.

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
        pictures = room_for_pictures(len(indices), transform.size)
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
