"""The same loop with Lightning Fabric: ``setup``, ``setup_dataloaders``, ``fabric.backward``."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist
from harness.gate import Gate
from harness.workloads import Workload, build_loader, read_arguments
from lightning.fabric import Fabric
from torch import nn


def train(workload: Workload, control: Path, fetch: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    model = workload.build_model()
    model, optimizer = fabric.setup(model, workload.build_optimizer(model))
    loss_fn = nn.CrossEntropyLoss()
    loader = fabric.setup_dataloaders(
        build_loader(workload.build_data(fetch), workload.global_batch // fabric.world_size)
    )
    gate = Gate(control, fabric.global_rank)
    for epoch in range(10**6):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            fabric.backward(loss_fn(model(inputs), labels))
            optimizer.step()
            if not gate.step_done():
                return


if __name__ == "__main__":
    given = read_arguments()
    train(given.workload, given.control, given.fetch)
    dist.destroy_process_group()
