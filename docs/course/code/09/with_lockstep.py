"""Random augmentation in loader processes: their number changes the time, and no bit."""

import argparse

import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep
from lockstep.data import Digits

parser = argparse.ArgumentParser()
parser.add_argument("--workers", type=int, default=0)
workers = parser.parse_args().workers


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Digits with noise that is drawn while a sample is read."""

    def __init__(self) -> None:
        self.digits = Digits("train")

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        picture, label = self.digits[index]
        return picture + 0.1 * torch.rand(picture.shape), label


torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = lockstep.init(global_batch=64, micro_batches=8)
model, optimizer = run.prepare(model, optimizer)
samples = Noisy()
for _ in run.epochs(1):
    for batch in run.batches(samples, workers=workers):
        loss = run.backward(batch, nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
run.print(f"{workers} workers  last loss {loss:.4f}  fingerprint {run.fingerprint()[:16]}")
