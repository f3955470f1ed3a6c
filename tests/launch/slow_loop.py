"""Trains for some seconds, one rank of three slower than the others: ``slow_loop.py SECONDS RANK``."""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep

SECONDS, SLOW = float(sys.argv[1]), sys.argv[2]


class Numbers(Dataset):
    def __len__(self):
        return 120_000

    def __getitem__(self, index):
        time.sleep(0.004 if os.environ["RANK"] == SLOW else 0.001)  # a slow disk
        return torch.full((4,), float(index % 7)), index % 3


run = lockstep.init(global_batch=12, micro_batches=6)
model, optimizer = run.prepare(model := nn.Linear(4, 3), torch.optim.SGD(model.parameters(), lr=0.01))
end = time.monotonic() + SECONDS
for batch in run.batches(Numbers()):
    run.backward(batch, nn.CrossEntropyLoss())
    optimizer.step()
    optimizer.zero_grad()
    over = torch.tensor([float(time.monotonic() > end)])
    if batch.plan.step % 10 == 9 and run.strategy.gather(over).max() > 0:
        break
