"""Small training jobs that between them use everything a result could come to depend on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

from lockstep.data import Digits
from lockstep.data.images.image_arrays import PadCropFlip
from lockstep.models import digits_net, freeze, lstm, transformer
from lockstep.models.resnet import BasicBlock


@dataclass
class Job:
    """A training's model, optimizer and data; made anew in every process."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Dataset
    loss: Callable
    options: dict[str, Any] = field(default_factory=dict)
    epochs: int = 2
    last: int = 8
    """How many steps that makes."""
    clip: float | None = None
    schedule: Callable | None = None
    set_to_none: bool = True


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4, **options})


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), **{"lr": 3e-3, "weight_decay": 0.1, **options})


def digits():
    """13 full steps of 8 x 13 samples and one of 7 micro-batches, the last with 8 rows."""
    model = digits_net(width=4)
    data = Digits("train")
    data.transform = PadCropFlip(padding=1, flip=0.0)
    cross_entropy = nn.CrossEntropyLoss()
    options = {"global_batch": 104, "micro_batches": 8}
    return Job(model, sgd(model), data, cross_entropy, options, epochs=1, last=14)


def digits_adamw():
    job = digits()
    job.optimizer = adamw(job.model)
    job.clip = 0.5
    return job


class SmallResNet(nn.Sequential):
    """Two residual blocks of the built-in ResNets."""

    def __init__(self, classes=5):
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            BasicBlock(8, 8, 1),
            BasicBlock(8, 16, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, classes),
        )


def photos(count=53, classes=5):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, 3, 8, 8, generator=generator),
        torch.randint(classes, (count,), generator=generator),
    )


def resnet():
    """Four steps an epoch; the last has two micro-batches of two rows, and a single row that is left out."""
    model = SmallResNet()

    def schedule(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)

    return Job(
        model,
        sgd(model),
        photos(),
        nn.CrossEntropyLoss(),
        {"global_batch": 16, "micro_batches": 8},
        schedule=schedule,
    )


def resnet_frozen():
    """BatchNorm frozen in evaluation mode in one block, frozen weights in another; the tail has three micro-batches."""
    model = SmallResNet()
    freeze(model, ["0", "3"])
    model[3].eval()
    loss = nn.CrossEntropyLoss(reduction="none")
    return Job(model, sgd(model), photos(54), loss, {"global_batch": 16, "micro_batches": 8})


def tokens(count=26, length=7, vocabulary=13):
    """Sequences of different lengths: (tokens, next tokens), where -100 is no token."""
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(vocabulary, (count, length + 1), generator=generator)
    targets = text[:, 1:].clone()
    lengths = torch.randint(1, length + 1, (count, 1), generator=generator)
    targets[torch.arange(length) >= lengths] = -100
    return TensorDataset(text[:, :-1].contiguous(), targets)


def token_loss(logits, targets):
    """The sum over the tokens, and their number."""
    total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


def attention():
    model = transformer(vocabulary_size=13, max_length=7, width=16, depth=1, heads=2, dropout=0.2, tied=True)
    options = {"global_batch": 8, "micro_batches": 8}
    return Job(model, adamw(model), tokens(), token_loss, options, clip=1.0)


def recurrent():
    model = lstm(num_classes=3, vocabulary_size=13, hidden_size=12, num_layers=2, dropout=0.2)
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randint(13, (50, 6), generator=generator), torch.randint(3, (50,), generator=generator))
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    return Job(model, adamw(model), data, loss, {"global_batch": 16, "micro_batches": 8})


