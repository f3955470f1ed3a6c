"""A ResNet-18 of any width, in plain torch, so that no side brings its own model."""

from __future__ import annotations

from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions and the way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        around = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + around)


def resnet18(*, width: int, large_images: bool = False, classes: int = 10) -> nn.Sequential:
    """Eight blocks of ``width`` to ``8 * width`` channels, behind ImageNet's stem or CIFAR's."""
    kernel, stride = (7, 2) if large_images else (3, 1)
    first = nn.Conv2d(3, width, kernel, stride, kernel // 2, bias=False)
    stem: list[nn.Module] = [first, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    if large_images:
        stem.append(nn.MaxPool2d(3, 2, 1))
    blocks: list[nn.Module] = []
    channels = width
    for stage in range(4):
        for position in range(2):
            outputs = width * 2**stage
            blocks.append(Block(channels, outputs, stride=2 if stage and not position else 1))
            channels = outputs
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
