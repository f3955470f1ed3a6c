import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from lockstep.data import Bucketed, PadSequences, SkipBroken, adopt
from lockstep.data.reader import SampleReader
from lockstep.errors import ConfigError, DataError

LENGTHS = np.random.default_rng(0).integers(1, 60, 205)


class Sequences(Dataset):
    def __init__(self, broken=()):
        self.broken = broken

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError("torn")
        tokens = torch.full((int(LENGTHS[index]),), index)
        return tokens, torch.cat([tokens[1:], torch.randint(1000, (1,))])


def bucketed(group=8, **options):
    return Bucketed(Sequences(), LENGTHS, group, **options)


def test_every_sample_is_read_once_in_each_epoch_in_another_order():
    orders = [bucketed(pool=64).sample_at(0, epoch, np.arange(205)) for epoch in range(3)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(205))
    assert not np.array_equal(orders[0], orders[1]) and not np.array_equal(orders[1], orders[2])


def test_a_group_holds_similar_lengths():
    def padding(dataset):
        lengths = LENGTHS[dataset.sample_at(0, 0, np.arange(200))].reshape(25, 8)
        return (lengths.max(1, keepdims=True) - lengths).sum() / lengths.sum()

    assert padding(bucketed()) < 0.1 < 0.5 < padding(bucketed(group=1, pool=1))


def test_groups_of_one_pool_are_mixed():
    lengths = LENGTHS[bucketed(pool=200).sample_at(0, 0, np.arange(200))].reshape(25, 8).mean(1)
    assert (np.diff(lengths) < 0).sum() > 5


def test_an_order_is_read_from_anywhere_in_any_parts():
    dataset = bucketed(pool=64)
    whole = dataset.sample_at(3, 1, np.arange(205))
    for places in ([200, 3, 70, 64], [0], list(range(60, 140))):
        assert np.array_equal(bucketed(pool=64).sample_at(3, 1, np.array(places)), whole[places])


def test_a_micro_batch_is_padded_and_its_random_numbers_are_keyed_by_sample():
    dataset = bucketed()
    places = np.arange(16, 24)
    inputs, targets = SampleReader(dataset, seed=0).read(2, places)
    samples = dataset.sample_at(0, 2, places)
    longest = LENGTHS[samples].max()
    assert inputs.shape == targets.shape == (8, longest)
    for row, sample in enumerate(samples.tolist()):
        length = LENGTHS[sample]
        assert inputs[row].tolist() == [sample] * length + [0] * (longest - length)
        assert targets[row, length:].tolist() == [-100] * (longest - length)
    single = SampleReader(dataset, seed=0).read(2, places[3:4])
    assert torch.equal(single[1][0], targets[3, : single[1].shape[1]])


def test_padding_takes_no_part_in_the_loss():
    output, targets = torch.randn(2, 5, 3), torch.tensor([[0, 1, 2, -100, -100], [2, 1, 0, 1, 2]])
    loss = nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="none")
    assert loss.view(2, 5)[0, 3:].tolist() == [0, 0] and (loss.view(2, 5)[1] > 0).all()


def test_sequences_with_one_label_each_are_collated():
    inputs, labels = PadSequences(value=-1)([(torch.ones(2, 3), 4), (torch.ones(1, 3), 5)])
    assert inputs.shape == (2, 2, 3) and inputs[1, 1].tolist() == [-1, -1, -1] and labels.tolist() == [4, 5]


def test_a_run_does_not_shuffle_it_again():
    assert adopt(bucketed()).shuffle is False
    assert adopt(SkipBroken(bucketed())).shuffle is False
    assert adopt(Subset(bucketed(), range(16))).shuffle is False
    assert adopt(DataLoader(bucketed(), shuffle=True)).shuffle is False
    assert adopt(DataLoader(Sequences(), shuffle=True)).shuffle is True
    assert adopt(Sequences()).shuffle is None


def test_a_broken_sample_is_named_by_its_own_number():
    dataset = Bucketed(Sequences(broken={40}), LENGTHS, 8)
    place = dataset.sample_at(0, 0, np.arange(205)).tolist().index(40)
    with pytest.raises(DataError, match=rf"Sample {place} cannot be read: Sample 40 cannot be read: OSError: torn"):
        SampleReader(dataset, seed=0).read(0, np.array([place]))


def test_what_does_not_fit_is_refused():
    for arguments, message in (
        ((LENGTHS[:9], 8), r"shape \(9,\) for 205 samples"),
        ((LENGTHS / 2, 8), "lengths of type float64"),
        ((LENGTHS, 0), "group=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            Bucketed(Sequences(), *arguments)
    with pytest.raises(ConfigError, match="pool=12"):
        bucketed(pool=12)
    with pytest.raises(ConfigError, match=r"SkipBroken\(Bucketed"):
        Bucketed(SkipBroken(Sequences()), LENGTHS, 8)
    with pytest.raises(ConfigError, match=r"Give it to run\.batches as it is"):
        bucketed()[0]
    assert np.array_equal(Bucketed(Sequences(), lambda _: LENGTHS, 8).lengths, LENGTHS)
