import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from lockstep.core.plan import BatchShape, SamplePlan, Share
from lockstep.data import EvaluationLoader, StepLoader
from lockstep.errors import DataError, RankError, StallError


class Numbers(Dataset):
    """Gives its numbers, and does something else at one of them."""

    def __init__(self, at=-1, do=lambda: None, size=64):
        self.at, self.do, self.size = at, do, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == self.at:
            self.do()
        return torch.tensor(index)


def stuck_in_reading():
    threading.Event().wait()


def loader_of(dataset, **options):
    return EvaluationLoader(dataset, micro_batch_size=4, **{"workers": 2, **options})


def children():
    own = str(os.getpid())
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            if status.read_text().rpartition(")")[2].split()[1] == own:
                found.append(int(status.parent.name))
        except OSError:
            continue
    return set(found)


def broken():
    raise ValueError("cannot identify image file")


def test_a_broken_sample_in_a_worker_is_named_with_the_workers_traceback():
    loader = loader_of(Numbers(at=13, do=broken))
    with pytest.raises(DataError, match="Sample 13 cannot be read: ValueError: cannot identify") as caught:
        list(loader)
    assert "in __getitem__" in str(caught.value.__cause__)
    assert caught.value.exit_code == 3


def test_a_loader_can_be_read_again_after_a_broken_sample(tmp_path):
    flag = tmp_path / "repaired"
    loader = loader_of(Numbers(at=13, do=lambda: flag.exists() or broken()))
    with pytest.raises(DataError):
        list(loader)
    flag.touch()
    assert [part.k for part in loader] == list(range(16))
    loader.close()


@pytest.mark.fault("D2")
def test_a_killed_worker_is_reported_with_the_memory_it_may_have_missed():
    loader = loader_of(Numbers(at=21, do=lambda: os.kill(os.getpid(), signal.SIGKILL)))
    with pytest.raises(RankError, match=r"worker \(pid \d+\) was killed by SIGKILL") as caught:
        list(loader)
    assert "/dev/shm has" in str(caught.value) and "memory" in str(caught.value)


@pytest.mark.fault("D3")
def test_a_stuck_worker_is_reported_with_the_place_where_it_stands():
    before = children()
    loader = loader_of(Numbers(at=9, do=stuck_in_reading), timeout=1.0)
    started = time.monotonic()
    with pytest.raises(StallError, match=r"nothing for 1 s while it read samples 8, 9") as caught:
        list(loader)
    assert "stuck_in_reading" in str(caught.value)
    assert time.monotonic() - started < 6
    assert children() <= before


def test_workers_leave_ctrl_c_and_sigterm_to_the_rank():
    before = children()
    loader = loader_of(Numbers(size=200), workers=2)
    parts = iter(loader)
    next(parts)
    workers = children() - before
    assert len(workers) == 2
    for worker in workers:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            os.kill(worker, number)
        outsider = f"import os; os.kill({worker}, {int(signal.SIGTERM)})"  # the cluster, not the parent
        subprocess.run([sys.executable, "-c", outsider], check=True)
    assert len(list(parts)) == 49
    assert children() - before == workers
    loader.close()
    assert children() <= before


def test_workers_stay_over_the_epochs():
    plan = SamplePlan(samples=64, shape=BatchShape(global_batch=16, micro_batches=4))
    loader = StepLoader(Numbers(), plan, workers=2)
    before = children()
    list(loader.batches(0))
    workers = children() - before
    list(loader.batches(1))
    assert len(workers) == 2 and children() - before == workers
    loader.close()


def test_a_worker_that_dies_between_two_epochs_is_replaced():
    loader, before = loader_of(Numbers()), children()
    list(loader)
    victim = min(children() - before)
    death = os.pidfd_open(victim)
    os.kill(victim, signal.SIGKILL)
    assert select.select([death], [], [], 5.0)[0]
    os.close(death)
    assert [part.k for part in loader] == list(range(16))
    loader.close()


def test_the_death_of_a_worker_is_told_to_who_waits_for_it_and_to_nobody_else():
    loader, before = loader_of(Numbers(size=400)), children()
    parts = iter(loader)
    next(parts)
    for worker in children() - before:
        death = os.pidfd_open(worker)
        os.kill(worker, signal.SIGKILL)
        assert select.select([death], [], [], 5.0)[0]
        os.close(death)
    assert sum(number for number in range(100_000)) > 0  # any work: a signal handler could interrupt it
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        list(parts)


def test_a_second_iteration_ends_the_first():
    loader = loader_of(Numbers())
    first = iter(loader)
    next(first)
    assert len(list(loader)) == 16
    with pytest.raises(RuntimeError, match="iterated again"):
        next(first)
    loader.close()


