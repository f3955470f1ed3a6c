import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from lockstep.data import BrokenSample, Bucketed, Mixed, SkipBroken, Weighted, known_labels
from lockstep.data.reader import Request, SampleReader
from lockstep.data.workers import WorkerReading
from lockstep.data.wrappers.skipping import stand_in
from lockstep.errors import ConfigError, DataError

BROKEN = {4, 50, stand_in(50, 0, 100)}


class Each(Dataset):
    """Read one by one; each sample holds its number and a random one."""

    def __init__(self, broken=BROKEN):
        self.broken = broken

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError("torn")
        return index, torch.rand(())

    def sample_path(self, index):
        return f"{index}.jpg"


class Pictures(Each):
    def __getitem__(self, index):
        return torch.full((1, 4, 4), super().__getitem__(index)[0]), index % 3


class Whole(Each):
    """Read by micro-batch."""

    def get_batch(self, indices, keys):
        for position, index in enumerate(indices.tolist()):
            if index in self.broken:
                raise BrokenSample(position) from OSError("torn")
        return torch.from_numpy(indices), torch.from_numpy(keys.uniforms(1)[:, 0])


def read(dataset, indices, epoch=0):
    return SampleReader(dataset, seed=0).read(epoch, np.asarray(indices))


@pytest.mark.fault("D1")
@pytest.mark.parametrize("kind", [Each, Whole])
def test_another_sample_stands_in_and_all_others_stay_as_they_are(kind):
    dataset = SkipBroken(kind())
    numbers, drawn = read(dataset, [3, 4, 50, 9])
    assert numbers.tolist() == [3, stand_in(4, 0, 100), stand_in(50, 1, 100), 9]
    good, alone = read(kind(), [3, 9])
    assert good.tolist() == [3, 9] and torch.equal(drawn[[0, 3]], alone)
    assert torch.equal(read(SkipBroken(kind()), [4])[1], drawn[1:2])
    assert dataset.skipped(np.array([9, 4, 3, 50])).tolist() == [4, 50]


def test_nothing_is_noted_that_was_not_asked_for_or_is_sound():
    dataset = SkipBroken(Each())
    read(dataset, [50])
    assert dataset.skipped(np.arange(100)).tolist() == [50]
    assert SkipBroken(Each(broken=())).skipped(np.arange(100)).tolist() == []


def test_a_stand_in_is_a_function_of_the_number_and_never_the_sample_itself():
    found = [stand_in(index, attempt, 7) for index in range(7) for attempt in range(50)]
    assert set(found) == set(range(7))
    assert all(stand_in(index, attempt, 7) != index for index in range(7) for attempt in range(50))
    assert stand_in(0, 0, 1) == 0


@pytest.mark.fault("D1")
def test_what_workers_skip_is_known_where_they_were_started():
    dataset = SkipBroken(Each())
    reading = WorkerReading(SampleReader(dataset, seed=0), workers=2)
    try:
        parts = list(reading.read(Request(0, np.arange(start, start + 25)) for start in range(0, 100, 25)))
    finally:
        reading.close()
    inline = [read(SkipBroken(Each()), np.arange(start, start + 25)) for start in range(0, 100, 25)]
    for mine, theirs in zip(parts, inline, strict=True):
        assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
    assert dataset.skipped(np.arange(100)).tolist() == sorted(BROKEN)


def test_a_set_of_which_nothing_can_be_read_ends_in_an_error_that_names_the_sample():
    for kind in (Each, Whole):
        with pytest.raises(DataError, match=r"sample 6 \(6\.jpg\) cannot be read, and neither can the 7 samples"):
            read(SkipBroken(kind(broken=range(100))), [6])


def test_samples_behind_weights_and_buckets_are_skipped_and_named():
    weighted = SkipBroken(Weighted(Each(broken={4}), [5.0 if index == 4 else 1.0 for index in range(100)]))
    places = weighted.dataset.sample_at(0, 0, np.arange(100)).tolist()
    place = places.index(4)
    read(weighted, [place])
    assert weighted.skipped(np.arange(100)).tolist() == [place]
    assert weighted.named(0, 0, place) == "sample 4 (4.jpg)"
    buckets = SkipBroken(
        Bucketed(Each(broken={4}), np.ones(100, int), 5, collate=lambda rows: [row[0] for row in rows])
    )
    order = buckets.dataset.sample_at(0, 0, np.arange(100)).tolist()
    place = order.index(4)
    assert read(buckets, [place])[0] == order[stand_in(place, 0, 100)]
    assert buckets.named(0, 0, place) == "sample 4 (4.jpg)"


def test_a_stand_in_is_mixed_with_the_others():
    images = Subset(Pictures({4}), range(10))
    dataset = SkipBroken(Mixed(Weighted(images, [3.0 if index == 4 else 1.0 for index in range(10)]), 3))
    places = np.flatnonzero(dataset.dataset.dataset.sample_at(0, 0, np.arange(10)) == 4)
    assert len(places) and read(dataset, range(10))[0].shape == (10, 1, 4, 4)
    assert dataset.skipped(np.arange(10)).tolist() == places.tolist()
    assert dataset.named(0, 0, int(places[0])) == "sample 4 (4.jpg)"


def test_labels_and_names_are_those_of_the_set():
    tensors = TensorDataset(torch.zeros(6, 2), torch.arange(6))
    assert known_labels(SkipBroken(Subset(tensors, [5, 1]))).tolist() == [5, 1]
    assert known_labels(SkipBroken(Each())) is None
    assert SkipBroken(Subset(Each(), [7, 8])).sample_path(1) == "8.jpg"
    assert torch.equal(read(SkipBroken(Subset(tensors, [5, 1])), [0])[1], torch.tensor([5]))


def test_it_survives_pickling_and_refuses_a_part_that_is_none():
    sent = pickle.loads(pickle.dumps(SkipBroken(Each(), most=0.05)))
    read(sent, [4])
    assert sent.skipped(np.arange(100)).tolist() == [4] and sent.limit == 5
    assert [SkipBroken(Each(), most=n / 100).limit for n in range(100)] == list(range(100))
    for most in (-0.1, 1):
        with pytest.raises(ConfigError, match="of at least 0 and below 1"):
            SkipBroken(Each(), most=most)
