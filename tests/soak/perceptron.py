"""A perceptron in a loop of its own that saves after every step, and goes on from where it was killed.

perceptron.py FOLDER STRATEGY [--hold STEP] [--once RANK:STEP] [--always RANK:STEP] [--new]

--hold              every rank waits after that step, to be killed
--once, --always    the rank kills itself in that step: the first time, or every time
--new               the script itself does not ask to resume
"""

import itertools
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

EPOCHS, SAMPLES, GLOBAL_BATCH, WIDTH = 6, 64, 16, 96
STEPS = EPOCHS * SAMPLES // GLOBAL_BATCH


def dataset():
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    return TensorDataset(inputs, torch.randint(4, (SAMPLES,), generator=generator))


def train(folder="", strategy="ddp", *, resume="auto", after_step=lambda step: None, **options):
    """Trains to the end and returns the fingerprint; collective."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(WIDTH, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    places = {"directory": folder, "resume": resume} if folder else {}
    run = lockstep.init(
        global_batch=GLOBAL_BATCH, micro_batches=8, seed=3, strategy=strategy, keep=2, **places, **options
    )
    model, optimizer = run.prepare(model, optimizer)
    data = dataset()
    for _ in run.epochs(EPOCHS):
        for batch in run.batches(data):
            run.backward(batch, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
            after_step(batch.plan.step + 1)
            if folder:
                run.save()
    fingerprint = run.fingerprint()
    run.close()
    return fingerprint


def main(folder, strategy, *words):
    def after_step(step):
        for word, value in itertools.pairwise(words):
            if word == "--hold" and step > int(value):
                signal.pause()
            if value == f"{os.environ['RANK']}:{step}" and (word == "--always" or not mark.exists()):
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    mark = Path(folder).with_name("killed")
    fingerprint = train(folder, strategy, resume="" if "--new" in words else "auto", after_step=after_step)
    if os.environ["RANK"] == "0":
        print(fingerprint)


if __name__ == "__main__":
    main(*sys.argv[1:])
