"""A training loop that comes to hang in one of several ways: ``hanging_loop.py KIND [WORKERS [EXCHANGE]]``."""

import os
import signal
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import lockstep

KIND = sys.argv[1]
WORKERS = int(sys.argv[2]) if len(sys.argv) > 2 else 0
NEVER = threading.Event()


class Numbers(Dataset):
    def __len__(self):
        return 320

    def __getitem__(self, index):
        if KIND == "loader" and index == 77:
            NEVER.wait()  # stuck here
        return torch.full((4,), float(index)), index % 3


run = lockstep.init(global_batch=16, micro_batches=8, shared_memory="collectives" not in sys.argv)
model, optimizer = nn.Linear(4, 3), None
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
for _ in run.epochs(2):
    for batch in run.batches(Numbers(), workers=WORKERS):
        run.backward(batch, nn.CrossEntropyLoss())
        optimizer.step()
        optimizer.zero_grad()
        rank, step = run.world.rank, batch.plan.step
        if step != 3:
            continue
        if KIND == "condition" and rank == 0:
            dist.barrier()  # only rank 0
        if KIND.startswith("stopped") and rank == 1:
            if "parent" in KIND:  # the fork server, which then ends no rank
                os.kill(os.getppid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        if KIND == "mismatch":
            size = 9 if rank == 2 else 4
            dist.all_gather(  # sizes differ
                [torch.zeros(size) for _ in range(3)], torch.ones(size)
            ) if rank else dist.all_reduce(torch.ones(4))
