"""Trains until a file is there, one rank of three slower than the others: ``slow_loop.py FILE RANK``."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep

END, SLOW = Path(sys.argv[1]), sys.argv[2]


class Numbers(Dataset):
    def __len__(self):
        return 1_200_000

    def __getitem__(self, index):
        time.sleep(0.02 if os.environ["RANK"] == SLOW else 0.001)  # a slow disk
        return torch.full((4,), float(index % 7)), index % 3


run = lockstep.init(global_batch=12, micro_batches=6)
model, optimizer = run.prepare(model := nn.Linear(4, 3), torch.optim.SGD(model.parameters(), lr=0.01))
for batch in run.batches(Numbers()):
    run.backward(batch, nn.CrossEntropyLoss())
    optimizer.step()
    optimizer.zero_grad()
    over = torch.tensor([float(END.exists())])
    if batch.plan.step % 10 == 9 and run.strategy.gather(over).max() > 0:
        break
