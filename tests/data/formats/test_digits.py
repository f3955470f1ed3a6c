import numpy as np
import pytest
import torch

from lockstep.data import Digits
from lockstep.errors import ConfigError


def test_all_1797_digits_are_there_with_the_known_class_counts():
    digits = Digits()
    assert len(digits) == 1797
    assert digits.labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    image, label = digits[0]
    assert image.shape == (1, 8, 8) and image.dtype == torch.float32 and label == 0
    assert digits.images.min() == 0.0 and digits.images.max() == 1.0
    first = [0, 0, 5, 13, 9, 1, 0, 0]  # the first row as UCI and scikit-learn print it
    assert (image[0, 0] * 16).tolist() == first
    assert float((digits.images * 16).sum()) == 561718.0


def test_a_fifth_of_each_class_is_held_out_by_the_seed():
    train, validation = Digits("train", seed=1), Digits("validation", seed=1)
    assert len(train) + len(validation) == 1797
    shares = validation.labels.bincount() / Digits().labels.bincount()
    assert torch.all((shares - 0.2).abs() < 0.004)
    both = torch.cat([train.images, validation.images]).flatten(1).numpy()
    assert np.array_equal(np.sort(both.sum(1)), np.sort(Digits().images.flatten(1).numpy().sum(1)))
    assert not torch.equal(Digits("validation", seed=2).images, validation.images)
    assert torch.equal(Digits("validation", seed=1).images, validation.images)


def test_an_unknown_split_is_refused():
    with pytest.raises(ConfigError, match="no split 'test'"):
        Digits("test")
