"""What random jobs are made of: small models, some of the digits with noise, losses, metrics, and a callback."""

import os
import signal
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import Dataset, IterableDataset

from lockstep.data import Digits
from lockstep.runtime import Callback

STOP = "LOCKSTEP_TEST_STOP_AT"
"""Environment variable: the step at which ``StopAt`` asks the run to stop."""
KILL = "LOCKSTEP_TEST_KILL_AT"
"""Environment variable: the step and the rank that ``StopAt`` kills in it, once, and a file that says that it has."""


class Running(nn.Module):
    """Takes the mean that it has kept from its input, and counts the samples that it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(24))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
                self.seen += len(x)
            return x - x.mean(0)
        return x - self.mean


MODELS = {
    "perceptron": lambda: (nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 10)),
    "norms": lambda: (nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10)),
    "images": lambda: (
        *(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 8, 3), nn.GELU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 10)),
    ),
    "buffers": lambda: (
        nn.Sequential(nn.Flatten(), nn.Linear(64, 24)),
        Running(),
        nn.ReLU(),
        nn.Linear(24, 10),
    ),
    "layers": lambda: (nn.Flatten(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 10)),
    "photos": lambda: (
        *(nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU()),
        *(nn.Conv2d(6, 8, 3, stride=2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)),
    ),
}


def network(kind):
    return nn.Sequential(*MODELS[kind]())


class SomeDigits(Dataset):
    """The first ``count`` digits of a split; ``noise`` is drawn anew whenever one is read."""

    def __init__(self, split, count, noise=0.0, broken=-1, target_transform=None):
        self.digits, self.count, self.noise = Digits(split=split), count, noise
        self.broken, self.target_transform = broken, target_transform

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.broken:
            raise ValueError(f"sample {index} is broken")
        image, label = self.digits[index]
        if self.target_transform is not None:
            label = self.target_transform(label)
        return (image + self.noise * torch.randn(image.shape) if self.noise else image), label


class Streamed(IterableDataset):
    """The same, to be iterated over."""

    def __init__(self, **arguments):
        self.digits = SomeDigits(**arguments)

    def __len__(self):
        return len(self.digits)

    def __iter__(self):
        return (self.digits[index] for index in range(len(self.digits)))


class StopAt(Callback):
    """Asks the run to stop, as a cluster does, in the step that the environment names, or kills a rank in it."""

    def on_step_begin(self, batch):
        if os.environ.get(STOP) == str(batch.plan.step + 1):
            os.kill(os.getpid(), signal.SIGTERM)
        step, rank, *mark = os.environ.get(KILL, ":").split(":")
        if (step, rank) == (str(batch.plan.step + 1), os.environ["RANK"]) and not Path(mark[0]).exists():
            Path(mark[0]).touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Vector:
    """A class as a vector with a single one."""

    def __init__(self, classes):
        self.classes = classes

    def __call__(self, label):
        return one_hot(torch.tensor(int(label)), self.classes).float()


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, target):
        return target * self.factor


def brightness(dataset):
    """A whole number for each digit: how bright it is, as a length."""
    return torch.tensor([int(10 * dataset.digits[index][0].abs().mean()) for index in range(len(dataset))])


def rising(count):
    """Weights of samples, some of them 0."""
    return [float(index % 7) for index in range(count)]


def stacked(samples, factor):
    images, labels = zip(*samples)
    return factor * torch.stack(images), torch.tensor([int(label) for label in labels])


def weights_of_classes():
    return torch.linspace(0.5, 2, 10)


def of_some(output, target):
    """The sum over odd digits, and how many they are, which may be none of a micro-batch."""
    odd = target % 2 == 1
    return (cross_entropy(output, target, reduction="none") * odd).sum(), odd.sum()


def write_weights(kind, path):
    """Writes weights to start from; those of the last layer are of another size."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        state = network(kind).state_dict()
    last = list(state)[-2]
    state[last] = state[last].repeat(2, *[1] * (state[last].dim() - 1))
    state[list(state)[-1]] = state[list(state)[-1]].repeat(2)
    save_file(state, path)


def write_photos(folder):
    """Writes small photos of ten classes, in two formats and several sizes."""
    draw = torch.Generator().manual_seed(6)
    for number in range(90):
        height, width = (torch.randint(20, 40, (2,), generator=draw)).tolist()
        colours = torch.randint(256, (height, width, 3), generator=draw) // 2 + 12 * (number % 10)
        place = folder / f"class-{number % 10}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(colours.to(torch.uint8).numpy()).save(place / f"{number}.{('png', 'jpg')[number % 2]}")


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
