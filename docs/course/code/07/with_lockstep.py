"""BatchNorm that sees one micro-batch, or with --sync the whole global batch, on any number of processes."""

import argparse

import torch
from torch import nn

import lockstep
from lockstep.data import Digits

parser = argparse.ArgumentParser()
parser.add_argument("--sync", action="store_true")
sync = parser.parse_args().sync

torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = lockstep.init(global_batch=48, micro_batches=12, sync_batch_norm=sync)
model, optimizer = run.prepare(model, optimizer)
for _ in run.epochs(1):
    for batch in run.batches(Digits("train")):
        loss = run.backward(batch, nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
run.print(f"BatchNorm sees {48 if sync else 4} rows  last loss {loss:.4f}  fingerprint {run.fingerprint()[:16]}")
