"""A DistributedDataParallel loop by hand, as torch's tutorial has it; no wrapper at one process."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist
from harness.gate import Gate
from harness.workloads import Workload, build_loader, read_arguments
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler


def train(workload: Workload, control: Path, fetch: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model: nn.Module = workload.build_model()
    if world_size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = workload.build_optimizer(model)
    loss_fn = nn.CrossEntropyLoss()
    dataset = workload.build_data(fetch)
    sampler: DistributedSampler = DistributedSampler(dataset, world_size, rank, drop_last=True)
    loader = build_loader(dataset, workload.global_batch // world_size, sampler=sampler)
    gate = Gate(control, rank)
    for epoch in range(10**6):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss_fn(model(inputs), labels).backward()
            optimizer.step()
            if not gate.step_done():
                return


if __name__ == "__main__":
    given = read_arguments()
    train(given.workload, given.control, given.fetch)
    if dist.is_initialized():
        dist.destroy_process_group()
