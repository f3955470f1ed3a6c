"""Draws the pictures of a generated photo beside torchvision's: ``python docs/figures/pictures.py [FILE]``.

Needs torchvision. Each row is one transform, cut alike by both; the last column is their difference, made visible.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont

from lockstep.data import CenterCrop, RandomResizedCrop
from lockstep.data.images.decoding import reduction
from lockstep.data.images.transforms import Cut, ImageTransform, decode_into

Pixels = npt.NDArray[np.int64]
PLACE = Path(__file__).with_suffix(".png")
SIDE, LINE, MARGIN = 160, 34, 8
WIDTH, HEIGHT = 1000, 750
SMALL, LARGE = (0.5, 0.4, 0.25, 0.62, 0.9), (0.5, 0.5, 0.1, 0.9, 0.1)
"""Random numbers of two crops."""


@dataclass(frozen=True)
class Pair:
    """A picture of shape (SIDE, SIDE, 3), made by both."""

    name: str
    scale: int
    """The photo is decoded at 1/scale."""
    ours: Pixels
    theirs: Pixels

    @property
    def amplified(self) -> int:
        """By how much the difference is shown stronger than it is."""
        return 128 if self.scale == 1 else 4

    @property
    def difference(self) -> Pixels:
        """Grey levels between the two, pixel by pixel."""
        return np.abs(self.ours - self.theirs)

    @property
    def outside(self) -> Pixels:
        """Grey levels by which ours leaves what torchvision has at a pixel and at the eight beside it; not the rim."""
        beside = np.stack([np.roll(self.theirs, (y, x), (0, 1)) for y in (-1, 0, 1) for x in (-1, 0, 1)])
        over, under = self.ours - beside.max(axis=0), beside.min(axis=0) - self.ours
        return np.maximum(np.maximum(over, under), 0)[1:-1, 1:-1]


def photo() -> bytes:
    """A JPEG of a landscape that nobody has taken: smooth sky, hard edges, a fine pattern of many colours."""
    x, y = np.meshgrid(np.linspace(0, 1, WIDTH), np.linspace(0, 1, HEIGHT))
    scene = np.stack([90 + 150 * y, 140 + 70 * y, 235 - 90 * y], axis=2)
    for number, colour in enumerate(((96, 112, 146), (70, 104, 88), (44, 74, 52))):
        ridge = 0.42 + 0.13 * number + 0.07 * np.sin(6 * x + 2.1 * number) + 0.02 * np.sin(31 * x + number)
        scene[y > ridge] = colour
    field = y > 0.8
    stripes = 60 * np.sin(150 * x / (2 - y)) + 40 * np.sin(90 * y * y)
    scene[field] += np.stack([stripes + 60, stripes + 30, -stripes / 2], axis=2)[field]
    scene[(x - 0.72) ** 2 * (WIDTH / HEIGHT) ** 2 + (y - 0.22) ** 2 < 0.008] = (255, 226, 120)
    image = Image.fromarray(scene.clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for number, colour in enumerate(("#d33b3b", "#f2f2f2", "#2b50a8", "#f0a030")):
        left = 130 + 45 * number
        draw.rectangle((left, 420 - 25 * number, left + 30, 640), fill=colour, outline="#202020")
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


def pair(name: str, source: bytes, transform: ImageTransform, uniforms: npt.NDArray[np.float64]) -> Pair:
    """The pixels that both make of a JPEG of the landscape's size."""
    cut = transform.cut(WIDTH, HEIGHT, uniforms)
    left, top, right, bottom = cut.box
    spare = min((bottom - top) // cut.resized[0], (right - left) // cut.resized[1])
    scale = reduction(WIDTH, HEIGHT, spare)
    return Pair(name, scale, _ours(source, transform, uniforms), _theirs(source, cut))


def pairs() -> list[Pair]:
    """The rows of the figure."""
    source = photo()
    return [
        pair(name, source, transform, np.array(draws))
        for name, transform, draws in (
            ("RandomResizedCrop", RandomResizedCrop(SIDE, scale=(0.08, 0.08)), SMALL),
            ("RandomResizedCrop, mirrored", RandomResizedCrop(SIDE, scale=(0.2, 0.2)), LARGE),
            ("CenterCrop", CenterCrop(SIDE, resize=184), ()),
        )
    ]


def draw(rows: Sequence[Pair]) -> Image.Image:
    """The figure."""
    width, height = 3 * (SIDE + MARGIN) + MARGIN, len(rows) * (SIDE + LINE + MARGIN) + MARGIN
    sheet = Image.new("RGB", (width, height), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for number, row in enumerate(rows):
        top = MARGIN + number * (SIDE + LINE + MARGIN)
        heads = (f"lockstep, decoded at 1/{row.scale}", "torchvision", f"difference x {row.amplified}")
        feet = (
            row.name,
            "the same cut",
            f"at most {row.difference.max()}, mean {row.difference.mean():.2f} levels",
        )
        pictures = (row.ours, row.theirs, np.minimum(row.amplified * row.difference, 255))
        for column, (head, foot, picture) in enumerate(zip(heads, feet, pictures)):
            left = MARGIN + column * (SIDE + MARGIN)
            pen.text((left, top), head, fill="black", font=font)
            pen.text((left, top + 15), foot, fill="#555555", font=font)
            sheet.paste(Image.fromarray(picture.astype(np.uint8)), (left, top + LINE))
    return sheet


def main(words: Sequence[str]) -> None:
    """Writes the figure and says what was found."""
    place, rows = Path(words[0]) if words else PLACE, pairs()
    draw(rows).quantize(256, dither=Image.Dither.NONE).save(place, optimize=True)
    for row in rows:
        found = f"difference {row.difference.max()} at most, {row.difference.mean():.2f} on average"
        sys.stdout.write(
            f"{row.name}, decoded at 1/{row.scale}: {found}; {row.outside.max()} beyond the pixels beside\n"
        )


def _ours(source: bytes, transform: ImageTransform, uniforms: npt.NDArray[np.float64]) -> Pixels:
    out = torch.empty(3, SIDE, SIDE, dtype=torch.uint8)
    decode_into(source, transform, uniforms, out)
    return out.permute(1, 2, 0).numpy().astype(np.int64)


def _theirs(source: bytes, cut: Cut) -> Pixels:
    functional = _torchvision()
    left, top, right, bottom = cut.box
    whole = Image.open(io.BytesIO(source)).convert("RGB")
    part = functional.resized_crop(whole, top, left, bottom - top, right - left, list(cut.resized))
    part = functional.crop(part, *cut.offset, SIDE, SIDE)
    return np.asarray(functional.hflip(part) if cut.flip else part).astype(np.int64)


def _torchvision() -> Any:
    """Its transforms; beside another build of torch it cannot load its operators, which are declared for it."""
    try:
        return import_module("torchvision.transforms.functional")
    except RuntimeError:
        for operator in ("nms", "qnms"):
            _LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return import_module("torchvision.transforms.functional")


_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")

if __name__ == "__main__":
    main(sys.argv[1:])
