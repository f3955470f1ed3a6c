"""Samples whose input is an encoded picture or an ordinary value, read one by one from any store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from lockstep.core.plan import Indices
from lockstep.data.images.image_cache import ImageCache, StoredPhotos, Tell, default_folder, open_cache
from lockstep.data.images.transforms import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    DeviceTransform,
    FinishAlias,
    ImageTransform,
    Normalize,
    decode_into,
)
from lockstep.data.keyed import SampleKeys
from lockstep.data.reader import BrokenSample
from lockstep.data.shared_buffers import image_buffer
from lockstep.errors import ConfigError, DataError

Transform = ImageTransform | Callable[[Any], Any]


class EncodedPairs(FinishAlias, Dataset[Any], ABC):
    """Base of the sets whose samples are pairs of an input and a target, kept apart in their store.

    A subclass gives ``__len__``, ``_input(index)``, ``_target(index)``, ``_stored()`` and, where it can, ``labels``.
    With one of our image transforms the input is the bytes of a picture and becomes uint8 of shape (3, size, size),
    which ``device_transform`` normalises on the device. Any other transform is called with the result of ``_input``;
    without a transform that result is the input.

    Args:
        transform: see above.
    """

    def __init__(self, transform: Transform | None) -> None:
        self.transform = transform
        own = isinstance(transform, ImageTransform)
        self.device_transform: DeviceTransform | None = (
            Normalize(IMAGENET_MEAN, IMAGENET_STD) if own else None
        )
        self.decodes_photos = own
        self.cache: ImageCache | None = None

    @abstractmethod
    def __len__(self) -> int:
        """The number of pairs."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """The input, transformed, and the target. Random numbers come from torch's generator."""
        target = self._target(index)
        if isinstance(self.transform, ImageTransform):
            uniforms = torch.rand(1, self.transform.draws, dtype=torch.float64).numpy()
            return self._pictures(np.array([index], dtype=np.int64), self.transform, uniforms)[0], target
        value = self._input(index)
        return (value if self.transform is None else self.transform(value)), target

    @property
    def get_batch(self) -> Callable[[Indices, SampleKeys], tuple[Tensor, Tensor]] | None:
        """Decodes a whole micro-batch of pictures; ``None`` where samples are read one by one."""
        return self._read_batch if isinstance(self.transform, ImageTransform) else None

    def use_cache(
        self, folder: str | Path | None = None, *, workers: int = 0, tell: Tell = lambda done, count: None
    ) -> Self:
        """Reads decoded pictures from a file from now on, and makes that file if it is not there; no bit changes.

        See ``ImageFolder.use_cache``; the file is made anew when the content of a picture has changed. A picture that
        lies outside of the set, whose row has its path alone, is not kept.

        Raises:
            ConfigError: the set has none of our image transforms, or the folder has no room or cannot be written to.
        """
        if not isinstance(self.transform, ImageTransform):
            raise ConfigError(
                f"{type(self).__name__} cannot cache decoded photos, because its transform is {self.transform!r}. Give "
                "it a transform of lockstep.data, such as RandomResizedCrop, or leave the cache out."
            )
        place = default_folder() if folder is None else Path(folder).expanduser()
        name, files, words = self._stored()
        photos = StoredPhotos(name, len(self), files, words, self._picture)
        self.cache = open_cache(photos, self.transform, place, workers=workers, tell=tell)
        return self

    @abstractmethod
    def _stored(self) -> tuple[str, list[Path], list[str]]:
        """A name for files, the files that hold the inputs, and which of their contents the inputs are."""

    @abstractmethod
    def _input(self, index: int) -> Any:
        """The input as it is stored."""

    @abstractmethod
    def _target(self, index: int) -> Any:
        """The target: a number, or anything that torch collates."""

    def _read_batch(self, indices: Indices, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        assert isinstance(self.transform, ImageTransform)
        uniforms = keys.uniforms(self.transform.draws)
        pictures = self._pictures(indices, self.transform, uniforms)
        targets = []
        for position, index in enumerate(indices.tolist()):
            try:
                targets.append(self._target(index))
            except Exception as error:
                raise BrokenSample(position) from error
        return pictures, default_collate(targets)

    def _picture(self, index: int) -> bytes | Path:
        return picture_bytes(self._input(index))

    def _pictures(self, indices: Indices, transform: ImageTransform, uniforms: Any) -> Tensor:
        pictures = image_buffer(len(indices), transform.size)
        for position, index in enumerate(indices.tolist()):
            try:
                if self.cache is None:
                    decode_into(self._picture(index), transform, uniforms[position], pictures[position])
                else:
                    self.cache.cut_into(index, transform, uniforms[position], pictures[position])
            except Exception as error:
                raise BrokenSample(position) from error
        return pictures


def picture_bytes(value: Any) -> bytes | Path:
    """The encoded picture in a cell: bytes, or Hugging Face's pair of bytes and path; ``DataError`` otherwise."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
        return bytes(value["bytes"])
    if isinstance(value, dict) and isinstance(value.get("path"), str):
        return Path(value["path"])
    raise DataError(f"the input is a {type(value).__name__}, not an encoded picture; use another transform")
