"""The same loop with Lockstep's handle: ordered reduction and fingerprint on, as by default.

Lockstep gathers a micro-batch of a ``TensorDataset`` at once by itself, so it needs no ``TensorRows``.
"""

from __future__ import annotations

from harness.gate import Gate
from harness.workloads import Arguments, read_arguments
from torch import nn

import lockstep
from lockstep.core.world import World


def train(given: Arguments) -> None:
    workload = given.workload
    world = World.from_environment()
    run = lockstep.init(
        global_batch=workload.global_batch,
        micro_batches=given.micro_batches or world.world_size,
        seed=0,
        reduce=given.reduce.split("-")[0],
        shared_memory=given.reduce != "ordered-collectives",
    )
    model = workload.build_model()
    model, optimizer = run.prepare(model, workload.build_optimizer(model))
    loss_fn = nn.CrossEntropyLoss()
    dataset = workload.build_data("items")
    gate = Gate(given.control, world.rank)
    for _ in run.epochs(10**6):
        for batch in run.batches(dataset, workers=0):
            run.backward(batch, loss_fn)
            optimizer.step()
            optimizer.zero_grad()
            if not gate.step_done():
                return


if __name__ == "__main__":
    train(read_arguments())
