"""Digits under an asynchronous parameter server with a user's own loop; one rank kills itself, in the first attempt.

digits_loop.py FOLDER EPOCHS [RANK:STEP]
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import lockstep
from lockstep.data import Digits

FOLDER, EPOCHS = Path(sys.argv[1]), int(sys.argv[2])
VICTIM, AT = (int(number) for number in (sys.argv[3] if len(sys.argv) > 3 else "-1:0").split(":"))


def right(output, target):
    return output.argmax(1) == target


torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run = lockstep.init(
    global_batch=128,
    strategy="parameter_server",
    parameter_server={"mode": "asynchronous", "staleness": 4, "snapshot_every": 5},
    directory=FOLDER / "run",
)
model, optimizer = run.prepare(model, optimizer)
began, holders = run.position.step, []
for _ in run.epochs(EPOCHS):
    for batch in run.batches(Digits("train")):
        if (run.world.rank, batch.plan.step) == (VICTIM, AT) and not run.world.restart:
            os.kill(os.getpid(), signal.SIGKILL)
        run.backward(batch, nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    accuracy = run.evaluate(Digits("validation"), right)
    holders.append(run.strategy.share.holders)
found = {"began": began, "step": run.position.step, "accuracy": accuracy, "holders": holders}
found |= {"restart": run.world.restart, "remarks": run.strategy.summary()}
run.close()
if run.is_main:
    (FOLDER / "found.json").write_text(json.dumps(found))
