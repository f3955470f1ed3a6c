"""Ten steps, in which rank 1 hangs or is killed, if asked to."""

import argparse
import os
import signal
import threading

import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep

parser = argparse.ArgumentParser()
parser.add_argument("fault", choices=["none", "hang", "die"], nargs="?", default="none")
fault = parser.parse_args().fault
read_so_far = 0


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """160 samples. Rank 1 meets the fault at its 38th."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        global read_so_far
        read_so_far += 1
        if run.world.rank == 1 and read_so_far == 38:
            if fault == "hang":
                threading.Event().wait()
            if fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((4,), index / 160), torch.tensor([1.0])


torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = lockstep.init(global_batch=16, micro_batches=4)
model, optimizer = run.prepare(model, optimizer)
for _ in run.epochs(1):
    for batch in run.batches(Samples()):
        run.backward(batch, nn.functional.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
run.print(f"{run.world.world_size} processes  fingerprint {run.fingerprint()[:16]}")
