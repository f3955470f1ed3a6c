from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.pin_memory import pin_memory

from lockstep.core.plan import BatchShape, SamplePlan, Share
from lockstep.data import CIFAR10, IDX, Digits, ImageFolder, Mixed, StepLoader
from lockstep.data.reader import GroupedBatch, rows_independent, split_rows

Pair = namedtuple("Pair", "input target")


class Draws(Dataset):
    """Gives a random number for each row, keyed by sample, and says how many rows it was asked for."""

    rows_independent = True

    def __len__(self):
        return 40

    def __getitem__(self, index):
        raise NotImplementedError

    def get_batch(self, indices, keys):
        asked = torch.full((len(indices),), len(indices))
        return {"x": torch.from_numpy(keys.uniforms(2)), "index": torch.from_numpy(indices), "asked": asked}


class Alone(Draws):
    """The same, read micro-batch by micro-batch, as it does not say anew that rows stand alone."""

    def get_batch(self, indices, keys):
        assert len(indices) <= 2
        return super().get_batch(indices, keys)


class Lockpage:
    def pin_memory(self):
        return "pinned"


def test_data_of_any_depth_is_cut_into_rows():
    x, y = torch.arange(12).view(6, 2), torch.arange(6.0)
    parts = split_rows({"pair": Pair(x, y), "list": [y, (x,)]}, (3, 2, 1))
    assert [part["pair"].target.tolist() for part in parts] == [[0, 1, 2], [3, 4], [5]]
    assert type(parts[1]["pair"]) is Pair and type(parts[1]["list"][1]) is tuple
    assert parts[2]["list"][1][0].tolist() == [[10, 11]]


def test_parts_can_be_written_into_without_the_others_noticing():
    whole = torch.zeros(32, 4)
    one, other = split_rows(whole, (16, 16))
    one.add_(1)
    assert (one._version, other._version) == (1, 0) and not other.any()


def test_a_part_that_would_begin_between_two_lines_of_the_cache_is_copied():
    whole = torch.arange(30.0).view(10, 3)
    parts = split_rows(whole, (5, 5))
    assert all(part.data_ptr() % 64 == 0 for part in parts) and torch.equal(torch.cat(list(parts)), whole)


def test_torch_pins_what_was_read_together():
    found = pin_memory(GroupedBatch([(Lockpage(), 3)], None))
    assert list(found.apart()) == [("pinned", 3)]


@pytest.mark.parametrize("cls", [Digits, CIFAR10, IDX, ImageFolder])
def test_sets_of_ours_whose_rows_stand_alone_say_so(cls):
    assert rows_independent(cls.__new__(cls))


def test_a_set_that_mixes_rows_is_not_read_together():
    assert not rows_independent(Mixed.__new__(Mixed))


def test_a_class_that_reads_in_its_own_way_has_to_say_it_anew():
    class Other(Draws):
        def get_batch(self, indices, keys):
            return super().get_batch(indices, keys)

    assert rows_independent(Draws()) and not rows_independent(Other())


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("share", [Share(), Share(holders=3, holder=1), Share(holders=3, holder=2, rounds=True)])
def test_a_step_is_asked_for_in_as_few_requests_as_there_are_readers_and_its_bits_stay(workers, share):
    plan = SamplePlan(samples=40, shape=BatchShape(global_batch=16, micro_batches=8), seed=2)
    loader, each = (
        StepLoader(Draws(), plan, share=share, workers=workers),
        StepLoader(Alone(), plan, share=share),
    )
    for epoch in range(2):
        for found, wanted in zip(loader.batches(epoch), each.batches(epoch), strict=True):
            for one, other in zip(found.micro_batches, wanted.micro_batches, strict=True):
                assert one.k == other.k and np.array_equal(one.indices, one.data["index"])
                assert torch.equal(one.data["x"], other.data["x"])
            if found.plan.position < 2:
                asked = {int(part.data["asked"][0]) for part in found.micro_batches}
                assert max(asked) == 2 * -(-len(found.micro_batches) // max(1, workers))
    loader.close()
