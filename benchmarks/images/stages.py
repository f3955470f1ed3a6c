"""What one photo costs, stage by stage, in one thread: where the difference between the two sides comes from."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sides import MEAN, SIZE, STD

from lockstep.data import Normalize

_BOX = (0.1, 0.15, 0.75, 0.8)
"""The part that is cut out, relative to the photo; about the mean area of random crops."""


def stages(data: Path, *, photos: int = 200, rounds: int = 5) -> list[tuple[str, float, str]]:
    """Microseconds of each stage for a photo, median of the rounds: name, time, and which side it belongs to."""
    paths = sorted(path for path in data.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg"})
    sources = [path.read_bytes() for path in paths[:: max(1, len(paths) // photos)][:photos]]
    whole = [Image.open(io.BytesIO(source)).convert("RGB") for source in sources]
    parts = [image.crop(_part(image)) for image in whole]
    planes = [torch.from_numpy(np.array(part)).permute(2, 0, 1).contiguous()[None] for part in parts]
    pictures = [part.resize((SIZE, SIZE), Image.Resampling.BILINEAR) for part in parts]
    batches = [_as_bytes(picture)[None] for picture in pictures]
    normalize = Normalize(MEAN, STD)
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    measured = [
        ("decode (Pillow)", lambda n: Image.open(io.BytesIO(sources[n])).convert("RGB"), "both"),
        (
            "resize the part (Pillow)",
            lambda n: parts[n].resize((SIZE, SIZE), Image.Resampling.BILINEAR),
            "theirs",
        ),
        (
            "part to planes",
            lambda n: torch.from_numpy(np.array(parts[n])).permute(2, 0, 1).contiguous(),
            "ours",
        ),
        ("resize the part (torch, uint8)", lambda n: _resized(planes[n]), "ours"),
        (
            "to floats and normalise, each photo",
            lambda n: _as_bytes(pictures[n]).div(255).sub_(mean).div_(std),
            "theirs",
        ),
        ("normalise on the device", lambda n: normalize(batches[n]), "ours"),
    ]
    return [(name, _median(stage, len(sources), rounds), side) for name, stage, side in measured]


def _part(image: Image.Image) -> tuple[int, int, int, int]:
    left, top, right, bottom = _BOX
    return (
        int(left * image.width),
        int(top * image.height),
        int(right * image.width),
        int(bottom * image.height),
    )


def _as_bytes(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def _resized(planes: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.interpolate(planes, (SIZE, SIZE), mode="bilinear", antialias=True)


def _median(stage: Callable[[int], object], photos: int, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for number in range(photos):
            stage(number)
        times.append(1e6 * (time.perf_counter() - start) / photos)
    return statistics.median(times)
