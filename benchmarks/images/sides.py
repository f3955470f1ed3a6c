"""The ways from files to normalised float batches in the training process, as endless streams of batches."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from harness.torchvision_here import SIZE, training_photos
from PIL import Image
from torch import Tensor

HAS_TURBO = importlib.util.find_spec("simplejpeg") is not None


def with_torchvision(data: Path, *, batch: int, workers: int, turbo: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """torch's DataLoader over torchvision's ImageFolder with the usual transforms; Pillow or TurboJPEG decodes."""
    dataset = training_photos(str(data), **({"loader": _read_by_turbo} if turbo else {}))
    loader: Any = torch.utils.data.DataLoader(
        dataset,
        batch_size=batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=2 if workers else None,
    )
    while True:
        yield from loader


def with_lockstep(
    data: Path, *, batch: int, workers: int, micro_batches: int = 1, cache: Path | None = None
) -> Iterator[tuple[tuple[Tensor, Tensor], ...]]:
    """Our ImageFolder through the step loader, normalised where it would be on its device; ``cache`` keeps photos."""
    from lockstep.core.plan import BatchShape, SamplePlan
    from lockstep.data import ImageFolder, RandomResizedCrop, StepLoader

    dataset = ImageFolder(data, transform=RandomResizedCrop(SIZE))
    if cache is not None:
        dataset.use_cache(cache, workers=2)
    plan = SamplePlan(
        samples=len(dataset),
        shape=BatchShape(global_batch=batch, micro_batches=micro_batches),
        drop_last=True,
    )
    loader = StepLoader(dataset, plan, workers=workers, prefetch=max(2, 2 * workers))
    assert dataset.device_transform is not None
    for epoch in count():
        for step in loader.batches(epoch):
            yield tuple((dataset.device_transform(part.data[0]), part.data[1]) for part in step.micro_batches)


def _read_by_turbo(path: str) -> Image.Image:
    import simplejpeg

    return Image.fromarray(simplejpeg.decode_jpeg(Path(path).read_bytes()))
