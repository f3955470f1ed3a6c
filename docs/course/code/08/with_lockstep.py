"""A training in fp32, bf16 or fp16: one option, autocast and loss scaling included."""

import argparse

import torch
from torch import nn

import lockstep
from lockstep.data import Digits

parser = argparse.ArgumentParser()
parser.add_argument("--precision", default="fp32")
precision = parser.parse_args().precision


def right(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float()


torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
run = lockstep.init(global_batch=64, micro_batches=8, precision=precision)
model, optimizer = run.prepare(model, optimizer)
for _ in run.epochs(4):
    for batch in run.batches(Digits("train")):
        run.backward(batch, nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
accuracy = 100 * run.evaluate(Digits("validation"), right)
run.print(f"{precision}: weights in {model[1].weight.dtype}, accuracy {accuracy:.1f} %")
run.print("fingerprint", run.fingerprint()[:16])
