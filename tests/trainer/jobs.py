"""Runs ``lockstep train`` as a user does, on a small job whose loss a test can tamper with."""

import json
import os
import subprocess
import sys

JOB = """\
[model]
target = "parts:model"

[data.train]
target = "lockstep.data:Digits"
split = "validation"

[data.validation]
target = "lockstep.data:Digits"
split = "validation"

[loss]
target = "parts:Loss"

[optimizer]
target = "torch.optim:AdamW"
lr = 0.003

[training]
epochs = 2
global_batch = 32
micro_batches = 8
fingerprint_every = 3

[checkpoint]
every_steps = 4
keep = 100

[log]
tensorboard = false
"""

PARTS = """\
import json, os, signal
from pathlib import Path
import torch
from torch import nn

def model():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)
    )

def other_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))

class Loss(nn.CrossEntropyLoss):
    # Once, at the call that fault.json names, on that rank: whatever it says.
    calls = 0

    def forward(self, output, target):
        value = super().forward(output, target)
        fault = Path(__file__).with_name("fault.json")
        if not output.requires_grad:
            return value
        try:
            wanted = json.loads(fault.read_text())
        except FileNotFoundError:  # another rank may have been killed just now
            return value
        self.calls += 1
        if int(os.environ.get("RANK", 0)) == wanted["rank"] and self.calls == wanted["call"]:
            if wanted["what"] == "kill":
                fault.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            return value * float("nan")
        return value
"""


class Jobs:
    """One folder with a job, its parts, and its runs."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "job.toml").write_text(JOB)
        (folder / "parts.py").write_text(PARTS)

    def train(self, *arguments, job="job.toml", timeout=120):
        """The finished process."""
        environment = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        return subprocess.run(
            [sys.executable, "-m", "lockstep", "train", job, *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def fault(self, what, *, rank, call):
        (self.folder / "fault.json").write_text(json.dumps({"what": what, "rank": rank, "call": call}))

    def checkpoints(self, run="job-001"):
        return sorted((self.folder / "runs" / run).glob("step-*"))
