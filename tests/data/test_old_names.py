"""Old spellings of public names still work, and say what to write instead."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lockstep.data import (
    CIFAR10,
    IDX,
    Digits,
    ImageArrays,
    Mixed,
    Normalize,
    NumpyArrays,
    Resize,
    Squeeze,
    adopt,
)
from lockstep.data.reader import rows_independent

NORMALIZE = Normalize((0.5,), (0.5,))
IMAGES, LABELS = torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.zeros(4)


class OldSet(Dataset):
    """A data set as users wrote them."""

    finish = NORMALIZE
    rows_alone = True

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return IMAGES[index], 0

    def get_batch(self, indices, keys):
        return IMAGES[indices], torch.zeros(len(indices))


def test_squeeze_is_resize():
    with pytest.warns(DeprecationWarning, match="Squeeze is deprecated; use Resize"):
        old = Squeeze(size=8)
    assert isinstance(old, Resize)
    assert old.cut(30, 20, np.zeros(0)) == Resize(8).cut(30, 20, np.zeros(0))


def test_finish_of_a_users_set_is_its_device_transform():
    with pytest.warns(DeprecationWarning, match="finish of OldSet is deprecated; use device_transform"):
        source = adopt(OldSet())
    assert source.device_transform is NORMALIZE
    with pytest.warns(DeprecationWarning, match="finish"):
        assert source.finish is NORMALIZE
    with pytest.warns(DeprecationWarning, match="finish"):
        assert Mixed(OldSet(), 2).device_transform is NORMALIZE


def test_rows_alone_of_a_users_set_says_that_rows_are_independent():
    with pytest.warns(DeprecationWarning, match="rows_alone of OldSet is deprecated; use rows_independent"):
        assert rows_independent(OldSet())


def test_finish_of_our_sets_can_be_read_and_set():
    digits = Digits()
    with pytest.warns(DeprecationWarning, match="finish is deprecated; use device_transform"):
        digits.finish = NORMALIZE
    assert digits.device_transform is NORMALIZE
    with pytest.warns(DeprecationWarning, match="finish"):
        assert digits.finish is NORMALIZE


@pytest.mark.parametrize("value", [NORMALIZE, None])
def test_the_argument_finish_still_counts(tmp_path, value):
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2)), y=np.zeros(4))
    with pytest.warns(DeprecationWarning, match="argument finish is deprecated; use device_transform"):
        images = ImageArrays(IMAGES, LABELS, classes=["a"], name="x", finish=value)
    with pytest.warns(DeprecationWarning, match="argument finish"):
        arrays = NumpyArrays(tmp_path / "a.npz", finish=value)
    assert images.device_transform is value and arrays.device_transform is value


def test_published_sets_take_finish_by_name_in_job_files():
    for published in (IDX, CIFAR10):
        assert "finish" in published.__init__.__annotations__
