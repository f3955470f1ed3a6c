"""Where one rank's step goes, without data and exchange: forward, backward and update of ResNet-34 on 32 photos.

Prints one line of JSON. Each way is a process of its own, because what glibc was told cannot be taken back.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import torch
from torch import nn

from lockstep.models import resnet34
from lockstep.numerics.precision import Precision
from lockstep.run.session import keep_freed_memory

BATCH, STEPS = 32, 3


def main(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if given.keep:
        keep_freed_memory()
    layout = torch.channels_last if given.channels_last else torch.contiguous_format
    model = resnet34(num_classes=5).to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.005)
    images = torch.randn(BATCH, 3, 224, 224).contiguous(memory_format=layout)
    labels = torch.randint(5, (BATCH,))
    precision = Precision(given.precision, torch.device("cpu"))
    for _ in range(2):
        step(model, optimizer, precision, images, labels)
    before = resource.getrusage(resource.RUSAGE_SELF)
    parts = [step(model, optimizer, precision, images, labels) for _ in range(STEPS)]
    after = resource.getrusage(resource.RUSAGE_SELF)
    forward, backward, update = min(parts, key=sum)
    faults, system = after.ru_minflt - before.ru_minflt, after.ru_stime - before.ru_stime
    found = {"forward": forward, "backward": backward, "update": update, "system": system / STEPS}
    print(json.dumps({**found, "faults": faults / STEPS}))


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    images: torch.Tensor,
    labels: torch.Tensor,
) -> tuple[float, float, float]:
    """Seconds of processor time of the three parts."""
    start = time.thread_time()
    with precision.forward():
        loss = nn.functional.cross_entropy(model(images), labels)
    forward = time.thread_time()
    loss.backward()
    backward = time.thread_time()
    optimizer.step()
    optimizer.zero_grad()
    return forward - start, backward - forward, time.thread_time() - backward


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--keep", action="store_true", help="keep freed memory")
    return parser.parse_args()


if __name__ == "__main__":
    main(read_command_line())
