import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lockstep.data import Digits, ImageArrays, Normalize, adopt, check_batch_size
from lockstep.errors import ConfigError

DATA = TensorDataset(torch.arange(40), torch.arange(40))


def collate(samples):
    return samples


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Curriculum(Sampler):
    def __iter__(self):
        return iter(range(40))

    def __len__(self):
        return 40


def test_a_data_set_is_taken_as_it_is():
    source = adopt(DATA)
    assert source.dataset is DATA
    assert (source.shuffle, source.workers, source.drop_last, source.notes) == (None, None, None, ())
    assert adopt(source) is source


def test_a_loaders_settings_are_taken_over():
    loader = DataLoader(
        DATA, batch_size=8, shuffle=True, num_workers=2, drop_last=True, collate_fn=collate, timeout=9
    )
    source = adopt(loader)
    assert source.dataset is DATA and source.collate is collate
    assert (source.workers, source.shuffle, source.drop_last, source.timeout) == (2, True, True, 9)
    assert (source.batch_size, source.pin_memory) == (8, False)


@pytest.mark.parametrize(
    ("sampler", "shuffle"), [(SequentialSampler(DATA), False), (RandomSampler(DATA), True), (None, False)]
)
def test_the_order_follows_the_sampler(sampler, shuffle):
    source = adopt(DataLoader(DATA, batch_size=4, sampler=sampler))
    assert source.shuffle is shuffle and source.collate is None and source.timeout is None


def test_a_distributed_sampler_is_replaced_and_its_seed_said():
    sampler = DistributedSampler(DATA, num_replicas=4, rank=1, shuffle=True, seed=11, drop_last=True)
    source = adopt(DataLoader(DATA, batch_size=4, sampler=sampler))
    assert source.shuffle is True and source.drop_last is True and source.dataset is DATA
    (note,) = source.notes
    assert "seed=11" in note and "set_epoch is not needed" in note
    still = DistributedSampler(DATA, num_replicas=2, rank=0, shuffle=False)
    assert adopt(DataLoader(DATA, sampler=still)).shuffle is False


def test_a_sampler_of_a_part_becomes_a_subset():
    source = adopt(DataLoader(DATA, batch_size=4, sampler=SubsetRandomSampler([7, 3, 5])))
    assert isinstance(source.dataset, Subset) and list(source.dataset.indices) == [7, 3, 5]
    assert source.shuffle is True


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 40, 40)),
            r"weights to the loss, for example",
        ),
        (
            lambda: DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)),
            r"Write run\.batches\(dataset\)",
        ),
        (
            lambda: DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=9)),
            r"Write run\.batches\(dataset\)",
        ),
        (lambda: DataLoader(DATA, sampler=Curriculum()), r"Curriculum has its own order.*Write run\.batches"),
        (
            lambda: DataLoader(DATA, batch_size=None),
            r"batch_size=None.*Give single samples: run\.batches\(dataset\)",
        ),
        (lambda: DataLoader(Stream()), r"Stream is an IterableDataset.*Give it __len__ and __getitem__"),
        (lambda: Stream(), r"IterableDataset"),
        (
            lambda: DistributedSampler(DATA, 2, 0),
            r"needs a data set and got a DistributedSampler.*Write run\.batches\(dataset\)",
        ),
        (lambda: iter([1]), r"no __len__ or no __getitem__"),
    ],
)
def test_what_no_plan_can_follow_is_refused_with_the_line_that_replaces_it(make, message):
    with pytest.raises(ConfigError, match=message):
        adopt(make())


def test_a_batch_sampler_of_ones_own_is_refused():
    class Bucketed(BatchSampler):
        pass

    loader = DataLoader(DATA, batch_sampler=Bucketed(SequentialSampler(DATA), 4, False))
    with pytest.raises(
        ConfigError, match=r"batch_sampler Bucketed decides the batches.*Write run\.batches\(dataset\)"
    ):
        adopt(loader)


def test_a_plain_batch_sampler_is_taken_over():
    loader = DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), batch_size=5, drop_last=True))
    source = adopt(loader)
    assert source.shuffle is True and source.drop_last is True and source.batch_size == 5


def test_a_worker_init_function_is_said_to_be_left_out():
    (note,) = adopt(DataLoader(DATA, num_workers=1, worker_init_fn=lambda worker: None)).notes
    assert "worker_init_fn is not called" in note


def test_what_is_left_to_the_device_is_found_below_subsets():
    finish = Normalize((0.5,), (0.5,))
    images = ImageArrays(
        torch.zeros(4, 1, 2, 2, dtype=torch.uint8),
        torch.zeros(4),
        classes=["a"],
        name="x",
        device_transform=finish,
    )
    assert adopt(Subset(images, [1, 2])).device_transform is finish
    assert adopt(DataLoader(images, batch_size=2)).device_transform is finish
    assert adopt(Digits()).device_transform is None


@pytest.mark.parametrize(("batch_size", "said"), [(128, False), (16, False), (32, False), (100, True)])
def test_a_batch_size_that_is_none_of_the_recipes_is_said(batch_size, said):
    source = adopt(DataLoader(DATA, batch_size=batch_size))
    note = check_batch_size(source, global_batch=128, micro_batch_size=16, holders=4)
    assert (note is not None) is said
    if said:
        assert "batch_size=100 is replaced by the run's global_batch=128" in note
    assert check_batch_size(adopt(DATA), global_batch=128, micro_batch_size=16, holders=4) is None
