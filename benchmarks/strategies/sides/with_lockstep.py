"""The loop with Lockstep's handle, under any strategy: ordered reduction and fingerprint on, as by default."""

from __future__ import annotations

from harness.gate import Gate, forget_peak
from harness.workloads import Arguments, read_arguments

import lockstep
from lockstep.core.world import World


def train(given: Arguments) -> None:
    workload = given.workload
    world = World.from_environment()
    run = lockstep.init(
        global_batch=workload.global_batch,
        micro_batches=given.micro_batches or world.world_size,
        seed=0,
        strategy=given.strategy,
        mesh=given.mesh,
        tensor={"shards": given.shards},
    )
    before = forget_peak()
    model = workload.build_model()
    model, optimizer = run.prepare(model, workload.build_optimizer(model))
    dataset = workload.build_data("items")
    gate = Gate(given.control, world.rank, before)
    for _ in run.epochs(10**6):
        for batch in run.batches(dataset, workers=0):
            run.backward(batch, workload.loss)
            optimizer.step()
            optimizer.zero_grad()
            if not gate.step_done():
                return


if __name__ == "__main__":
    train(read_arguments())
