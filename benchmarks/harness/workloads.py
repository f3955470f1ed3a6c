"""The models, data, loss and optimizer that every side of a comparison trains."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, default_collate

from harness.resnet import resnet18
from lockstep.models import transformer

Pair = tuple[Tensor, Tensor]
SEED = 0


def perceptron() -> nn.Module:
    """784-256-128-10: 235,146 parameters, 0.94 MB of gradients."""
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def small_transformer() -> nn.Module:
    """A decoder of 6 blocks of width 256: 4.9 million parameters, 19.5 MB of gradients; no dropout."""
    return transformer(vocabulary_size=256, max_length=32, width=256, depth=6, heads=4, dropout=0.0)


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean cross-entropy over all tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model with its data; the global batch stays, whatever the number of processes."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Shape of one input."""
    samples: int
    """Size of the data set, all of it in memory."""
    global_batch: int
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    tokens: bool = False
    """True if inputs and targets are sequences of tokens."""

    def build_model(self) -> nn.Module:
        """The model, with the same start on every rank and every side."""
        torch.manual_seed(SEED)
        return self.model()

    def build_optimizer(self, model: nn.Module) -> torch.optim.SGD:
        """SGD with momentum, torch's defaults otherwise."""
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def build_data(self, fetch: str) -> Dataset[Pair]:
        """Random inputs and labels, made from a seed: as ``TensorRows`` or as a plain ``TensorDataset``."""
        generator = torch.Generator().manual_seed(SEED)
        if self.tokens:
            text = torch.randint(256, (self.samples, self.shape[0] + 1), generator=generator)
            inputs, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
            return TensorRows(inputs, targets) if fetch == "rows" else TensorDataset(inputs, targets)
        inputs = torch.randn(self.samples, *self.shape, generator=generator)
        labels = torch.randint(0, 10, (self.samples,), generator=generator)
        return TensorRows(inputs, labels) if fetch == "rows" else TensorDataset(inputs, labels)


IMAGES = (3, 32, 32)
WORKLOADS = {
    "transformer": Workload(
        model=small_transformer, shape=(32,), samples=1024, global_batch=16, loss=token_loss, tokens=True
    ),
    "perceptron": Workload(model=perceptron, shape=(784,), samples=16384, global_batch=128),
    "resnet": Workload(model=partial(resnet18, width=16), shape=IMAGES, samples=2048, global_batch=64),
    "resnet-50000": Workload(model=partial(resnet18, width=16), shape=IMAGES, samples=50_000, global_batch=64),
    "resnet-1mb": Workload(model=partial(resnet18, width=10), shape=IMAGES, samples=2048, global_batch=64),
    "resnet-10mb": Workload(model=partial(resnet18, width=30), shape=IMAGES, samples=2048, global_batch=32),
    "resnet-100mb": Workload(
        model=partial(resnet18, width=96, large_images=True), shape=IMAGES, samples=1024, global_batch=32
    ),
}
"""That of 50,000 samples has epochs as long as CIFAR-10's, 781 steps; those of 1, 10 and 100 MB of gradients are for
``benchmarks/order``."""


class TensorRows(Dataset[Pair]):
    """Tensors in memory that give a whole batch in one gather, the fastest way torch's DataLoader knows."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Pair:
        return self.inputs[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> Pair:
        rows = torch.as_tensor(indices)
        return self.inputs[rows], self.labels[rows]


def keep_batch(rows: Pair | list[Pair]) -> Pair:
    """Passes on a batch that ``TensorRows`` gathered, and stacks rows that came one by one."""
    return rows if isinstance(rows, tuple) else default_collate(rows)


def build_loader(
    dataset: Dataset[Pair], batch_size: int, *, sampler: DistributedSampler | None = None
) -> DataLoader[Pair]:
    """The DataLoader all sides start from; shuffled by the sampler if there is one."""
    collate = keep_batch if isinstance(dataset, TensorRows) else None
    return DataLoader(dataset, batch_size, sampler=sampler, shuffle=sampler is None, collate_fn=collate, drop_last=True)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The settings that the harness gives a side."""

    workload: Workload
    control: Path
    fetch: str
    micro_batches: int
    reduce: str
    strategy: str = "ddp"
    mesh: str = ""
    shards: int = 0
    accumulate: str = "no_sync"


def read_arguments() -> Arguments:
    """Reads the command line of a side and sets one thread."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--control", type=Path, required=True, help="the harness' socket")
    parser.add_argument("--fetch", choices=["rows", "items"], default="rows")
    parser.add_argument("--micro-batches", type=int, default=0, help="K; 0: one for each rank")
    reducers = ["ordered", "ordered-collectives", "ring"]
    parser.add_argument("--reduce", choices=reducers, default="ordered", help="only Lockstep reads it")
    parser.add_argument("--strategy", default="ddp", help="only Lockstep reads it")
    parser.add_argument("--mesh", default="", help="only Lockstep reads it")
    parser.add_argument("--shards", type=int, default=0, help="tensor.shards; only Lockstep reads it")
    how = "DDP with several micro-batches a rank: reduces after the last, after every one, or never"
    parser.add_argument("--accumulate", choices=["no_sync", "every", "alone"], default="no_sync", help=how)
    given = parser.parse_args()
    torch.set_num_threads(1)
    return Arguments(
        workload=WORKLOADS[given.workload],
        control=given.control,
        fetch=given.fetch,
        micro_batches=given.micro_batches,
        reduce=given.reduce,
        strategy=given.strategy,
        mesh=given.mesh,
        shards=given.shards,
        accumulate=given.accumulate,
    )
