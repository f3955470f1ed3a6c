"""The handwritten digits that come with the package."""

from __future__ import annotations

from importlib import resources
from typing import Literal

import numpy as np
import torch

from lockstep.data.images.image_arrays import ImageArrays
from lockstep.data.naming import held_out
from lockstep.errors import ConfigError

_COUNT = 1797


class Digits(ImageArrays):
    """1,797 handwritten digits of 8 x 8 pixels, float32 in [0, 1]; no download.

    Each class is divided by the seed: a fifth is held out for validation.

    Args:
        split: ``train``, ``validation``, or ``all``.
        seed: another seed holds out other digits; training and validation need the same one.
    """

    def __init__(self, split: Literal["train", "validation", "all"] = "all", *, seed: int = 0) -> None:
        images, labels = _embedded()
        chosen = _chosen(labels, split, seed)
        super().__init__(
            torch.from_numpy(images[chosen]).to(torch.float32).div_(16.0)[:, None],
            torch.from_numpy(labels[chosen].astype(np.int64)),
            classes=[str(digit) for digit in range(10)],
            name=f"Digits, {split}",
        )


def _embedded() -> tuple[np.ndarray, np.ndarray]:
    """Pixels 0 to 16 of shape (1797, 8, 8) and labels of shape (1797,), both uint8."""
    with resources.files("lockstep.data").joinpath("embedded/digits.npz").open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        return arrays["images"], arrays["labels"]


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
