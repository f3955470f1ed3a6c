"""Photos in folders named after their classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from lockstep.data.finish import IMAGENET_MEAN, IMAGENET_STD, Normalize
from lockstep.data.folders import Split, find_photos
from lockstep.data.image_arrays import Finish
from lockstep.data.image_transforms import CenterCrop, ImageTransform, RandomResizedCrop
from lockstep.data.images import decode_into, decode_rgb
from lockstep.data.keyed import SampleKeys
from lockstep.data.reader import BrokenSample
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

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """The picture and its label. Random numbers come from torch's generator."""
        label = int(self.labels[index])
        if not isinstance(self.transform, ImageTransform):
            return self.transform(decode_rgb(self.root / self.paths[index])), label
        transform = self.transform
        uniforms = torch.rand(transform.draws, dtype=torch.float64).numpy()
        picture = torch.empty(3, transform.size, transform.size, dtype=torch.uint8)
        decode_into(self.root / self.paths[index], transform, uniforms, picture)
        return picture, label

    def __repr__(self) -> str:
        return f"ImageFolder {self.root.name}, {self.split}: {len(self)} photos, {len(self.classes)} classes"

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
        pictures = _room(len(indices), transform.size)
        for position, (index, numbers) in enumerate(zip(indices.tolist(), uniforms, strict=True)):
            try:
                decode_into(self.root / self.paths[index], transform, numbers, pictures[position])
            except Exception as error:
                raise BrokenSample(position) from error
        return pictures, self.labels.index_select(0, torch.from_numpy(indices))


def _room(count: int, size: int) -> Tensor:
    """Memory for pictures; in a worker it is shared with the training process, which then needs no copy."""
    shape = (count, 3, size, size)
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(count * 3 * size * size)  # type: ignore[no-untyped-call]  # torch
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)
