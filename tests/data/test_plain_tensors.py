import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lockstep.data import Digits, PadCropFlip
from lockstep.data.plain_tensors import plain_tensors
from lockstep.data.reader import SampleReader

ROWS = np.array([5, 0, 3])


class Changed(Digits):
    """Gives its samples in another way than its class does."""

    def __getitem__(self, index):
        return super().__getitem__(0)


class OwnTensors(TensorDataset):
    """Might give anything."""


def test_sets_that_are_nothing_but_tensors_are_known():
    tensors = torch.arange(6), torch.ones(6, 2)
    assert plain_tensors(TensorDataset(*tensors)) is not None
    assert [tensor.shape for tensor in plain_tensors(Digits())] == [(1797, 1, 8, 8), (1797,)]


@pytest.mark.parametrize("dataset", [Changed(), OwnTensors(torch.arange(3)), [1, 2]])
def test_sets_that_may_give_something_else_are_not(dataset):
    assert plain_tensors(dataset) is None


def test_what_is_read_is_what_the_set_gives_for_a_whole_micro_batch():
    digits = Digits()
    images, labels = SampleReader(digits, seed=0).read(0, ROWS)
    assert torch.equal(images, digits.images[ROWS]) and torch.equal(labels, digits.labels[ROWS])


def test_a_transform_that_is_given_later_is_used_from_then_on():
    digits = Digits()
    reader = SampleReader(digits, seed=0)
    before, _ = reader.read(0, ROWS)
    digits.transform = PadCropFlip(padding=2)
    after, _ = reader.read(0, ROWS)
    wanted = SampleReader(digits, seed=0).read(0, ROWS)[0]
    assert torch.equal(after, wanted) and not torch.equal(after, before)


def test_the_random_state_is_taken_once_for_all_that_is_read_at_once():
    class Draws(list):
        def __getitem__(self, index):
            return torch.rand(2)

    reader = SampleReader(Draws(range(8)), seed=3)
    apart = [*reader.read(0, ROWS[:1]), *reader.read(0, ROWS[1:])]
    state = torch.random.get_rng_state()
    together = reader.read_together(0, ROWS, (1, len(ROWS) - 1)).apart()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(torch.cat(list(together)), torch.stack(apart))
