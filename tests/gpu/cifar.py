"""CIFAR-10 by one recipe in a plain loop of PyTorch, whose data lies on the device, and in a loop of Lockstep.

The recipe is in the spirit of the public speed records (D. Page, "How to train your ResNet", 2018): a residual network
of nine layers, batches of 512 for 24 epochs, Nesterov momentum, a learning rate that rises to its peak in a fifth of
the steps and falls to zero, label smoothing, random cuts and mirrors, and a mirrored second look in the evaluation.
bfloat16, channels_last, compiled. No whitening: it saves epochs, and both loops would save the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.simcuda.trainings import open_run
from torch import Tensor, nn

from lockstep.data import CIFAR10, ImageArrays, PadCropFlip
from lockstep.data.images.transforms import Normalize

BATCH, EPOCHS, PEAK, RISE = 512, 24, 0.4, 0.2
PADDING, EVALUATED = 4, 500
"""Pixels on each side, and images that the plain loop evaluates at once: no smaller batch is left, to be compiled."""


@dataclass
class Found:
    """The results of one loop."""

    accuracies: list[float] = field(default_factory=list)
    """On the 10,000 images for validation, after each epoch."""
    seconds: list[float] = field(default_factory=list)
    """Of training and evaluation, from the begin to the end of each epoch; the first compiles."""

    def reached(self, accuracy: float) -> float | None:
        """The seconds to the end of the first epoch with at least this accuracy."""
        return next((s for a, s in zip(self.accuracies, self.seconds) if a >= accuracy), None)


def _convolution(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(inplace=True)
    )


class Residual(nn.Module):
    """Two convolutions beside the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(_convolution(width, width), _convolution(width, width))

    def forward(self, values: Tensor) -> Tensor:
        return values + self.inner(values)


class ResNet9(nn.Module):
    """Eight convolutions and a linear layer; in evaluation the mean of an image and its mirror image."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _convolution(3, width),
            *(_convolution(width, 2 * width), nn.MaxPool2d(2), Residual(2 * width)),
            *(_convolution(2 * width, 4 * width), nn.MaxPool2d(2)),
            *(_convolution(4 * width, 8 * width), nn.MaxPool2d(2), Residual(8 * width)),
            *(nn.MaxPool2d(4), nn.Flatten(), nn.Linear(8 * width, 10, bias=False)),
        )

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.layers(images)
        if not self.training:
            scores = (scores + self.layers(images.flip(3))) / 2
        return scores / 8


def datasets(path: str) -> tuple[ImageArrays, ImageArrays]:
    """The images for training and for validation; made up, and few, where there is no path."""
    cut = PadCropFlip(padding=PADDING)
    if path:
        return CIFAR10(path, transform=cut), CIFAR10(path, split="validation")
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(128) % 10
    images = torch.randint(100, (128, 3, 32, 32), generator=generator, dtype=torch.uint8)
    images += (15 * labels.to(torch.uint8)).view(-1, 1, 1, 1)
    made = {
        "classes": tuple("0123456789"),
        "name": "made up",
        "device_transform": Normalize((0.5,) * 3, (0.25,) * 3),
    }
    return ImageArrays(images, labels, transform=cut, **made), ImageArrays(images, labels, **made)


def _optimizer(model: nn.Module, steps: int, peak: float) -> tuple[torch.optim.SGD, Any]:
    made = torch.optim.SGD(model.parameters(), lr=peak, momentum=0.9, weight_decay=5e-4, nesterov=True)
    rise = max(1, int(RISE * steps))

    def factor(step: int) -> float:
        return (step + 1) / rise if step < rise else max(0.0, (steps - step) / (steps - rise))

    return made, torch.optim.lr_scheduler.LambdaLR(made, factor)


def _loss() -> nn.CrossEntropyLoss:
    return nn.CrossEntropyLoss(label_smoothing=0.2)


def _correct(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float()


def plain(world: Any, path: str, batch: int, epochs: int, width: int, compiled: bool) -> Found:
    """The loop of PyTorch: all images lie on the device, where batches are cut and mirrored."""
    training, validation = datasets(path)
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    model = ResNet9(width).to(device, memory_format=torch.channels_last)
    steps = len(training.labels) // batch
    optimizer, schedule = _optimizer(model, steps * epochs, PEAK * batch / BATCH)
    called = torch.compile(model) if compiled else model
    loss_fn, normalize = _loss(), training.device_transform
    images, labels = _on_device(training, device)
    padded = nn.functional.pad(images, [PADDING] * 4)
    tests = _on_device(validation, device)

    def prepared(values: Tensor) -> Tensor:
        return normalize(values).contiguous(memory_format=torch.channels_last)

    found = Found()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(epochs):
        model.train()
        order = torch.randperm(len(labels), device=device)
        for step in range(steps):
            places = order[step * batch : (step + 1) * batch]
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = loss_fn(called(prepared(_cut(padded, places))), labels[places])
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        correct = torch.zeros((), device=device)
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            for values, targets in zip(tests[0].split(EVALUATED), tests[1].split(EVALUATED)):
                correct += _correct(called(prepared(values)), targets).sum()
        found.accuracies.append(float(correct) / len(tests[1]))
        found.seconds.append(time.perf_counter() - began)
    return found


def _on_device(data: ImageArrays, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.as_tensor(data.images).to(device), torch.as_tensor(data.labels).to(device)


def _cut(padded: Tensor, places: Tensor) -> Tensor:
    """A random window of 32 x 32 of each of these images, mirrored or not."""
    count, size, device = len(places), padded.shape[-1] - 2 * PADDING, padded.device
    lines = torch.arange(size, device=device)
    rows = torch.randint(2 * PADDING + 1, (count, 1), device=device) + lines
    columns = torch.randint(2 * PADDING + 1, (count, 1), device=device) + lines
    columns = torch.where(torch.rand(count, 1, device=device) < 0.5, columns, columns.flip(1))
    return padded[
        places.view(-1, 1, 1, 1),
        torch.arange(3, device=device).view(1, 3, 1, 1),
        rows.view(count, 1, size, 1),
        columns.view(count, 1, 1, size),
    ]


def lockstep(world: Any, path: str, batch: int, epochs: int, width: int, compiled: bool, workers: int) -> Found:
    """The loop of Lockstep: processes cut and mirror by the key of each sample."""
    training, validation = datasets(path)
    torch.manual_seed(0)
    run = open_run(
        world,
        "single",
        global_batch=batch,
        micro_batches=1,
        precision="bf16",
        channels_last=True,
        compile=compiled,
        fingerprint_every=0,
    )
    model = ResNet9(width)
    steps = len(training.labels) // batch
    optimizer, schedule = _optimizer(model, steps * epochs, PEAK * batch / BATCH)
    model, optimizer, schedule = run.prepare(model, optimizer, schedule)
    loss_fn, found = _loss(), Found()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in run.epochs(epochs):
        model.train()
        for each in run.batches(training, drop_last=True, workers=workers):
            run.backward(each, loss_fn)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        found.accuracies.append(run.evaluate(validation, _correct))
        found.seconds.append(time.perf_counter() - began)
    run.close()
    return found
