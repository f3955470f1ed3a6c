import os
import time

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from lockstep.core.generators import generators_kept
from lockstep.data import Weighted
from lockstep.data.reader import BrokenSample, SampleReader
from lockstep.errors import DataError


class Squares(Dataset):
    def __init__(self, size=20, broken=()):
        self.size, self.broken = size, broken

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError("image file is truncated (3 bytes not processed)")
        return torch.tensor([float(index), float(index) ** 2]) + torch.rand(2), index


class Whole(Squares):
    in_memory = True

    def get_batch(self, indices, keys):
        for position, index in enumerate(indices):
            if index in self.broken:
                raise BrokenSample(position) from OSError("cannot identify image file")
        return torch.from_numpy(keys.uniforms(2)), torch.from_numpy(indices)


class Listed(Squares):
    def __getitems__(self, indices):
        return [{"x": torch.rand(2), "number": index} for index in indices]


class Files(Squares):
    def __init__(self, **options):
        super().__init__(**options)
        self.root, self.samples = "/photos", [(f"/photos/roses/{i}.jpg", 0) for i in range(20)]


def read(dataset, indices, epoch=0, **options):
    return SampleReader(dataset, seed=4, **options).read(epoch, np.array(indices))


def equal(a, b):
    return type(a) is type(b) and len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def test_tensors_are_indexed_as_the_samples_would_be():
    tensors = torch.rand(10, 3), torch.arange(10)
    inputs, targets = read(TensorDataset(*tensors), [7, 2, 2])
    assert torch.equal(inputs, tensors[0][[7, 2, 2]]) and targets.tolist() == [7, 2, 2]
    each = read(TensorDataset(*tensors), [7, 2, 2], collate=torch.utils.data.default_collate)
    assert equal(each, (inputs, targets))


def test_a_custom_collate_gets_single_samples_of_a_tensor_dataset():
    got = read(TensorDataset(torch.arange(4)), [3, 1], collate=lambda samples: [int(x) for (x,) in samples])
    assert got == [3, 1]


def test_pairs_are_collated_into_a_pair():
    inputs, targets = read(Squares(), [1, 5])
    assert inputs.shape == (2, 2) and targets.tolist() == [1, 5]
    assert isinstance(read(Squares(), [1, 5]), tuple)


def test_a_sample_is_the_same_in_any_micro_batch():
    together, alone = read(Squares(), [3, 8, 5]), read(Squares(), [8])
    assert torch.equal(together[0][1], alone[0][0])
    assert not torch.equal(read(Squares(), [8], epoch=1)[0], alone[0])


def test_a_batch_method_gets_the_rows_below_a_subset_and_the_keys_above_it():
    chosen = Subset(Subset(Whole(), range(10, 20)), [4, 0, 2])
    uniforms, rows = read(chosen, [1, 2])
    assert rows.tolist() == [10, 12]
    assert torch.equal(uniforms, read(Whole(), [1, 2])[0])


def test_a_subset_without_batches_is_read_sample_by_sample():
    _, numbers = read(Subset(Squares(), [9, 8, 7]), [2, 0])
    assert numbers.tolist() == [7, 9]


def test_list_access_is_used_and_its_random_numbers_are_keyed():
    data = read(Listed(), [4, 6])
    assert data["number"].tolist() == [4, 6]
    torch.rand(1)
    assert torch.equal(read(Listed(), [4, 6])["x"], data["x"])


def test_reading_leaves_the_random_numbers_of_the_process_alone():
    for dataset in (Squares(), Whole(), Listed(), TensorDataset(torch.arange(9))):
        with generators_kept():
            expected = torch.rand(2)
        with generators_kept():
            read(dataset, [1, 2])
            assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("kind", [Squares, Whole])
def test_a_broken_sample_is_named_with_its_cause(kind):
    with pytest.raises(DataError, match=r"Sample 12 cannot be read: OSError: .*image file") as caught:
        read(kind(broken={12}), [3, 12])
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.exit_code == 3


def test_a_batch_method_that_fails_names_the_samples_it_was_asked_for():
    class Failing(Whole):
        def get_batch(self, indices, keys):
            raise RuntimeError("no such column")

    with pytest.raises(DataError, match=r"samples 3, 12 cannot be read: RuntimeError: no such column"):
        read(Failing(), [3, 12])


