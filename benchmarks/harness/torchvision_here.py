"""torchvision, also beside a CPU build of torch that lacks two of its C++ operators."""

from __future__ import annotations

from typing import Any

import torch

SIZE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def import_torchvision() -> Any:
    """The module; the two operators, which nothing here calls, are declared first where they are missing."""
    try:
        import torchvision
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision

        torchvision.declared_operators = library  # kept as long as the module
    return torchvision


def training_photos(root: str, size: int = SIZE, **settings: Any) -> Any:
    """ImageFolder with the usual transforms for training: each photo is made floats by itself.

    ``settings`` are ImageFolder's own; by default Pillow decodes.
    """
    torchvision = import_torchvision()
    transforms = torchvision.transforms
    usual = [
        transforms.RandomResizedCrop(size),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
    return torchvision.datasets.ImageFolder(root, transforms.Compose(usual), **settings)


def validation_photos(root: str, size: int = SIZE) -> Any:
    """ImageFolder with the usual transforms for evaluation."""
    torchvision = import_torchvision()
    transforms = torchvision.transforms
    usual = [
        transforms.Resize(round(size * 256 / 224)),
        transforms.CenterCrop(size),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
    return torchvision.datasets.ImageFolder(root, transforms.Compose(usual))
