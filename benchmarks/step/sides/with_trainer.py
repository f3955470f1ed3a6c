"""The same training as a LightningModule under the Trainer, in its ``barebones`` mode made for timing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness.gate import Gate
from harness.workloads import Workload, build_loader, read_arguments
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn


class Module(LightningModule):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload = workload
        self.model = workload.build_model()
        self.loss_fn = nn.CrossEntropyLoss()

    def training_step(self, batch: list[Tensor], batch_index: int) -> Tensor:
        inputs, labels = batch
        return self.loss_fn(self.model(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.workload.build_optimizer(self)


class Rounds(Callback):
    """Asks the gate after every step; the first round begins with the first step."""

    def __init__(self, control: Path) -> None:
        self.control = control

    def on_train_start(self, trainer: Trainer, *rest: Any) -> None:
        self.gate = Gate(self.control, trainer.global_rank)

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        if not self.gate.step_done():
            trainer.should_stop = True


def train(workload: Workload, control: Path, fetch: str) -> None:
    world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    loader = build_loader(workload.build_data(fetch), workload.global_batch // world_size)
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp",
        barebones=True,
        max_epochs=10**6,
        callbacks=[Rounds(control)],
    )
    trainer.fit(Module(workload), loader)


if __name__ == "__main__":
    given = read_arguments()
    train(given.workload, given.control, given.fetch)
    dist.destroy_process_group()
