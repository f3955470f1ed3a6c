"""What random jobs are made of: small models, some of the digits with noise, and metrics."""

import torch
from torch import nn
from torch.utils.data import Dataset

from lockstep.data import Digits

MODELS = {
    "perceptron": lambda: (nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 10)),
    "norms": lambda: (nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10)),
    "images": lambda: (
        *(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 8, 3), nn.GELU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 10)),
    ),
    "layers": lambda: (nn.Flatten(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 10)),
}


def network(kind):
    return nn.Sequential(*MODELS[kind]())


class SomeDigits(Dataset):
    """The first ``count`` digits of a split; ``noise`` is drawn anew whenever one is read."""

    def __init__(self, split, count, noise=0.0):
        self.digits, self.count, self.noise = Digits(split=split), count, noise

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        image, label = self.digits[index]
        return (image + self.noise * torch.randn(image.shape) if self.noise else image), label


def in_best_two(output, target):
    return (output.topk(2).indices == target[:, None]).any(-1).float()


def entropy(output, target):
    logarithms = output.log_softmax(-1)
    return -(logarithms.exp() * logarithms).sum(-1)


class Recall:
    """The mean over classes, of the whole set; an object as torchmetrics has them."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.counts = torch.zeros(10, 10)

    def update(self, output, target):
        for label, found in zip(target.tolist(), output.argmax(-1).tolist()):
            self.counts[label, found] += 1

    def compute(self):
        return (self.counts.diag() / self.counts.sum(1).clamp(min=1)).mean().item()
