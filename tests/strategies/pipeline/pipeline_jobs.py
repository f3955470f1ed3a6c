"""Jobs that a pipeline could get wrong, each compared with ``single``."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.strategies.jobs import photos, weighted_loss, weighted_rows
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

from lockstep.models import freeze, lstm
from lockstep.models.resnet import BasicBlock


@dataclass
class Job:
    """A training, made anew in every process."""

    model: nn.Module
    data: Dataset
    loss: Callable
    options: dict[str, Any] = field(default_factory=dict)
    lr: float = 0.01


class Recomputed(nn.Module):
    """Runs a part again in backward, dropout and BatchNorm included, and draws beside it."""

    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.3))

    def forward(self, x):
        x = checkpoint(self.body, x, use_reentrant=False)
        return F.dropout(x, 0.2, self.training) + checkpoint(self.body[2], x, use_reentrant=False)


def recomputed():
    model = nn.Sequential(nn.Linear(6, 8), *[Recomputed(8) for _ in range(3)], nn.Linear(8, 2))
    return Job(model, weighted_rows(), weighted_loss, {"global_batch": 16, "micro_batches": 8})


def in_place():
    """Stages that begin with a module that changes its input."""
    relu = nn.ReLU(inplace=True)
    model = nn.Sequential(
        nn.Linear(6, 8),
        relu,
        nn.Linear(8, 8),
        nn.Dropout(0.2, inplace=True),
        nn.Linear(8, 8),
        nn.Linear(8, 2),
    )
    options = {"pipeline": {"split": ("1", "3")}}
    return Job(model, weighted_rows(), weighted_loss, {"global_batch": 16, "micro_batches": 8, **options})


class Pair(nn.Module):
    """Gives a nested value: a trained tensor, one of whole numbers, one without gradient, a number, a repeated row."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        y = self.layer(x)
        if self.training:
            self.seen.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        rows = {"chosen": y.argmax(1), "row": y.mean(0, keepdim=True).expand(len(x), 4), "by": 2.0}
        return (y.t().contiguous().t(), [x[:, ::2].detach(), rows])


class Join(nn.Module):
    """Takes what ``Pair`` gives."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, value):
        y, (other, rows) = value
        strides = y.stride(0), other.stride(1), rows["row"].stride(0)
        assert len(y) == 1 or strides == (1, 2, 0)
        joined = self.layer(y * rows["by"] + rows["row"] + rows["chosen"].unsqueeze(1))
        return joined + other.mean(1, keepdim=True)


def nested():
    """Values of several tensors between stages, with strides that must stay; a declared buffer in one stage only."""
    model = nn.Sequential(Pair(), Join(), nn.Linear(2, 2), nn.Linear(2, 2))
    options = {"global_batch": 12, "micro_batches": 6, "running_buffers": ("0.seen",)}
    options["pipeline"] = {"split": ("1", "2")}
    return Job(model, weighted_rows(), weighted_loss, options)


class Narrow(nn.Module):
    """A small residual network whose forward is written out, as torchvision's are."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 8, 1))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16, 1))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 5)

    def forward(self, x):
        x = self.relu(self.norm(self.conv(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.pool(x), 1))


def frozen_start():
    """The first stage and a part of the second are not trained, so no gradient goes back to the first."""
    model = Narrow()
    freeze(model, ["conv", "norm", "layer1"], freeze_statistics=True)
    options = {"global_batch": 12, "micro_batches": 6, "channels_last": True, "precision": "bf16"}
    options["pipeline"] = {"split": ("layer1.1", "layer2.1")}
    return Job(model, photos(27), nn.CrossEntropyLoss(), options)


def images():
    """BatchNorm in every stage, in channels-last order."""
    options = {"global_batch": 12, "micro_batches": 6, "channels_last": True}
    return Job(Narrow(), photos(27), nn.CrossEntropyLoss(), options)


def recurrent():
    """An LSTM, whose last output has holes between its rows."""
    model = lstm(num_classes=3, vocabulary_size=13, hidden_size=12, num_layers=2, dropout=0.2)
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randint(13, (50, 6), generator=generator), torch.randint(3, (50,), generator=generator))
    options = {"global_batch": 18, "micro_batches": 9, "pipeline": {"split": ("lstm", "dropout")}}
    return Job(model, data, nn.CrossEntropyLoss(), options)


class From(nn.Module):
    """The features from one on: a view that begins elsewhere in memory than a tensor of its own."""

    def __init__(self, first):
        super().__init__()
        self.first = first

    def forward(self, x):
        return x[:, self.first :]


def views():
    """Stages begin with products of views, whose bits depend on the alignment of the first element."""
    model = nn.Sequential(
        *(nn.Linear(6, 151), From(1), nn.Linear(150, 5), nn.Tanh(), nn.Linear(5, 153), From(3)),
        nn.Linear(150, 2),
    )
    options = {"global_batch": 18, "micro_batches": 6, "pipeline": {"split": ("2", "6")}}
    return Job(model, weighted_rows(), weighted_loss, options)


def few_rows():
    """An epoch of less than one batch: two micro-batches for a pipeline of three ranks."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 2))
    data = torch.utils.data.Subset(weighted_rows(), range(5))
    return Job(model, data, weighted_loss, {"global_batch": 18, "micro_batches": 6})


JOBS = {job.__name__: job for job in (recomputed, in_place, nested, frozen_start, images, recurrent, views, few_rows)}