def test_the_file_of_a_broken_sample_is_named_where_the_set_knows_it():
    with pytest.raises(DataError, match=r"Sample 12 \(roses/12\.jpg\) cannot be read"):
        read(Files(broken={12}), [12])
    with pytest.raises(DataError, match=r"Sample 1 \(roses/12\.jpg\) cannot be read"):
        read(Subset(Files(broken={12}), [11, 12]), [1])


def test_samples_of_unequal_shape_are_named_with_what_to_do():
    class Ragged(Squares):
        def __getitem__(self, index):
            return torch.zeros(index)

    with pytest.raises(DataError, match=r"samples 1, 2 cannot be collated into one micro-batch.*one shape"):
        read(Ragged(), [1, 2])


def test_only_sets_in_memory_are_kept_from_the_workers():
    assert SampleReader(TensorDataset(torch.arange(3)), seed=0).in_memory
    assert SampleReader(Whole(), seed=0).in_memory
    assert not SampleReader(Whole(), seed=0, collate=list).in_memory
    assert not SampleReader(Squares(), seed=0).in_memory


@pytest.mark.parametrize(
    "own", [lambda self, indices: 1 / 0, lambda self, split="train", size=4: 1 / 0, lambda self: 1 / 0]
)
def test_a_method_of_the_name_get_batch_that_takes_something_else_is_the_user_s_own(own):
    """It was called with (indices, keys), and the data set refused for that."""
    dataset = type("Own", (TensorDataset,), {"get_batch": own})(torch.arange(6))
    for each in (dataset, Weighted(dataset, [0.0, 1.0, 0.0, 0.0, 0.0, 0.0])):
        (found,) = SampleReader(each, seed=0, checks=True).read(0, np.array([1, 1]))
        assert found.tolist() == [1, 1]


class OfAnEpoch(Squares):
    """Counts its reads, from which it knows the epoch."""

    reads, most = 0, 1_000_000

    def __getitem__(self, index):
        self.reads += 1
        if self.reads > self.most:
            raise OSError("read too often")
        x, number = super().__getitem__(index)
        return x * (1 + self.reads // len(self)), number


def test_a_data_set_that_counts_its_reads_is_refused_before_its_values_change():
    """On several processes, each of which reads a part, its epochs lasted longer."""
    with pytest.raises(DataError, match=r"OfAnEpoch\[3\] gave other values when it was read again.*a counter"):
        read(OfAnEpoch(), [3, 1], checks=True)


def test_values_that_differ_are_refused_where_a_later_read_would_fail():
    class Moving(OfAnEpoch):
        most = 12

        def __getitem__(self, index):
            x, number = super().__getitem__(index)
            return x + self.reads, number

    with pytest.raises(DataError, match=r"Moving\[3\] gave other values when it was read again"):
        read(Moving(), [3, 1], checks=True)


class SeededByTheClock(Squares):
    def __getitem__(self, index):
        np.random.seed(os.getpid() * int(time.time()) % 123_456_789)
        return torch.from_numpy(np.random.rand(2)), index


class TimesItsReads(Squares):
    seconds = 0.0

    def __getitem__(self, index):
        began = time.time()
        found = super().__getitem__(index)
        self.seconds += time.time() - began
        return found


def test_a_seed_of_the_time_is_refused():
    """Two reads within a second are equal, and every run trained on other samples."""
    with pytest.raises(
        DataError, match=r"SeededByTheClock\[3\] gave other values when it was read again a second later"
    ):
        read(SeededByTheClock(), [3, 1], checks=True)
    read(TimesItsReads(), [3, 1], checks=True)


@pytest.mark.parametrize("most", [50, 1_000_000])
def test_a_count_of_reads_that_changes_no_value_is_left_alone(most):
    class Counted(OfAnEpoch):
        def __getitem__(self, index):
            x, number = super().__getitem__(index)
            return x - x, number

    counted = Counted()
    counted.most = most
    read(counted, [3, 1], checks=True)
    assert 2 < counted.reads < 40


def test_a_class_may_be_the_collate_function():
    """``collate_fn=list`` of samples that cannot be stacked, such as graphs; its length was asked for."""

    class Counting(list):
        made = 0

        def __init__(self, samples):
            super().__init__(samples)
            Counting.made += 1

    for collate in (list, Counting):
        got = read(Squares(), [3, 1], checks=True, collate=collate)
        assert [number for _, number in got] == [3, 1]
