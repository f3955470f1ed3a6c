import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from lockstep.data import BrokenSample, SampleKeys, SkipBroken
from lockstep.data.wrappers.wrapping import Wrapping
from lockstep.errors import ConfigError

SET = TensorDataset(torch.arange(10), torch.arange(10) * 2)


class Broken(TensorDataset):
    def __getitem__(self, index):
        if index == 4:
            raise ValueError("truncated")
        return super().__getitem__(index)


def keys(numbers):
    return SampleKeys(0, 0, numbers)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (iter([1]), "Wrapping was given a .*iterator, which has no __len__ or no __getitem__"),
        (TensorDataset(torch.zeros(0)), "Wrapping was given an empty data set"),
        (
            SkipBroken(SET),
            r"SkipBroken belongs around Wrapping, not inside it: SkipBroken\(Wrapping\(dataset",
        ),
    ],
)
def test_data_that_cannot_be_wrapped_is_refused(dataset, message):
    with pytest.raises(ConfigError, match=message):
        Wrapping(dataset)


def test_a_subset_of_tensors_is_read_whole_by_its_own_numbers():
    wrapped, numbers = Wrapping(Subset(SET, [7, 8, 9])), np.array([2, 0], dtype=np.int64)
    inputs, targets = wrapped.inner_batch()(numbers, keys(numbers))
    assert wrapped.in_memory and len(wrapped) == 3
    assert inputs.tolist() == [9, 7] and targets.tolist() == [18, 14]


def test_samples_that_are_read_one_by_one_are_collated_or_named():
    wrapped, numbers = Wrapping(Broken(torch.arange(10), torch.arange(10))), np.array([1, 4], dtype=np.int64)
    assert wrapped.collated(list, numbers[:1], keys(numbers[:1])) == [(torch.tensor(1), torch.tensor(1))]
    with pytest.raises(BrokenSample) as caught:
        wrapped.collated(None, numbers, keys(numbers))
    assert caught.value.position == 1 and "Sample 4 cannot be read" in str(caught.value.__cause__)
