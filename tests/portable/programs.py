"""Trains small programs and prints a fingerprint for each: ``python programs.py NAME[,NAME] STEPS [--portable]``.

Run by ``run.py`` on this CPU and on emulated ones.
"""

from __future__ import annotations

import sys

import torch
from operators import values
from torch import nn

import lockstep
from lockstep import models

BATCH, K = 8, 4


def samples(*shape: int, classes: int = 10) -> list[tuple[torch.Tensor, int]]:
    inputs = values(4 * BATCH, *shape)
    return [(each, index % classes) for index, each in enumerate(inputs)]


def tokens() -> list[tuple[torch.Tensor, torch.Tensor]]:
    text = (torch.arange(4 * BATCH * 17) * 7919 % 61).reshape(-1, 17)
    return [(row[:-1], row[1:]) for row in text]


def of_tokens(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


PROGRAMS = {
    "digits": (lambda: models.digits_net(), lambda: samples(1, 8, 8), nn.functional.cross_entropy),
    "resnet18": (
        lambda: models.resnet18(num_classes=10),
        lambda: samples(3, 16, 16),
        nn.functional.cross_entropy,
    ),
    "decoder": (
        lambda: models.transformer(vocabulary_size=61, width=48, depth=2, heads=3, max_length=16, dropout=0.1),
        tokens,
        of_tokens,
    ),
    "lstm": (
        lambda: models.lstm(num_classes=10, in_features=13, hidden_size=24),
        lambda: samples(7, 13),
        nn.functional.cross_entropy,
    ),
}


def main() -> None:
    for name in sys.argv[1].split(","):
        print(trained(name, int(sys.argv[2]), "--portable" in sys.argv))


def trained(name: str, steps: int, portable: bool) -> str:
    """The fingerprint after this number of steps."""
    make, data, loss = PROGRAMS[name]
    torch.manual_seed(0)
    run = lockstep.init(global_batch=BATCH, micro_batches=K, portable=portable)
    model = make()
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.003))
    done, data_set = 0, data()
    while done < steps:
        for batch in run.batches(data_set):
            run.backward(batch, loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
    found = run.fingerprint()
    run.close()
    return found


if __name__ == "__main__":
    main()
