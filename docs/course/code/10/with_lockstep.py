"""One model, laid out over devices in several ways. The script does not change, and no bit does."""

import argparse

import torch
from torch import nn

import lockstep
from lockstep.data import Digits

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="single")
strategy = parser.parse_args().strategy

torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = lockstep.init(global_batch=64, micro_batches=8, strategy=strategy)
model, optimizer = run.prepare(model, optimizer)
for _ in run.epochs(1):
    for batch in run.batches(Digits("train")):
        loss = run.backward(batch, nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
run.print(f"{strategy}  last loss {loss:.4f}  fingerprint {run.fingerprint()[:16]}")
