"""The job as a plain script: DistributedDataParallel, torchvision, float32, the loss reduced and read every step.

Started by torchrun, which gives each rank one thread. torch's defaults are left as they are; the loss is read back
as in most scripts that show a running loss.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness.gate import Gate
from harness.torchvision_here import SIZE, import_torchvision, training_photos, validation_photos
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main(given: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(given.seed)
    train_set = training_photos(given.train, given.size)
    sampler: DistributedSampler = DistributedSampler(train_set, seed=given.seed)
    batch = given.global_batch // world_size
    loader = DataLoader(train_set, batch, sampler=sampler, num_workers=given.workers, drop_last=True)
    model = import_torchvision().models.resnet34(num_classes=len(train_set.classes))
    if given.weights:
        model.load_state_dict(load_file(given.weights))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.005)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, given.epochs * len(loader), eta_min=0.02 * given.final_factor
    )
    gate = Gate(given.control, rank) if given.control else None
    for epoch in range(given.epochs):
        sampler.set_epoch(epoch)
        if not train_epoch(model, loader, optimizer, scheduler, gate):
            break
    if given.validation:
        right = evaluate(model, given, batch)
        if rank == 0:
            print(json.dumps({"accuracy": right}), flush=True)
    dist.destroy_process_group()


def train_epoch(
    model: nn.Module,
    loader: DataLoader,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    gate: Gate | None,
) -> bool:
    """One epoch; false when the benchmark has asked to stop."""
    loss_fn = nn.CrossEntropyLoss()
    model.train()
    total = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        reduced = loss.detach().clone()
        dist.all_reduce(reduced)
        total += reduced.item() / dist.get_world_size()
        if gate is not None and not gate.step_done():
            return False
    return True


@torch.no_grad()
def evaluate(model: nn.Module, given: argparse.Namespace, batch: int) -> float:
    """The part of the validation photos that is classified right, every photo counted once."""
    photos = validation_photos(given.validation, given.size)
    mine: Any = torch.utils.data.Subset(photos, range(dist.get_rank(), len(photos), dist.get_world_size()))
    model.eval()
    right = torch.zeros(())
    for images, labels in DataLoader(mine, batch, num_workers=given.workers):
        right += (model.module(images).argmax(1) == labels).sum()
    dist.all_reduce(right)
    return right.item() / len(photos)


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", required=True, help="folder of class folders")
    parser.add_argument("--validation", help="the same; evaluated after the last epoch")
    parser.add_argument("--size", type=int, default=SIZE)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--final-factor", type=float, default=0.1, help="of the learning rate, at the end")
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", type=Path, help="safetensors file to begin with, instead of random weights")
    parser.add_argument("--control", type=Path, help="the harness' socket")
    assert "RANK" in os.environ, "torchrun starts this script"
    return parser.parse_args()


if __name__ == "__main__":
    main(read_command_line())
