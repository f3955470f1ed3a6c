"""One step of the perceptron under DistributedDataParallel, by hand; the moment it is done; end."""

from __future__ import annotations

import torch.distributed as dist
from harness.moments import mark, read_arguments, small_perceptron
from harness.workloads import build_loader
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler


def main() -> None:
    given = read_arguments()
    workload = small_perceptron()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(workload.build_model())
    optimizer = workload.build_optimizer(model)
    dataset = workload.build_data("rows")
    sampler: DistributedSampler = DistributedSampler(dataset, world_size, rank, drop_last=True)
    loader = build_loader(dataset, workload.global_batch // world_size, sampler=sampler)
    loss_fn = nn.CrossEntropyLoss()
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss_fn(model(inputs), labels).backward()
        optimizer.step()
        mark(given.moments, rank)
        break
    dist.barrier()  # without it gloo aborts a rank now and then while others are still leaving
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
