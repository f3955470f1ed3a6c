"""Three curves: one forward pass of 48 rows, BatchNorm on 24 parts of 2 rows, and SyncBatchNorm on these parts."""

import torch
from torch import nn

import lockstep
from lockstep.data import Digits


def right(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float()


for name, micro_batches, sync in (
    ("one part", 1, False),
    ("BatchNorm", 24, False),
    ("SyncBatchNorm", 24, True),
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    run = lockstep.init(global_batch=48, micro_batches=micro_batches, sync_batch_norm=sync)
    model, optimizer = run.prepare(model, optimizer)
    curve = []
    for _ in run.epochs(4):
        for batch in run.batches(Digits("train")):
            run.backward(batch, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        curve.append(run.evaluate(Digits("validation"), right))
    run.print(f"{name:14}", *[f"{100 * accuracy:5.1f} %" for accuracy in curve])
