"""Loading takes no more memory in its tenth epoch than in its second, in the process and in its workers."""

import gc
import mmap
import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from lockstep.core.plan import BatchShape, SamplePlan
from lockstep.data import EvaluationLoader, StepLoader

MB = 1 << 20
MOST_GROWTH = 0.05


class Pictures(Dataset):
    """Made when they are asked for, with a random part."""

    def __init__(self, size, pixels):
        self.size, self.pixels = size, pixels

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.rand(3, self.pixels, self.pixels) + index, index % 10


def resident(pid):
    """Memory that the process holds (RSS)."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * int(re.search(r"^Rss:\s+(\d+) kB", rollup, re.MULTILINE)[1])


def grown(dataset, workers, epochs=10):
    """Bytes of the process and of each worker after the second epoch, and after the last."""
    plan = SamplePlan(samples=len(dataset), shape=BatchShape(global_batch=32, micro_batches=4))
    loader = StepLoader(dataset, plan, workers=workers)
    evaluation = EvaluationLoader(dataset, micro_batch_size=16, workers=workers)
    pids, measured = {"self"}, []
    for epoch in range(epochs):
        for _ in loader.batches(epoch, at_end=lambda following=epoch + 1: loader.begin(following)):
            pass
        for _ in evaluation:
            pass
        if workers:
            for each in (loader, evaluation):
                pids |= {worker.pid for worker in each._reading._loader._iterator._workers}
        gc.collect()
        measured.append({pid: resident(pid) for pid in pids})
    loader.close()
    evaluation.close()
    assert measured[1].keys() == measured[-1].keys(), "a worker was replaced"
    return measured[1], measured[-1]


def assert_flat(before, after):
    for pid, first in before.items():
        assert after[pid] <= first * (1 + MOST_GROWTH), (pid, first / MB, after[pid] / MB)


@pytest.mark.slow
def test_ten_epochs_in_memory_take_no_more_memory_than_two():
    assert_flat(*grown(TensorDataset(torch.randn(640, 512), torch.arange(640)), workers=0))


@pytest.mark.slow
def test_ten_epochs_through_workers_take_no_more_memory_than_two():
    assert_flat(*grown(Pictures(64, 96), workers=1))


def test_memory_that_is_kept_from_epoch_to_epoch_would_be_found():
    before = {"self": resident("self")}
    tenth = before["self"] // 10
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # the allocator might give memory that is there already
    with mmap.mmap(-1, tenth, flags=private) as kept:
        kept.write(bytes(tenth))
        with pytest.raises(AssertionError):
            assert_flat(before, {"self": resident("self")})
