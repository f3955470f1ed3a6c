import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from lockstep.data import ImageArrays, PadCropFlip, SkipBroken, Weighted, class_weights
from lockstep.data.reader import SampleReader
from lockstep.errors import ConfigError, DataError

LABELS = torch.tensor([0] * 90 + [1] * 9 + [2])
TENSORS = TensorDataset(torch.arange(100), LABELS)
PLACES = np.arange(3000)


class Each(Dataset):
    """Read one by one; each sample holds its number and a random one."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 13:
            raise OSError("torn")
        return index, torch.rand(())


def read(dataset, places, seed=0, epoch=0):
    return SampleReader(dataset, seed=seed).read(epoch, np.asarray(places))


def test_samples_are_drawn_in_proportion_to_their_weights():
    weights = np.arange(100.0)
    drawn = Weighted(TENSORS, weights, 300_000).sample_at(0, 0, np.arange(300_000))
    counts = np.bincount(drawn, minlength=100)
    expected = 300_000 * weights / weights.sum()
    assert counts[0] == 0
    assert (np.abs(counts - expected) <= 6 * np.sqrt(expected) + 1e-9).all()


def test_balanced_weights_draw_each_class_equally_often():
    _, labels = read(Weighted(TENSORS, "balanced", 3000), PLACES)
    assert all(abs(count - 1000) < 6 * 26 for count in torch.bincount(labels).tolist())


@pytest.mark.parametrize("inner", [TENSORS, Each(), Subset(TENSORS, list(range(99, -1, -1)))])
def test_a_draw_depends_on_seed_epoch_and_place_alone(inner):
    weights = [0.0 if index == 13 else 1.0 for index in range(100)]
    dataset = Weighted(inner, weights)
    whole = read(dataset, range(100))[0]
    parts = [read(dataset, [place])[0] for place in (71, 3, 40)]
    assert torch.equal(torch.cat(parts), whole[[71, 3, 40]])
    expected = dataset.sample_at(0, 0, np.arange(100))
    assert whole.tolist() == (99 - expected if type(inner) is Subset else expected).tolist()
    assert not torch.equal(read(dataset, range(100), epoch=1)[0], whole)
    assert not torch.equal(read(dataset, range(100), seed=1)[0], whole)


def test_a_sample_that_is_drawn_twice_is_augmented_in_two_ways():
    image = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8)
    one = ImageArrays(image, torch.tensor([0]), classes=["a"], name="one", transform=PadCropFlip(4))
    images, _ = read(Weighted(one, [1.0], 20), range(20))
    assert len({picture.numpy().tobytes() for picture in images}) > 10


def test_a_collate_function_gets_the_samples_that_were_drawn():
    dataset = Weighted(TENSORS, np.arange(100.0), collate=lambda rows: [int(row[0]) for row in rows])
    assert read(dataset, [8, 2]) == dataset.sample_at(0, 0, np.array([8, 2])).tolist()


def test_a_broken_sample_is_named_by_its_own_number():
    dataset = Weighted(Each(), [1.0 if index == 13 else 0.0 for index in range(100)])
    with pytest.raises(DataError, match=r"Sample 7 cannot be read: Sample 13 cannot be read: OSError: torn"):
        read(dataset, [7])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0] * 99, r"weights of shape \(99,\) for 100 samples"),
        ([1.0] * 99 + [-1.0], "sample 99 has -1"),
        ([1.0] * 99 + [float("nan")], "sample 99 has nan"),
        ([0.0] * 100, "all are 0"),
        ("equal", "give numbers, or 'balanced'"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, message):
    with pytest.raises(ConfigError, match=message):
        Weighted(TENSORS, weights)


def test_what_cannot_be_drawn_from_is_refused():
    with pytest.raises(DataError, match="labels or targets of Each"):
        Weighted(Each())
    with pytest.raises(DataError, match=r"^Weights that balance classes need an attribute labels or targets of Each"):
        class_weights(Each(), 3)
    with pytest.raises(ConfigError, match="samples=0"):
        Weighted(TENSORS, samples=0)
    with pytest.raises(ConfigError, match=r"SkipBroken\(Weighted"):
        Weighted(SkipBroken(TENSORS))
    with pytest.raises(ConfigError, match=r"Give it to run\.batches as it is"):
        Weighted(TENSORS)[0]
    with pytest.raises(ConfigError, match="empty data set"):
        Weighted(Subset(TENSORS, []))


def test_class_weights_let_every_class_count_alike():
    weights = class_weights(TENSORS, 3)
    totals = weights * torch.bincount(LABELS)
    assert torch.allclose(totals, totals[0].expand(3)) and weights[LABELS].mean().item() == pytest.approx(1)
    with pytest.raises(DataError, match="class 3 has no sample"):
        class_weights(TENSORS, 4)
    with pytest.raises(DataError, match="there is a label 2"):
        class_weights(TENSORS, 2)
