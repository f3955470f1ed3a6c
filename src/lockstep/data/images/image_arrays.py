"""Labelled images that are all in memory, and the handwritten digits that come with the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.core.plan import Indices
from lockstep.core.seeding import held_out
from lockstep.data.batch import DeviceTransform
from lockstep.data.images.transforms import FinishAlias, Uniforms, renamed_finish
from lockstep.data.keyed import SampleKeys
from lockstep.data.labels import check_labels
from lockstep.errors import ConfigError


@runtime_checkable
class ArrayTransform(Protocol):
    """A transform of many images at once, each with its own random numbers."""

    @property
    def draws(self) -> int:
        """The number of uniform numbers that one image takes."""

    def transform(self, images: Tensor, uniforms: Uniforms) -> Tensor:
        """The transformed images; row ``i`` depends only on row ``i`` of both arguments."""


@dataclass(frozen=True)
class PadCropFlip:
    """Pads with zeros, cuts a random window of the old size, and mirrors half of the images.

    The usual augmentation of CIFAR-10.

    Args:
        padding: pixels added on each side.
        flip: probability of mirroring left and right; 0 for digits and letters.
    """

    padding: int = 4
    flip: float = 0.5
    draws = 3  # two for the place, one for mirroring

    def __post_init__(self) -> None:
        if self.padding < 0 or not 0 <= self.flip <= 1:
            raise ConfigError(
                f"PadCropFlip has padding={self.padding} and flip={self.flip:g}; "
                "padding must not be negative, and flip must be a probability from 0 to 1."
            )

    def transform(self, images: Tensor, uniforms: Uniforms) -> Tensor:
        """The windows, of the same shape as the images."""
        count, _, height, width = images.shape
        padded = torch.nn.functional.pad(images, [self.padding] * 4).numpy()
        windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
        places = (uniforms[:, :2] * (2 * self.padding + 1)).astype(np.int64)
        cut = windows[np.arange(count), :, places[:, 0], places[:, 1]]
        mirrored = uniforms[:, 2] < self.flip
        cut[mirrored] = cut[mirrored][..., ::-1]
        return torch.from_numpy(cut)


class ImageArrays(FinishAlias, Dataset[Any]):
    """Images and labels in memory; ``dataset[i]`` is the pair ``(image, label)``.

    A micro-batch is cut out of the arrays at once and costs some tens of microseconds.

    Args:
        images: of shape (n, channels, height, width), ``uint8`` or floats.
        labels: n whole numbers.
        classes: names of the classes, in the order of their labels; every label must be one of them.
        name: what these images are, for messages.
        transform: an ``ArrayTransform``, or any callable that takes a PIL image (images of ``uint8``) or a
            tensor.
        device_transform: applied to the input on its device, such as ``Normalize``.
        finish: deprecated name of ``device_transform``.
    """

    in_memory = True
    rows_independent = True

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        classes: Sequence[str],
        name: str,
        transform: ArrayTransform | Callable[[Any], Any] | None = None,
        device_transform: DeviceTransform | None = None,
        finish: Any = ...,
    ) -> None:
        self.images, self.labels = images.contiguous(), labels.to(torch.int64)
        self.classes = tuple(classes)
        self.name = name
        self.transform = transform
        self.device_transform = renamed_finish(device_transform, finish)
        check_labels(self, len(self.classes))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """The image, transformed, and its label. Random numbers come from torch's generator."""
        image, label = self.images[index], int(self.labels[index])
        if self.transform is None:
            return image, label
        if isinstance(self.transform, ArrayTransform):
            uniforms = torch.rand(1, self.transform.draws, dtype=torch.float64).numpy()
            return self.transform.transform(image[None], uniforms)[0], label
        if image.dtype != torch.uint8:
            return self.transform(image), label
        pixels = image[0] if len(image) == 1 else image.permute(1, 2, 0).contiguous()
        return self.transform(Image.fromarray(pixels.numpy())), label

    def __repr__(self) -> str:
        shape = " x ".join(str(size) for size in self.images.shape[1:])
        return f"{self.name}: {len(self):,} images of {shape}, {len(self.classes)} classes"

    @property
    def get_batch(self) -> Callable[[Indices, SampleKeys], tuple[Tensor, Tensor]] | None:
        """Reads many images at once; ``None`` with a transform that takes one at a time."""
        own = self.transform is None or isinstance(self.transform, ArrayTransform)
        return self._read_batch if own else None

    def _read_batch(self, indices: Indices, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(indices)
        images = self.images.index_select(0, rows)
        if isinstance(self.transform, ArrayTransform):
            images = self.transform.transform(images, keys.uniforms(self.transform.draws))
        return images, self.labels.index_select(0, rows)


_COUNT = 1797


class Digits(ImageArrays):
    """1,797 handwritten digits of 8 x 8 pixels, float32 in [0, 1]; no download.

    Each class is divided by the seed: a fifth is held out for validation.

    Args:
        split: ``train``, ``validation``, or ``all``.
        seed: another seed holds out other digits; training and validation need the same one.
    """

    def __init__(self, split: Literal["train", "validation", "all"] = "all", *, seed: int = 0) -> None:
        with resources.files("lockstep.data").joinpath("embedded/digits.npz").open("rb") as file:
            arrays = np.load(file, allow_pickle=False)
            images, labels = arrays["images"], arrays["labels"]  # pixels from 0 to 16
        chosen = _chosen(labels, split, seed)
        super().__init__(
            torch.from_numpy(images[chosen]).to(torch.float32).div_(16.0)[:, None],
            torch.from_numpy(labels[chosen].astype(np.int64)),
            classes=[str(digit) for digit in range(10)],
            name=f"Digits, {split}",
        )


def _chosen(labels: np.ndarray, split: str, seed: int) -> np.ndarray:
    if split == "all":
        return np.arange(_COUNT)
    if split not in {"train", "validation"}:
        raise ConfigError(f"Digits has no split {split!r}. Known: train, validation, all.")
    kept: set[str] = set()
    for digit in range(10):
        names = [str(index) for index in np.flatnonzero(labels == digit)]
        kept |= held_out(names, 0.2, seed, f"Digit {digit}")
    wanted = split == "validation"
    return np.array([index for index in range(_COUNT) if (str(index) in kept) == wanted])
