import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lockstep.core.plan import BatchShape, SamplePlan, Share
from lockstep.data import Digits, PadCropFlip, StepLoader, Weighted
from lockstep.data.images.image_arrays import ImageArrays
from lockstep.data.reader import SampleReader, plain_tensors, rows_independent

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
    together = reader.read_grouped(0, ROWS, (1, len(ROWS) - 1)).apart()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(torch.cat(list(together)), torch.stack(apart))


def test_small_steps_are_read_ahead_and_what_is_written_into_the_set_meanwhile_is_seen():
    """A loop that relabels its set sees every new label in the next step, wherever it began and whoever reads."""

    def seen(first, holders, replace):
        tensors = TensorDataset(torch.arange(64), torch.zeros(64, dtype=torch.int64))
        plan = SamplePlan(samples=64, shape=BatchShape(global_batch=8, micro_batches=4), seed=1)
        found = {}
        for holder in range(holders):
            loader = StepLoader(tensors, plan, share=Share(holder=holder, holders=holders))
            for batch in loader.batches(0, first):
                label = batch.plan.position + 1
                for part in batch.micro_batches:
                    found[batch.plan.position, part.k] = part.data[0].tolist(), part.data[1].tolist()
                if replace:
                    tensors.tensors = tensors.tensors[0], torch.full((64,), label)
                else:
                    tensors.tensors[1].fill_(label)
            tensors.tensors[1].fill_(first)
        return found

    whole = seen(0, 1, replace=False)
    assert all(labels == [position, position] for (position, _), (_, labels) in whole.items())
    assert len(whole) == 32 and whole == seen(0, 1, replace=True)
    later = {place: rows for place, rows in whole.items() if place[0] > 3}
    assert later == {place: rows for place, rows in seen(3, 2, replace=False).items() if place[0] > 3}


def test_a_set_whose_class_mixes_rows_is_not_read_together():
    class Mixes(ImageArrays):
        def get_batch(self, indices, keys):
            return self.images[indices].float().mean(0, keepdim=True).expand(len(indices), -1, -1, -1), indices

    images, labels = torch.randint(0, 256, (32, 1, 4, 4), dtype=torch.uint8), torch.zeros(32)
    dataset = Mixes(images, labels, classes=["a"], name="mixes")
    assert rows_independent(ImageArrays(images, labels, classes=["a"], name="apart")) and not rows_independent(dataset)
    plan = SamplePlan(samples=32, shape=BatchShape(global_batch=16, micro_batches=4))
    for batch in StepLoader(dataset, plan).batches(0):
        for part in batch.micro_batches:
            assert torch.equal(part.data[0][0], images[part.indices].float().mean(0))


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_micro_batches_that_are_read_together_begin_where_kernels_want_them(rows):
    """Three rows of 12 bytes end in the middle of a cache line: the next micro-batch is copied to the start of one."""
    dataset = TensorDataset(torch.arange(90.0).view(30, 3))
    plan = SamplePlan(samples=30, shape=BatchShape(global_batch=rows * 2, micro_batches=2))
    for batch in StepLoader(dataset, plan).batches(0):
        for part in batch.micro_batches:
            assert part.data[0].data_ptr() % 64 == 0
            assert torch.equal(part.data[0], dataset.tensors[0][part.indices])


def test_tensors_on_another_device_are_read_there():
    data = TensorDataset(torch.zeros(8, 3, device="meta"), torch.arange(8))
    for each in (data, Weighted(data, [1.0] * 8)):
        inputs, targets = SampleReader(each, seed=0).read(0, np.array([1, 5]))
        assert inputs.device.type == "meta" and inputs.shape == (2, 3) and len(targets) == 2
