"""Jobs whose every split size is divisible by 2, 3 and 4, in float64 unless told otherwise; ``wide``: by 8 too."""

import torch
from tests.strategies.contract_jobs import Job, right, token_count
from tests.strategies.jobs import photos, token_loss, tokens
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.data import Digits
from lockstep.models import digits_net, perceptron, transformer
from lockstep.models.resnet import BasicBlock, Bottleneck

STEPS = {"global_batch": 16, "micro_batches": 8}


def images(count, dtype):
    data = Digits("train")
    pixels = torch.stack([data[index][0] for index in range(count)]).to(dtype)
    return TensorDataset(pixels, torch.tensor([int(data[index][1]) for index in range(count)]))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def heads(dtype=torch.float64, wide=1):
    """Dropout on whole activations, weights tied beside the split ones, sequences of different lengths."""
    size = {"width": 24 * wide, "depth": 2, "heads": 12 * wide}
    model = transformer(vocabulary_size=13, max_length=7, **size, dropout=0.2, tied=True)
    options = {"global_batch": 8, "micro_batches": 8}
    return Job(model.to(dtype), adamw(model), tokens(45), token_loss, token_count, options, clip=0.3)


def features(dtype=torch.float64, wide=1):
    """Dropout on split activations, with masks of the whole ones."""
    model = perceptron(in_features=64, hidden=(48, 24, 36 * wide), dropout=0.25).to(dtype)
    return Job(model, sgd(model), images(91, dtype), nn.CrossEntropyLoss(), right, STEPS)


def channels(dtype=torch.float64, wide=1):
    """BatchNorm and dropout over split channels, then a pair of Linear layers."""
    model = digits_net(width=12 * wide).to(dtype)
    model.insert(5, nn.Dropout2d(0.2))
    return Job(model, adamw(model), images(90, dtype), nn.CrossEntropyLoss(), right, STEPS)


def blocks(dtype=torch.float64, wide=1):
    """Residual blocks of both kinds, between a whole convolution and a whole Linear."""
    width = 12 * wide
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        BasicBlock(width, width, 1),
        Bottleneck(width, width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 5),
    ).to(dtype)
    data = photos(90)
    data = TensorDataset(data.tensors[0].to(dtype), data.tensors[1])
    return Job(model, sgd(model), data, nn.CrossEntropyLoss(), right, STEPS)


def steep(dtype=torch.float32):
    """A loss whose gradients overflow in half precision, until the loss scale has fallen."""
    job = features(dtype)
    job.loss = lambda output, target: 8 * nn.functional.cross_entropy(output, target)
    for group in job.optimizer.param_groups:
        group["lr"] = 0.005
    return job


JOBS = {"heads": heads, "features": features, "channels": channels, "blocks": blocks, "steep": steep}
