"""One epoch on digits. The script does not know how many hosts there are, nor who has started it."""

import torch
from torch import nn

import lockstep
from lockstep.data import Digits

torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = lockstep.init(global_batch=64, micro_batches=8)
model, optimizer = run.prepare(model, optimizer)
for _ in run.epochs(1):
    for batch in run.batches(Digits("train")):
        loss = run.backward(batch, nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
run.print(f"{run.world.world_size} processes  last loss {loss:.4f}  fingerprint {run.fingerprint()[:16]}")
