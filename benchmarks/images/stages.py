"""The cost of one photo, stage by stage, in one thread: where the difference between the two sides comes from."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from harness.torchvision_here import MEAN, SIZE, STD
from PIL import Image

from lockstep.data import Normalize

BILINEAR = Image.Resampling.BILINEAR
_BOX = (0.1, 0.15, 0.75, 0.8)
"""The part that is cut out, relative to the photo; about the mean area of random crops."""


def stages(data: Path, *, photos: int = 200, rounds: int = 5) -> list[tuple[str, float, str]]:
    """Microseconds of each stage for a photo, median of the rounds: name, time, and which side it belongs to."""
    paths = sorted(path for path in data.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg"})
    sources = [path.read_bytes() for path in paths[:: max(1, len(paths) // photos)][:photos]]
    whole = [Image.open(io.BytesIO(source)).convert("RGB") for source in sources]
    parts = [image.crop(_part(image)) for image in whole]
    views = [torch.from_numpy(np.array(part))[None].permute(0, 3, 1, 2) for part in parts]
    pictures = [part.resize((SIZE, SIZE), BILINEAR) for part in parts]
    interleaved = [np.array(picture) for picture in pictures]
    place = np.empty((3, SIZE, SIZE), dtype=np.uint8)
    batches = [_as_bytes(picture)[None] for picture in pictures]
    normalize = Normalize(MEAN, STD)
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    measured = [
        *_decoders(sources),
        ("part resized (Pillow)", lambda n: parts[n].resize((SIZE, SIZE), BILINEAR), "theirs"),
        ("part resized (torch, uint8, as the pixels lie)", lambda n: _resized(views[n]), "ours"),
        ("picture to its place", lambda n: np.copyto(place, interleaved[n].transpose(2, 0, 1)), "ours"),
        (
            "to floats and normalise, each photo",
            lambda n: _as_bytes(pictures[n]).div(255).sub_(mean).div_(std),
            "theirs",
        ),
        ("normalise on the device", lambda n: normalize(batches[n]), "ours"),
    ]
    return [(name, _median(stage, len(sources), rounds), side) for name, stage, side in measured]


def _decoders(sources: list[bytes]) -> list[tuple[str, Callable[[int], object], str]]:
    """To RGB arrays: Pillow, and the others that are installed."""
    found: list[tuple[str, Callable[[int], object], str]] = [
        ("decode (Pillow)", lambda n: np.array(Image.open(io.BytesIO(sources[n])).convert("RGB")), "both")
    ]
    with suppress(ImportError):
        import simplejpeg

        found.append(("decode (simplejpeg)", lambda n: simplejpeg.decode_jpeg(sources[n]), "ours"))
    with suppress(ImportError):
        import cv2

        cv2.setNumThreads(0)
        colour = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
        found.append(
            (
                "decode (OpenCV)",
                lambda n: cv2.imdecode(np.frombuffer(sources[n], np.uint8), colour),
                "neither",
            )
        )
    return found


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
