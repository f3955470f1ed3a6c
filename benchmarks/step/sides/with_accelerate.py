"""The same loop with Accelerate: ``prepare`` and ``accelerator.backward``, as its quick tour has it."""

from __future__ import annotations

from pathlib import Path

from accelerate import Accelerator
from harness.gate import Gate
from harness.workloads import Workload, build_loader, read_arguments
from torch import nn


def train(workload: Workload, control: Path, fetch: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = workload.build_model()
    optimizer = workload.build_optimizer(model)
    loss_fn = nn.CrossEntropyLoss()
    loader = build_loader(workload.build_data(fetch), workload.global_batch // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    gate = Gate(control, accelerator.process_index)
    for _ in range(10**6):
        for inputs, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_fn(model(inputs), labels))
            optimizer.step()
            if not gate.step_done():
                accelerator.end_training()
                return


if __name__ == "__main__":
    given = read_arguments()
    train(given.workload, given.control, given.fetch)