def test_a_loader_that_is_forgotten_leaves_no_process():
    before = children()
    parts = iter(loader_of(Numbers()))
    next(parts)
    del parts
    assert children() <= before


def test_a_data_set_in_memory_starts_no_process():
    before = children()
    dataset = torch.utils.data.TensorDataset(torch.arange(64))
    for part in loader_of(dataset):
        assert part.data[0].tolist() == part.indices.tolist()
        assert children() <= before


def test_a_rank_without_samples_to_evaluate_starts_no_process():
    before = children()
    loader = EvaluationLoader(Numbers(size=5), micro_batch_size=4, share=Share(holder=2, holders=3), workers=2)
    assert list(loader) == [] and children() <= before


class OfOneFile(Numbers):
    """Keeps a file open, and looks for a sample in it before it reads."""

    def __init__(self, path):
        super().__init__()
        path.write_bytes(bytes(range(64)))
        self.file = path.open("rb", buffering=0)

    def __getitem__(self, index):
        self.file.seek(index)
        time.sleep(0.003)
        return torch.tensor(self.file.read(1)[0])


def test_workers_have_places_of_their_own_in_a_file_that_is_open_when_they_are_started(tmp_path):
    """One worker's seek moved where the other read, so samples had values of others."""
    data = OfOneFile(tmp_path / "samples")
    loader = loader_of(data)
    found = torch.cat([part.data for part in loader]).tolist()
    loader.close()
    data.file.close()
    assert found == list(range(64))


class DrawsByTheSeedOfItsWorker(Numbers):
    def __getitem__(self, index):
        return np.random.default_rng(get_worker_info().seed).random()


@pytest.mark.parametrize("workers", [1, 3])
def test_what_is_drawn_by_the_seed_of_a_worker_is_the_same_for_any_number_of_them(workers):
    def drawn(workers):
        loader = loader_of(DrawsByTheSeedOfItsWorker(), workers=workers)
        found = torch.cat([part.data for part in loader]).tolist()
        loader.close()
        return found

    found = drawn(workers)
    assert found == drawn(2) and len(set(found)) == 64


class OfItsWorker(Numbers):
    def __getitem__(self, index):
        return index + get_worker_info().id


def test_what_depends_on_the_number_of_the_worker_is_refused_where_there_are_several():
    """Which worker reads a sample follows from how many micro-batches a process has."""
    with pytest.raises(DataError, match=r"OfItsWorker\[\d+\] gave other values .*asks for the number of its worker"):
        list(loader_of(OfItsWorker(), checks=True))
    assert len(list(loader_of(OfItsWorker(), checks=True, workers=1))) == 16


def test_starting_workers_leaves_the_random_numbers_of_the_process_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    loader = loader_of(Numbers())
    list(loader)
    assert torch.equal(torch.rand(2), expected)
    loader.close()


_RANK = """
import os, sys, torch
from lockstep.data import EvaluationLoader

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 1000
    def __getitem__(self, index):
        if index == 5: sys.stdout.write(f"{os.getpid()}\\n"); sys.stdout.flush(); import time; time.sleep(600)
        return torch.tensor(index)

if __name__ == "__main__":
    list(EvaluationLoader(Slow(), micro_batch_size=4, workers=2))
"""


@pytest.mark.fault("P3")
def test_workers_end_with_a_rank_that_is_killed(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(_RANK)
    rank = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    worker = os.pidfd_open(int(rank.stdout.readline()))
    try:
        rank.kill()
        rank.wait()
        assert select.select([worker], [], [], 5.0)[0], "the worker outlived its rank by 5 s"
    finally:
        os.close(worker)
        rank.stdout.close()


def test_a_micro_batch_of_photos_comes_without_a_copy(tmp_path):
    from PIL import Image

    from lockstep.data import ImageFolder

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(4):
            Image.new("RGB", (40, 30), (number * 40, 9, 80)).save(tmp_path / name / f"{number}.png")
    dataset = ImageFolder(tmp_path, size=96)
    loader = EvaluationLoader(dataset, micro_batch_size=4, workers=1)
    here = EvaluationLoader(dataset, micro_batch_size=4)
    for part, wanted in zip(loader, here, strict=True):
        assert lies_in_shared_memory(part.data[0])
        assert torch.equal(part.data[0], wanted.data[0])
        assert np.array_equal(part.indices, wanted.indices)
    loader.close()


def lies_in_shared_memory(tensor):
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line.split()[1] == "rw-s"
    return False
