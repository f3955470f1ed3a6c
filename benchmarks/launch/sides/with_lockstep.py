"""One step of the perceptron with Lockstep's handle; the moment it is done; end."""

from __future__ import annotations

from harness.moments import mark, read_arguments, small_perceptron
from torch import nn

import lockstep
from lockstep.core.world import World


def main() -> None:
    given = read_arguments()
    workload = small_perceptron()
    world = World.from_environment()
    run = lockstep.init(global_batch=workload.global_batch, micro_batches=world.world_size, seed=0)
    model = workload.build_model()
    model, optimizer = run.prepare(model, workload.build_optimizer(model))
    dataset = workload.build_data("items")
    loss_fn = nn.CrossEntropyLoss()
    for batch in run.batches(dataset, workers=0):
        run.backward(batch, loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        mark(given.moments, world.rank)
        break


if __name__ == "__main__":
    main()