class Experts(nn.Module):
    """Uses one of four experts per micro-batch, one never, and adds a list of gains whose order backward reverses."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(5)])
        self.gains = nn.ParameterList([nn.Parameter(torch.full((), 1.0 + index)) for index in range(3)])
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        chosen = int(x[0, 0].abs() * 16) % 4
        x = self.experts[chosen](x).tanh()
        if chosen % 2:
            x = F.dropout(x * self.gains[chosen // 2], 0.3, self.training)
        return self.head(x)


def weighted_rows():
    """Rows of (input, weight, target) with weights that no float adds up exactly."""
    generator = torch.Generator().manual_seed(4)
    return TensorDataset(
        torch.randn(39, 6, generator=generator),
        torch.stack([torch.randint(2, (39,), generator=generator).float(), torch.rand(39, generator=generator)], 1),
    )


def weighted_loss(output, target):
    """The weighted sum over the samples, and the sum of weights."""
    losses = F.cross_entropy(output, target[:, 0].long(), reduction="none")
    return (losses * target[:, 1]).sum(), target[:, 1].sum()


def experts():
    """Parameters used in some micro-batches or in none, K = 6, weights per sample; 39 = 3 x 12 + 3 rows."""
    model = Experts()
    return Job(model, adamw(model), weighted_rows(), weighted_loss, {"global_batch": 12, "micro_batches": 6})


def experts_accumulating():
    """Gradients that are set to zero instead of to None."""
    job = experts()
    job.set_to_none = False
    return job


class Augmented(Dataset):
    """Rows with noise from torch's generator, as any transform would draw it; for loader workers."""

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.rows, self.labels = torch.randn(50, 6, generator=generator), torch.arange(50) % 2

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return self.rows[index] + 0.3 * torch.randn(6) * (torch.rand(()) < 0.7), self.labels[index]


def augmented():
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    return Job(
        model,
        sgd(model),
        Augmented(),
        nn.CrossEntropyLoss(),
        {"global_batch": 16, "micro_batches": 8},
    )


def two_threads():
    """Matrices large enough that both threads of a rank take part."""
    model = nn.Sequential(nn.Linear(64, 512), nn.LayerNorm(512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 10))
    generator = torch.Generator().manual_seed(6)
    data = TensorDataset(torch.randn(140, 64, generator=generator), torch.randint(10, (140,), generator=generator))
    options = {"global_batch": 96, "micro_batches": 6, "threads": 2}
    return Job(model, sgd(model), data, nn.CrossEntropyLoss(), options, last=4)


class Mixed(nn.Module):
    """Parameters of four number types, one used twice, one of size zero in a bucket of its own."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float16))
        self.narrow = nn.Parameter(torch.randn(5).to(torch.bfloat16))
        self.twice = nn.Linear(4, 4)

    def forward(self, x):
        x = self.conv(x).mean((2, 3)) * self.wide.float() + self.narrow[:4].float() + self.empty.sum()
        return F.pad(self.twice(self.twice(x).tanh()), (0, 1)) + self.narrow.float()


def mixed():
    model = Mixed()
    return Job(model, sgd(model), photos(54), nn.CrossEntropyLoss(), {"global_batch": 16, "micro_batches": 8})


class Saving(nn.Module):
    """Activation checkpointing around draws of its own, InstanceNorm's statistics, and a buffer of the user's."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Conv2d(3, 3, 1), nn.Dropout(0.3)) for _ in range(2)])
        self.norm = nn.InstanceNorm2d(3, track_running_stats=True)
        self.head = nn.Linear(3, 5)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        x = self.norm(checkpoint(self.twice, x, use_reentrant=False)).amax((2, 3))
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.head(x - self.mean)

    def twice(self, x):
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            x = F.dropout(block(x), 0.1)
        return x


def saving():
    model = Saving()
    options = {"global_batch": 16, "micro_batches": 8, "running_buffers": ("mean",)}
    return Job(model, sgd(model), photos(54), nn.CrossEntropyLoss(), options)


JOBS = {
    job.__name__: job
    for job in (
        digits,
        digits_adamw,
        resnet,
        resnet_frozen,
        attention,
        recurrent,
        experts,
        experts_accumulating,
        augmented,
        two_threads,
        mixed,
        saving,
    )
}
