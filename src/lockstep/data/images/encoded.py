"""Samples whose input is an encoded picture or an ordinary value, read one by one from any store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from lockstep.core.plan import Indices
from lockstep.data.batch import DeviceTransform
from lockstep.data.images.image_cache import ImageCache, PhotoStore, Tell, default_folder, open_cache
from lockstep.data.images.transforms import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    FinishAlias,
    ImageTransform,
    Normalize,
    Transform,
    Uniforms,
    decode_into,
)
from lockstep.data.keyed import SampleKeys
from lockstep.data.reader import BrokenSample
from lockstep.data.shared_buffers import image_buffer
from lockstep.errors import ConfigError, DataError


class EncodedPairs(FinishAlias, Dataset[Any], ABC):
    """Base of the sets whose samples are pairs of an input and a target, kept apart in their store.

    A subclass gives ``__len__``, ``_input(index)``, ``_target(index)``, ``_photos()`` and, where it can, ``labels``.
    With one of our image transforms the input is an encoded picture and becomes uint8 of shape (3, size, size),
    which ``device_transform`` normalises on the device. Any other transform is called with the result of ``_input``;
    without a transform that result is the input.
    """

    def __init__(self, transform: Transform | None) -> None:
        self.transform = transform
        self.device_transform: DeviceTransform | None = None
        if isinstance(transform, ImageTransform):
            self.device_transform = Normalize(IMAGENET_MEAN, IMAGENET_STD)
        self.cache: ImageCache | None = None

    @abstractmethod
    def __len__(self) -> int:
        """The number of pairs."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """The input, transformed, and the target. Random numbers come from torch's generator."""
        target, transform = self._target(index), self.transform
        if isinstance(transform, ImageTransform):
            uniforms = torch.rand(transform.draws, dtype=torch.float64).numpy()
            picture = torch.empty(3, transform.size, transform.size, dtype=torch.uint8)
            self._cut_into(index, transform, uniforms, picture)
            return picture, target
        value = self._input(index)
        return (value if transform is None else transform(value)), target

    @property
    def decodes_photos(self) -> bool:
        """True if the inputs are photos that are decoded here."""
        return isinstance(self.transform, ImageTransform)

    @property
    def get_batch(self) -> Callable[[Indices, SampleKeys], tuple[Tensor, Tensor]] | None:
        """Decodes a whole micro-batch of pictures; ``None`` where samples are read one by one."""
        return self._read_batch if isinstance(self.transform, ImageTransform) else None

    def use_cache(
        self, folder: str | Path | None = None, *, workers: int = 0, tell: Tell = lambda done, count: None
    ) -> Self:
        """Reads decoded photos from a file from now on, and makes that file if it is not there; no bit changes.

        The file is found by the names of the photos and the settings, and made again when the content of a photo has
        changed. For ``CenterCrop`` and ``Resize`` it holds the pictures, for other transforms the whole photos. A
        picture that lies outside of the set, whose row has only its path, is not kept.

        Args:
            folder: where the file is kept; ``None`` for ``lockstep`` in the user's cache folder.
            workers: processes that decode; 0 decodes here. Other processes that ask for the same file wait.
            tell: called now and then with the number of photos that are done and of all.

        Raises:
            ConfigError: the set has none of our image transforms (an ``ImageFolder`` may have any), or the folder has
                no room or cannot be written to.
        """
        if not self.decodes_photos:
            raise ConfigError(
                f"{type(self).__name__} cannot cache decoded photos, because its transform is {self.transform!r}. Give "
                "it a transform of lockstep.data, such as RandomResizedCrop, or leave the cache out."
            )
        place = default_folder() if folder is None else Path(folder).expanduser()
        self.cache = open_cache(self._photos(), self.transform, place, workers=workers, tell=tell)
        return self

    @abstractmethod
    def _photos(self) -> PhotoStore:
        """Where the inputs are, for the cache."""

    @abstractmethod
    def _input(self, index: int) -> Any:
        """The input as it is stored."""

    @abstractmethod
    def _target(self, index: int) -> Any:
        """The target: a number, or anything that torch collates."""

    def _picture(self, index: int) -> bytes | str | Path:
        """The encoded picture in a cell, or its path; Hugging Face keeps both in a dict."""
        value = self._input(index)
        if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
            return bytes(value["bytes"])
        if isinstance(value, dict) and isinstance(value.get("path"), str):
            return Path(value["path"])
        if isinstance(value, bytes):
            return value
        raise DataError(f"the input is a {type(value).__name__}, not an encoded picture; use another transform")

    def _read_batch(self, indices: Indices, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        assert isinstance(self.transform, ImageTransform)
        uniforms = keys.uniforms(self.transform.draws)
        pictures, targets = image_buffer(len(indices), self.transform.size), []
        for position, (index, numbers) in enumerate(zip(indices.tolist(), uniforms, strict=True)):
            try:
                self._cut_into(index, self.transform, numbers, pictures[position])
                targets.append(self._target(index))
            except Exception as error:
                raise BrokenSample(position) from error
        return pictures, default_collate(targets)

    def _cut_into(self, index: int, transform: ImageTransform, uniforms: Uniforms, out: Tensor) -> None:
        if self.cache is None:
            decode_into(self._picture(index), transform, uniforms, out)
        else:
            self.cache.cut_into(index, transform, uniforms, out)
