"""Which of these change the bits of a run on one device?"""

import argparse

import torch
from torch import nn

import lockstep
from lockstep.data import Digits

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--micro-batches", type=int, default=8)
parser.add_argument("--learning-rate", type=float, default=0.1)
options = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate)
run = lockstep.init(global_batch=64, seed=options.seed, micro_batches=options.micro_batches)
model, optimizer = run.prepare(model, optimizer)
for _ in run.epochs(1):
    for batch in run.batches(Digits("train")):
        loss = run.backward(batch, nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
run.print(f"last loss {loss:.4f}  fingerprint {run.fingerprint()[:16]}")
