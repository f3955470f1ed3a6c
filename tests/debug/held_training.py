"""Trains a line on two ranks, for the debugger's test: ``held_training.py`` has one line worth stopping at."""

import torch
from torch import nn

import lockstep

LIMIT = 0.5
"""Seconds that a rank waits for another, where none is debugged."""


def main():
    run = lockstep.init(global_batch=8, micro_batches=2, seed=0, timeout=LIMIT)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.prepare(model, optimizer)
    points = [(torch.full((3,), float(n)), torch.tensor([2.0 * n])) for n in range(16)]
    for _ in run.epochs(1):
        for step, batch in enumerate(run.batches(points)):
            weight_of_rank = 10 * step + run.world.rank
            run.backward(batch, nn.functional.mse_loss)  # stop here
            optimizer.step()
            optimizer.zero_grad()
    print(f"rank {run.world.rank} trained {step + 1} steps, {weight_of_rank}")


if __name__ == "__main__":
    main()
