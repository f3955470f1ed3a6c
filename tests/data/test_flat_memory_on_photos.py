"""Ten epochs of training on real photos: memory of the rank and of its workers stays as it was after the first.

Steps are small, so that a hole or two more in the heap, which the allocator leaves now and then, are less than what may
be grown; photos that every epoch would keep are far more.
"""

import gc
import os
from pathlib import Path

import pytest
import torch
from tests.data.test_flat_memory import MOST_GROWTH, resident
from tests.ranks import run_ranks
from torch import nn
from torch.utils.data import Subset

import lockstep
from lockstep.data import ImageFolder

EPOCHS = 10
PHOTOS = Path(os.environ.get("LOCKSTEP_DATA", Path(__file__).parents[3] / "shared" / "data")) / "flower_photos"


def workers():
    """Processes that this one has started and that read photos."""
    return sorted(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


def right(output, target):
    return output.argmax(1) == target


def train(world):
    """Bytes of this process and of its workers after each epoch."""
    run = lockstep.init(global_batch=16, micro_batches=4)
    model = nn.Sequential(nn.Conv2d(3, 8, 16, 16), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 5))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    training, held_out = (
        Subset(ImageFolder(PHOTOS, split), range(0, count, 2))
        for split, count in (("train", 2900), ("validation", 700))
    )
    measured = []
    for _ in run.epochs(EPOCHS):
        for batch in run.batches(training, workers=2):
            run.backward(batch, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        run.evaluate(held_out, right, workers=2)
        gc.collect()
        measured.append({name: resident(name) for name in ("self", *workers())})
    run.close()
    return measured


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_epochs_on_real_photos_hold_no_more_memory_than_one():
    if not PHOTOS.is_dir():
        pytest.skip("needs flower_photos below $LOCKSTEP_DATA or ../shared/data")
    (measured,) = run_ranks(train, 1, timeout=580)
    first, last = measured[0], measured[-1]
    assert len(first) >= 1 + 2 and first.keys() == last.keys(), "a worker was replaced"
    for pid, before in first.items():
        assert last[pid] <= before * (1 + MOST_GROWTH), (pid, [each[pid] >> 10 for each in measured])
