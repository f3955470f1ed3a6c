"""Chapter 3: stop at any step and continue on any number of devices, with the result of a run that never stopped.

    python examples/03_resume.py --directory runs/chapter3 --stop-at 17
    lockstep run --devices 3 examples/03_resume.py --directory runs/chapter3

A run that was killed continues from its newest checkpoint in the same way.
"""

import argparse

import torch
from torch import nn

import lockstep
from lockstep.data import Digits


def correct(output, labels):
    return output.argmax(1) == labels


def build():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(256, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=36)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", required=True)
    parser.add_argument("--stop-at", type=int, default=0, metavar="STEP")
    arguments = parser.parse_args()

    run = lockstep.init(global_batch=128, directory=arguments.directory, resume="auto")
    _, optimizer, scheduler = run.prepare(*build())
    run.print(f"begins at epoch {run.position.epoch}, step {run.position.step}")
    train_set, test_set = Digits("train"), Digits("validation")

    for _ in run.epochs(3):
        for batch in run.batches(train_set):
            run.backward(batch, nn.functional.cross_entropy)
            run.clip_gradients(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if batch.plan.step + 1 == arguments.stop_at:  # at the end of the body: the step counts as done
                run.save()
                run.print(f"stopped after {arguments.stop_at} steps")
                return
        accuracy = run.evaluate(test_set, correct)
        run.save()
    run.print(f"accuracy {accuracy:.4f}  fingerprint {run.fingerprint()}")


if __name__ == "__main__":
    main()
