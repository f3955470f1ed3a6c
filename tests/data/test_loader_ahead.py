"""Workers read the beginning of what comes next before it is asked for, and nothing else changes."""

import os
import select
import signal

import pytest
import torch
from tests.data.test_loader import Augmented, assert_equal, loaded, plan_of
from torch.utils.data import Dataset

from lockstep.data import EvaluationLoader, StepLoader
from lockstep.data.reader import ReadTrace


class Told(Dataset):
    """Writes the number of every sample that is read into a pipe."""

    def __init__(self, size=64):
        self.size = size
        self.reader, self.writer = os.pipe()

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        os.write(self.writer, index.to_bytes(4, "little"))
        return torch.tensor(index)

    def wait_for(self, samples):
        """Waits until so many more samples have been read."""
        for _ in range(samples):
            assert select.select([self.reader], [], [], 10.0)[0], "nothing is read"
            os.read(self.reader, 4)

    def close(self):
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def told():
    dataset = Told()
    yield dataset
    dataset.close()


def micro_batches(loader, epoch, first=0):
    return {
        (epoch, batch.plan.position, part.k): part
        for batch in loader.batches(epoch, first)
        for part in batch.micro_batches
    }


def test_workers_begin_an_epoch_before_it_is_asked_for(told):
    loader = StepLoader(told, plan_of(told), workers=1)
    loader.begin(0)
    told.wait_for(1)
    list(loader.batches(0))
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_was_begun_early_has_the_same_bits(workers):
    dataset = Augmented()
    loader = StepLoader(dataset, plan_of(dataset), seed=5, workers=workers)
    found = {}
    for epoch in (0, 1, 2):
        for batch in loader.batches(epoch, at_end=lambda epoch=epoch: loader.begin(epoch + 1)):
            found |= {(epoch, batch.plan.position, part.k): part for part in batch.micro_batches}
    loader.close()
    assert_equal(found, loaded(dataset, (0, 1, 2)))


def test_another_epoch_than_the_one_that_was_begun_has_its_own_bits():
    dataset = Augmented()
    loader = StepLoader(dataset, plan_of(dataset), seed=5, workers=2)
    loader.begin(1)
    assert_equal(micro_batches(loader, 2, first=3), loaded(dataset, (2,), 3))
    loader.close()


def test_an_epoch_is_begun_anew_where_a_worker_died_that_had_begun_it(told):
    loader = StepLoader(told, plan_of(told), workers=1)
    loader.begin(0)
    told.wait_for(1)
    (worker,) = (process.pid for process in loader._reading._loader._iterator._workers)
    death = os.pidfd_open(worker)
    os.kill(worker, signal.SIGKILL)
    assert select.select([death], [], [], 5.0)[0]
    os.close(death)
    assert sum(len(batch) for batch in loader.batches(0)) == len(told)
    loader.close()


def test_an_evaluation_that_was_begun_early_has_the_same_bits(told):
    loader = EvaluationLoader(told, micro_batch_size=8, workers=2)
    for _ in range(2):
        loader.begin()
        told.wait_for(1)
        assert torch.cat([part.data for part in loader]).tolist() == list(range(64))
    loader.close()


def test_a_closed_loader_forgets_what_it_had_begun(told):
    loader = StepLoader(told, plan_of(told), workers=1)
    loader.begin(0)
    loader.close()
    assert sum(len(batch) for batch in loader.batches(0)) == len(told)
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_clock_notes_every_micro_batch_by_the_process_that_read_it(workers):
    dataset, trace = Augmented(64), ReadTrace("loader", workers)
    loader = StepLoader(dataset, plan_of(dataset), workers=workers, trace=trace)
    wanted = {(0, int(part.indices[0]), len(part)) for part in micro_batches(loader, 0).values()}
    loader.close()
    spans = trace.spans()
    assert {(span.epoch, span.first, span.samples) for span in spans} == wanted and len(spans) == len(wanted)
    assert {span.worker for span in spans} == (set(range(workers)) or {-1})
    assert all(span.began < span.ended for span in spans)


def test_the_clock_keeps_the_newest_notes():
    trace, rows = ReadTrace("loader", 0), torch.arange(2).numpy()
    for epoch in range(1500):
        with trace.noting(epoch, rows):
            pass
    assert [span.epoch for span in trace.spans()] == list(range(1500 - 1024, 1500))
