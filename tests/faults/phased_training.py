"""Trains two epochs, and at a given place does something to itself.

phased_training.py FOLDER [RANK:PHASE:STEP:WHAT]

The place is the first heartbeat of that phase at that step or later, so the fault meets the rank within the phase.
"""

import ctypes
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
from lockstep.launch import Heartbeat
from lockstep.run import session
from lockstep.runtime.heartbeat import MICRO_BATCH, PHASES
from lockstep.runtime.heartbeat import STEP as STEPS

FOLDER = Path(sys.argv[1])
RANK, PHASE, STEP, WHAT = (sys.argv[2] if len(sys.argv) > 2 else "-1:none:0:nothing").split(":")


def disturb():
    (FOLDER / "disturbed").write_text(str(time.monotonic()))
    if WHAT == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if WHAT == "preempted":
        os.kill(os.getpid(), signal.SIGTERM)
    if WHAT == "hung":
        threading.Event().wait()
    if WHAT == "holding":
        ctypes.PyDLL(None).sleep(600)


def come_to(phase, step):
    is_me = os.environ.get("RANK", "0") == RANK
    if is_me and phase == PHASE and step >= int(STEP) and not (FOLDER / "disturbed").exists():
        disturb()


class ListeningHeartbeat(Heartbeat):
    """Reports marks, and the packed phases that short steps store."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._packed = PackedPhases(self._packed)

    def mark(self, phase, *, epoch=-1, step=-1, micro_batch=-1):
        super().mark(phase, epoch=epoch, step=step, micro_batch=micro_batch)
        come_to(phase, step)


class PackedPhases:
    def __init__(self, packed):
        self.packed = packed

    def __setitem__(self, index, number):
        self.packed[index] = number
        come_to(PHASES[number % MICRO_BATCH - 1], number // STEPS)


session.Heartbeat = ListeningHeartbeat


def main():
    run = lockstep.init(global_batch=16, micro_batches=4, directory=FOLDER / "run", resume="auto")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    samples = TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
    for _ in run.epochs(2):
        for batch in run.batches(samples):
            run.backward(batch, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        run.evaluate(samples, nn.functional.cross_entropy)
        run.save()
    run.print(f"fingerprint {run.fingerprint()}")


if __name__ == "__main__":
    main()
