import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from lockstep.data import check_labels, known_labels
from lockstep.data.labels import class_names
from lockstep.errors import ConfigError, DataError


class Targets(Dataset):
    def __init__(self, targets):
        self.targets = targets
        self.samples = [(f"class/{index}.png", 0) for index in range(len(targets))]

    def __len__(self):
        return len(self.targets)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_labels_are_found_in_the_forms_that_data_sets_have(kind):
    assert known_labels(Targets(kind([2, 0, 1]))).tolist() == [2, 0, 1]


def test_labels_of_a_subset_are_those_it_selects():
    assert known_labels(Subset(Targets([5, 6, 7]), [2, 0])).tolist() == [7, 5]


def test_the_second_tensor_holds_labels_if_it_has_whole_numbers():
    assert known_labels(TensorDataset(torch.rand(3, 2), torch.tensor([1, 0, 1]))).tolist() == [1, 0, 1]
    assert known_labels(TensorDataset(torch.rand(3, 2), torch.rand(3))) is None
    assert known_labels(TensorDataset(torch.rand(3, 2), torch.zeros(3, 2, dtype=torch.int64))) is None
    assert known_labels(Targets(["a", "b"])) is None
    assert known_labels(object()) is None


@pytest.mark.fault("D5")
def test_the_first_wrong_sample_is_named_with_its_file():
    check_labels(Targets([0, 2, 1]), 3)
    with pytest.raises(DataError, match=r"2 classes.*sample 1 \(class/1\.png\) has label 2\. Correct"):
        check_labels(Targets([0, 2, 1]), 2)
    with pytest.raises(DataError, match=r"sample 0 has label -1"):
        check_labels(TensorDataset(torch.rand(2, 1), torch.tensor([-1, 0])), 2)


def test_classes_are_their_number_or_a_list_of_names():
    """``classes=0`` made a table one of regression, and a text the names of its letters."""
    assert class_names(2) == class_names(np.int64(2)) == ("0", "1")
    assert class_names(["cat", "dog"]) == class_names(np.array(["cat", "dog"])) == ("cat", "dog")
    for wrong in (0, -1, "cat", {"cat", "dog"}, {"cat": 0}, [1, 2], [], None, 1.5):
        with pytest.raises(ConfigError, match="Give their number, from 1 on, or a list of their names"):
            class_names(wrong)
