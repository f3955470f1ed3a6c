"""Mixup, CutMix and random erasing on whole micro-batches, keyed by what the micro-batch holds.

    micro-batch      a b c d                       partner of each row: a keyed permutation of the rows
    mixup            0.8 a + 0.2 c, ...            targets 0.8 of a's class and 0.2 of c's
    cutmix           a with a box cut out of c     targets by the area that is left

The numbers follow from the seed, the epoch and the first sample of the micro-batch. Which samples make a micro-batch is
part of the plan, so they are the same on any number of processes and workers, and after a resume.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.core.plan import Indices
from lockstep.core.seeding import derive_seed
from lockstep.data.images.transforms import Uniforms
from lockstep.data.keyed import SampleKeys
from lockstep.data.wrappers.wrapping import Wrapping
from lockstep.errors import ConfigError, DataError

_BITS = (1 << 32) - 1


@dataclass(frozen=True)
class RandomErasing:
    """Fills a random box of some images, each with its own random numbers; an ``ArrayTransform``.

    Args:
        probability: part of the images that get a box.
        scale: smallest and largest area of the box, relative to the image's.
        ratio: smallest and largest height : width; a box that does not fit is made as high or wide as the image.
        fill: what the box is filled with, in the units of the images.
    """

    probability: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)
    fill: float = 0
    draws = 5  # whether, area, ratio, and two for the place

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ConfigError(f"RandomErasing probability={self.probability:g} must be from 0 to 1.")
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if not 0 < low <= high or (name == "scale" and high > 1):
                raise ConfigError(
                    f"RandomErasing {name}=({low:g}, {high:g}) must be two numbers above 0 in ascending "
                    "order, an area at most 1."
                )

    def transform(self, images: Tensor, uniforms: Uniforms) -> Tensor:
        """New images of shape (n, channels, height, width)."""
        height, width = images.shape[2:]
        result = images.clone()
        for row, (chance, area, ratio, top, left) in zip(result, uniforms.tolist(), strict=True):
            if chance < self.probability:
                pixels = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * area)
                form = math.exp(math.log(self.ratio[0]) + math.log(self.ratio[1] / self.ratio[0]) * ratio)
                h = min(height, max(1, round(math.sqrt(pixels * form))))
                w = min(width, max(1, round(math.sqrt(pixels / form))))
                y, x = int(top * (height - h + 1)), int(left * (width - w + 1))
                row[:, y : y + h, x : x + w] = self.fill
        return result


class Mixed(Wrapping):
    """Mixes the images of a micro-batch with one another, and their targets with them.

    A micro-batch of images (n, channels, height, width) and n labels becomes images of the same type, with ``uint8``
    rounded, and float32 targets (n, classes), which ``torch.nn.CrossEntropyLoss`` takes as probabilities. With
    both, half of the micro-batches get mixup and half CutMix. Take it for training only.

    Args:
        dataset: a map-style data set of pairs (image, label).
        classes: number of classes.
        mixup: both parameters of the Beta distribution that the share of the partner is drawn from; 0 for no mixup.
        cutmix: the same for the area of the box; 0 for no CutMix.
        erasing: applied to the images first, keyed by sample.
    """

    def __init__(
        self,
        dataset: Any,
        classes: int,
        *,
        mixup: float = 0.2,
        cutmix: float = 0.0,
        erasing: RandomErasing | None = None,
    ) -> None:
        super().__init__(dataset)
        if not (0 <= mixup < math.inf and 0 <= cutmix < math.inf and classes >= 2):
            raise ConfigError(
                f"Mixed has classes={classes}, mixup={mixup:g} and cutmix={cutmix:g}; it takes at least 2 classes and "
                "parameters from 0 on."
            )
        self.classes, self.mixup, self.cutmix, self.erasing = classes, mixup, cutmix, erasing

    def __getitem__(self, index: int) -> Any:
        """Refused: one sample alone has no partner."""
        raise ConfigError(
            "Mixed is read in micro-batches. Give it to run.batches as it is, without a collate function."
        )

    def get_batch(self, indices: Indices, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        """The mixed images and their targets."""
        read = self.inner_batch()
        images, labels = self.collated(None, indices, keys) if read is None else read(indices, keys)
        self._check(images, labels)
        if self.erasing is not None:
            own = SampleKeys(derive_seed(keys.seed, "erasing"), keys.epoch, keys.indices)
            images = self.erasing.transform(images, own.uniforms(self.erasing.draws))
        targets = torch.nn.functional.one_hot(labels, self.classes).to(torch.float32)
        if not (self.mixup or self.cutmix):
            return images, targets
        key = derive_seed(keys.seed, "mixed", keys.epoch, int(keys.indices[0]))
        draws = np.random.RandomState(key & _BITS)
        partner = torch.from_numpy(draws.permutation(len(images)))
        if self.cutmix and (not self.mixup or draws.random_sample() < 0.5):
            images, kept = _cut(images, partner, draws.beta(self.cutmix, self.cutmix), draws.random_sample(2))
        else:
            kept = 1 - draws.beta(self.mixup, self.mixup)
            mixed = images.to(torch.float32) * kept + images[partner].to(torch.float32) * (1 - kept)
            images = mixed.round().to(torch.uint8) if images.dtype == torch.uint8 else mixed.to(images.dtype)
        return images, targets * kept + targets[partner] * (1 - kept)

    def _check(self, images: Any, labels: Any) -> None:
        if not isinstance(images, Tensor) or images.dim() != 4 or not isinstance(labels, Tensor):
            raise DataError(
                "Mixed needs pairs of an image (channels, height, width) and a label; the data set gives other samples."
            )
        if (
            labels.dim() != 1
            or labels.is_floating_point()
            or not 0 <= int(labels.min()) <= int(labels.max()) < self.classes
        ):
            raise DataError(
                f"Mixed has classes={self.classes}, and the set gives labels of {labels.dtype} and shape "
                f"{tuple(labels.shape)} up to {labels.max()}. Give integers below classes."
            )


def _cut(images: Tensor, partner: Tensor, area: float, place: npt.NDArray[np.float64]) -> tuple[Tensor, float]:
    """Images with a box of their partners, and the part of the area that is still their own."""
    height, width = images.shape[2:]
    h, w = round(height * math.sqrt(area)), round(width * math.sqrt(area))
    top, left = int(place[0] * (height - h + 1)), int(place[1] * (width - w + 1))
    result = images.clone()
    result[:, :, top : top + h, left : left + w] = images[partner][:, :, top : top + h, left : left + w]
    return result, 1 - h * w / (height * width)
