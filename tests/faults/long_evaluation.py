"""Trains two epochs with an evaluation after each; the second takes 20 s if it is told to be slow.

long_evaluation.py FOLDER [slow]

Rank 1 asks for the end of the run when it is at its third micro-batch of that evaluation.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

FOLDER, IS_SLOW = Path(sys.argv[1]), sys.argv[2:] == ["slow"]
calls = []


def correct(output, target):
    if IS_SLOW and (FOLDER / "first evaluation").exists():
        calls.append(time.monotonic())
        threading.Event().wait(0.5)
        if os.environ["RANK"] == "1" and len(calls) == 3:
            (FOLDER / "disturbed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGTERM)
    return output.argmax(1) == target


def main():
    run = lockstep.init(global_batch=32, micro_batches=8, directory=FOLDER / "run", resume="auto")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    samples = TensorDataset(torch.randn(640, 6), torch.randint(3, (640,)))
    for epoch in run.epochs(2):
        for batch in run.batches(samples):
            run.backward(batch, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        run.print(f"epoch {epoch} {run.evaluate(samples, correct, repeatable=True)}")
        run.save()
        (FOLDER / "first evaluation").touch()
    run.print(f"fingerprint {run.fingerprint()}")


if __name__ == "__main__":
    main()
