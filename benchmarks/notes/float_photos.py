"""Lockstep's photos, made floats and normalised by the workers: four bytes a value travel instead of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lockstep.core.plan import Indices
from lockstep.data import ImageFolder
from lockstep.data.keyed import SampleKeys


class FloatPhotos(ImageFolder):
    """An ``ImageFolder`` that leaves nothing to be done on the device."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._normalize, self.device_transform = self.device_transform, None

    @property
    def get_batch(self) -> Callable[[Indices, SampleKeys], tuple[Tensor, Tensor]]:
        """Decodes and normalises a whole micro-batch."""
        return self._normalised

    def _normalised(self, indices: Indices, keys: SampleKeys) -> tuple[Tensor, Tensor]:
        read = super().get_batch
        assert read is not None
        assert self._normalize is not None
        pictures, labels = read(indices, keys)
        return self._normalize(pictures), labels
