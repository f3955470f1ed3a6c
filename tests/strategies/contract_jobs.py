"""Trains small jobs under any strategy, and says all that came out: the same names and bits are expected of each."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.strategies.jobs import SmallResNet, photos, token_loss, tokens
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.data import Digits
from lockstep.models import transformer
from lockstep.run import Run, RunOptions
from lockstep.runtime.lazy_compiler import postpone_compiler

STEPS = 12


@dataclass
class Job:
    """A training of 12 steps; the last step of each epoch is ragged."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Any
    loss: Callable
    metric: Callable
    options: dict = field(default_factory=dict)
    clip: float = 0.1


def right(output, target):
    return output.argmax(1) == target


def token_count(output, target):
    known = target != -100
    return ((output.argmax(2) == target) & known).sum(), known.sum()


def perceptron():
    """Five full steps of 8 x 4 rows and one of 6 micro-batches, the last of them with 2 rows."""
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(32, 16),
        nn.ReLU(),
        nn.Linear(16, 10),
    )
    data = Digits("train")
    images = torch.stack([data[index][0] for index in range(182)])
    labels = torch.tensor([int(data[index][1]) for index in range(182)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    options = {"global_batch": 32, "micro_batches": 8}
    return Job(model, optimizer, TensorDataset(images, labels), nn.CrossEntropyLoss(), right, options)


def resnet():
    """Five full steps of 8 x 2 rows and one of 5 micro-batches."""
    model = SmallResNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    options = {"global_batch": 16, "micro_batches": 8}
    return Job(model, optimizer, photos(90), nn.CrossEntropyLoss(), right, options)


def attention(tied=True):
    """Five full steps of 8 sequences and one of 5, of different lengths; two groups of parameters."""
    model = transformer(vocabulary_size=13, max_length=7, width=16, depth=2, heads=2, dropout=0.2, tied=tied)
    plain = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    options = {"global_batch": 8, "micro_batches": 8}
    return Job(model, torch.optim.AdamW(groups, lr=3e-3), tokens(45), token_loss, token_count, options, clip=0.3)


def attention_untied():
    return attention(tied=False)


JOBS = {
    "perceptron": perceptron,
    "resnet": resnet,
    "attention": attention,
    "attention_untied": attention_untied,
}


def train_all(world, cases):
    """Trains several cases (name, job, options) one after the other; what each gave, by name; empty but on rank 0."""
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    found = {}
    for name, job, options in cases:
        try:
            found[name] = train(world, JOBS[job], options)
        except Exception as error:
            error.add_note(f"in the case {name!r}")
            raise
    return found if world.is_main else {}


def train(world, make, options):
    """Losses and norms of all steps, evaluations, and the whole state of model and optimizer, as tensors by name."""
    torch.manual_seed(world.rank)  # every rank builds another model; rank 0's counts
    job, found, steps = make(), {}, 0
    settings = {"seed": 3, "threads": 1, "fingerprint_every": 5, **job.options, **options}
    run = Run(RunOptions.of(**settings), world)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(job.optimizer, STEPS)
    _, optimizer, schedule = run.prepare(job.model, job.optimizer, schedule)
    for epoch in run.epochs(2):
        for batch in run.batches(job.data):
            found[f"loss {steps:02}"] = run.backward(batch, job.loss).cpu()
            found[f"norm {steps:02}"] = run.clip_gradients(job.clip).cpu()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            steps += 1
        found[f"evaluation {epoch}"] = torch.tensor(run.evaluate(job.data, job.metric), dtype=torch.float64)
    assert steps == STEPS, f"{steps} steps, not {STEPS}"
    found["skipped"] = torch.tensor(run.skipped_steps)
    state = run.require_prepared().state.capture(run.fingerprint(), keep=world.is_main)
    found |= {name: tensor.clone() for name, tensor in {**state.model, **state.optimizer}.items()}
    run.close()
    return found if world.is_main else {}
