import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lockstep.data.reader import Request, SampleReader
from lockstep.data.worker_process import Failure, WorkerDataset, explain_lost_worker
from lockstep.errors import RankError


class Broken(TensorDataset):
    def __getitem__(self, index):
        raise ValueError("cannot identify image file")


def request(*numbers):
    return Request(0, np.array(numbers, dtype=np.int64))


def test_an_item_of_the_worker_data_set_is_the_micro_batch_of_a_request():
    dataset = WorkerDataset(SampleReader(TensorDataset(torch.arange(8)), seed=0))
    assert torch.equal(dataset[request(2, 5)].apart()[0][0], torch.tensor([2, 5]))


def test_a_sample_that_cannot_be_read_is_returned_as_a_failure_with_its_traceback():
    found = WorkerDataset(SampleReader(Broken(torch.arange(8)), seed=0))[request(3)]
    assert isinstance(found, Failure)
    assert found.message == "Sample 3 cannot be read: ValueError: cannot identify image file"
    assert "Traceback" in found.trace


@pytest.mark.parametrize(
    ("code", "told"),
    [(3, r"\(pid \d+\) ended with exit code 3"), (None, r"\(pid \d+\) was killed by SIGKILL")],
)
def test_the_loss_of_a_worker_is_explained_by_its_end_and_the_free_memory(code, told):
    ending = (lambda: os._exit(code)) if code else (lambda: os.kill(os.getpid(), signal.SIGKILL))
    worker = multiprocessing.get_context("fork").Process(target=ending)
    worker.start()
    error = explain_lost_worker([worker], RuntimeError("gone"), "samples 1, 2 of epoch 0")
    assert isinstance(error, RankError)
    with pytest.raises(
        RankError, match=f"read samples 1, 2 of epoch 0, a data loader worker {told}.*of memory are available"
    ):
        raise error
