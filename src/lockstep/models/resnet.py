"""Residual networks with the parameter names, arithmetic and initial values of torchvision's.

image -> conv1 bn1 relu maxpool -> layer1 .. layer4 (each a Sequential of blocks) -> avgpool -> fc

block:   x ---- conv bn relu conv bn ---- + -- relu       (bottleneck: 1x1, 3x3, 1x1)
          \\------ 1x1 conv, bn ----------/                (where shape changes: "downsample")
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        # Drawn before the block's own weights, as in torchvision: one seed gives both the same values.
        downsample = _downsample(inputs, width, stride)
        self.conv1 = _convolution(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _convolution(width, width, 3, 1)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, inputs, H, W) to (N, width, H / stride, W / stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        result: Tensor = self.relu(out)
        return result


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 ones, and a shortcut; the stride is in the 3x3."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        downsample = _downsample(inputs, outputs, stride)
        self.conv1 = _convolution(inputs, width, 1, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, outputs, 1, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """Maps (N, inputs, H, W) to (N, 4 * width, H / stride, W / stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        result: Tensor = self.relu(out)
        return result


class ResNet(nn.Module):
    """A residual network: logits (N, num_classes) of images (N, 3, height, width), in float32.

    Args:
        block: the kind of block.
        depths: blocks in each of the four layers.
        num_classes: number of logits.
        zero_init_residual: start every block as the identity (the last BatchNorm of each has weight 0).
        small_images: for images of about 32 pixels: a 3x3 first convolution of stride 1 and no pooling after
            it. The names stay; the shape of ``conv1.weight`` does not.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        *,
        num_classes: int = 1000,
        zero_init_residual: bool = False,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = _convolution(3, 64, 3, 1) if small_images else _convolution(3, 64, 7, 2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _layer(block, 64, 64, depths[0], 1)
        self.layer2 = _layer(block, 64 * block.expansion, 128, depths[1], 2)
        self.layer3 = _layer(block, 128 * block.expansion, 256, depths[2], 2)
        self.layer4 = _layer(block, 256 * block.expansion, 512, depths[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if zero_init_residual and isinstance(module, BasicBlock):
                nn.init.zeros_(module.bn2.weight)
            if zero_init_residual and isinstance(module, Bottleneck):
                nn.init.zeros_(module.bn3.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Maps images (N, 3, H, W) to logits (N, num_classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


def resnet18(*, num_classes: int = 1000, zero_init_residual: bool = False, small_images: bool = False) -> ResNet:
    """ResNet-18 (see ``ResNet``); ``small_images=True`` fits CIFAR-10."""
    return ResNet(
        BasicBlock,
        (2, 2, 2, 2),
        num_classes=num_classes,
        zero_init_residual=zero_init_residual,
        small_images=small_images,
    )


def resnet34(*, num_classes: int = 1000, zero_init_residual: bool = False, small_images: bool = False) -> ResNet:
    """ResNet-34 (see ``ResNet``)."""
    return ResNet(
        BasicBlock,
        (3, 4, 6, 3),
        num_classes=num_classes,
        zero_init_residual=zero_init_residual,
        small_images=small_images,
    )


def resnet50(*, num_classes: int = 1000, zero_init_residual: bool = False, small_images: bool = False) -> ResNet:
    """ResNet-50 (see ``ResNet``), with the stride in the 3x3 convolution (known as V1.5)."""
    return ResNet(
        Bottleneck,
        (3, 4, 6, 3),
        num_classes=num_classes,
        zero_init_residual=zero_init_residual,
        small_images=small_images,
    )


def _layer(
    block: type[BasicBlock] | type[Bottleneck], inputs: int, width: int, depth: int, stride: int
) -> nn.Sequential:
    first = block(inputs, width, stride)
    return nn.Sequential(first, *[block(width * block.expansion, width, 1) for _ in range(1, depth)])


def _downsample(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)
