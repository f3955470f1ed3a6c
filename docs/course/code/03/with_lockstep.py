"""A replica and a thread for each device of one process: strategy dp."""

import argparse

import torch
from torch import nn

import lockstep
from lockstep.data import Digits

parser = argparse.ArgumentParser()
parser.add_argument("--replicas", type=int, default=1)
replicas = parser.parse_args().replicas

torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = lockstep.init(global_batch=60, micro_batches=6, strategy="dp", dp={"replicas": replicas})
model, optimizer = run.prepare(model, optimizer)
for _ in run.epochs(1):
    for batch in run.batches(Digits("train")):
        loss = run.backward(batch, nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
run.print(f"{replicas} replicas  last loss {loss:.4f}  fingerprint {run.fingerprint()[:16]}")
