"""What is kept of a photo.

    form               for                                      kept
    WholePhotos        transforms with random numbers,          the photo, upright, at full scale and at each reduced
                       and any other callable                   one that a crop of the pictures' size can ask for
    FinishedPictures   CenterCrop and Squeeze                   the picture

Both give the bits that decoding the file gives. What is not kept, such as a scale that only another transform asks for,
is decoded from the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.data.decoding import Photo, pixels_digest, reduced, reduction
from lockstep.data.decoding.photo import Pixels
from lockstep.data.image_transforms import CenterCrop, ImageTransform, Squeeze, Uniforms
from lockstep.data.images import cut_into

Row = tuple[int, int, int, int]
"""Width and height at full scale, the number of scales kept, and whether the format has reduced scales at all."""

ABSENT: Row = (0, 0, 0, 0)
"""Of a photo that cannot be decoded: it is read from its file, which says why."""

_NO_NUMBERS = np.empty(0, dtype=np.float64)


class Form(Protocol):
    """What is kept of each photo, and how a picture is made of it."""

    def settings(self) -> dict[str, Any]:
        """All that the kept bytes depend on beside the file."""

    def encode(self, photo: Photo) -> tuple[list[Pixels], Row]:
        """What is kept, to be put one after the other, and the photo's row in the index."""

    def cut_into(
        self, kept: Pixels, row: Row, transform: ImageTransform, uniforms: Uniforms, out: Tensor
    ) -> bool:
        """Makes the picture that ``transform`` cuts into ``out``; says whether it could be made of what is kept."""


@dataclass(frozen=True)
class WholePhotos:
    """Keeps decoded photos.

    Args:
        size: of the pictures that are cut; 0 to keep full scale only.
    """

    size: int

    def settings(self) -> dict[str, Any]:
        """See ``Form``."""
        return {"form": "photos", "size": self.size, "pixels": pixels_digest()}

    def encode(self, photo: Photo) -> tuple[list[Pixels], Row]:
        """See ``Form``."""
        width, height = photo.width, photo.height
        kept, scalable = [photo.pixels()], True
        spare = min(width, height) // self.size if self.size else 1
        factor = 2
        while scalable and factor <= reduction(width, height, spare):
            pixels = photo.pixels(factor)
            scalable = pixels.shape[:2] == (reduced(height, factor), reduced(width, factor))
            kept += [pixels] if scalable else []
            factor *= 2
        return kept, (width, height, len(kept), int(scalable))

    def cut_into(
        self, kept: Pixels, row: Row, transform: ImageTransform, uniforms: Uniforms, out: Tensor
    ) -> bool:
        """See ``Form``."""
        try:
            cut_into(KeptPhoto(kept, row), transform, uniforms, out)
        except _NotKept:
            return False
        return True


@dataclass(frozen=True)
class FinishedPictures:
    """Keeps the pictures of a transform that always cuts the same.

    Args:
        transform: one of ours, which its settings describe whole.
    """

    transform: CenterCrop | Squeeze

    def settings(self) -> dict[str, Any]:
        """See ``Form``."""
        kernel = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
        return {
            "form": "pictures",
            "transform": repr(self.transform),
            "pixels": pixels_digest(),
            "resized by": kernel,
        }

    def encode(self, photo: Photo) -> tuple[list[Pixels], Row]:
        """See ``Form``."""
        size = self.transform.size
        picture = torch.empty(3, size, size, dtype=torch.uint8)
        cut_into(photo, self.transform, _NO_NUMBERS, picture)
        return [picture.numpy()], (photo.width, photo.height, 1, 0)

    def cut_into(
        self, kept: Pixels, row: Row, transform: ImageTransform, uniforms: Uniforms, out: Tensor
    ) -> bool:
        """See ``Form``."""
        if type(transform) is not type(self.transform) or transform != self.transform:
            return False
        np.copyto(out.numpy(), kept[: out.numel()].reshape(out.shape))
        return True


class KeptPhoto:
    """A photo whose pixels lie in a file."""

    def __init__(self, kept: Pixels, row: Row) -> None:
        self._kept = kept
        self.width, self.height, self._scales, self._scalable = row

    def pixels(self, factor: int = 1) -> Pixels:
        """See ``Photo``; where they lie, without a copy."""
        wanted = factor if self._scalable else 1
        start, scale = 0, 1
        for _ in range(self._scales):
            shape = (reduced(self.height, scale), reduced(self.width, scale), 3)
            length = shape[0] * shape[1] * 3
            if scale == wanted:
                return self._kept[start : start + length].reshape(shape)
            start, scale = start + length, 2 * scale
        raise _NotKept


class _NotKept(Exception):
    """This scale was not asked for when the photos were decoded."""


def form_for(transform: ImageTransform | Callable[[Any], Any]) -> Form:
    """What to keep for a transform."""
    if type(transform) in (CenterCrop, Squeeze):
        assert isinstance(transform, (CenterCrop, Squeeze))
        return FinishedPictures(transform)
    return WholePhotos(transform.size if isinstance(transform, ImageTransform) else 0)


def joined(parts: list[Pixels], alignment: int) -> npt.NDArray[np.uint8]:
    """The bytes of all parts, filled up with zeros to a multiple of ``alignment``."""
    length = sum(part.size for part in parts)
    result = np.zeros(-(-length // alignment) * alignment, dtype=np.uint8)
    start = 0
    for part in parts:
        result[start : start + part.size] = part.reshape(-1)
        start += part.size
    return result
