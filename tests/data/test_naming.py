import re
from collections import UserDict

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from lockstep.data import check_labels, known_labels
from lockstep.data.naming import class_names, held_out, require_map_style, sample_error, why_uncollatable
from lockstep.errors import ConfigError, DataError


class Targets(Dataset):
    def __init__(self, targets):
        self.targets = targets
        self.samples = [(f"class/{index}.png", 0) for index in range(len(targets))]

    def __len__(self):
        return len(self.targets)


@pytest.mark.parametrize(("count", "fraction", "expected"), [(2, 0.1, 1), (2, 0.9, 1), (10, 0.25, 2), (10, 0.99, 9)])
def test_some_are_held_out_and_some_are_left(count, fraction, expected):
    names = [f"{number}.png" for number in range(count)]
    found = held_out(names, fraction, 1, "Class a")
    assert len(found) == expected and found < set(names)
    assert found == held_out(names[::-1], fraction, 1, "Class a")


@pytest.mark.parametrize(
    ("count", "fraction", "error"), [(1, 0.5, DataError), (9, 0.0, ConfigError), (9, 1, ConfigError)]
)
def test_too_few_names_or_no_fraction_are_refused(count, fraction, error):
    with pytest.raises(error, match=r"Class a has 1 sample, too few|fraction of (0|1) was asked for"):
        held_out(["a", *"bcdefghi"][:count], fraction, 1, "Class a")


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


TENSOR = torch.zeros(3)


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (
            [(TENSOR, 1), (TENSOR, None)],
            r"sample 7 is None at \[1\]. Give a tensor.*or a collate function that leaves it",
        ),
        ([(Image.new("L", (2, 2)), 1)] * 2, r"sample 3 is a PIL.Image.Image at \[0\].*ToTensor\(\)"),
        (
            [{"a": object()}] * 2,
            r"sample 3 is a builtins.object at \['a'\]. Make it a tensor, or keep it as it is: .*collate_fn=list",
        ),
        (
            [(TENSOR, 1), (TENSOR[:2], 1)],
            r"sample 3 is of shape \(3,\) at \[0\], and sample 7 is of shape \(2,\)",
        ),
        (
            [{"a": [1]}, {"a": [1, 2]}],
            r"a list of 1 value at \['a'\], and sample 7 is a list of 2 values.*pads them",
        ),
        ([{"a": 1}, {"b": 1}], r"a dict with the keys \['a'\], and sample 7 is a dict with the keys \['b'\]"),
        ([(1, 1), (1.0, "x")], r"sample 3 is a number at \[1\], and sample 7 is a str"),
    ],
)
def test_samples_that_make_no_batch_are_told_apart(samples, said):
    assert re.search(said, why_uncollatable(["sample 3", "sample 7"], samples))


def test_what_is_not_known_to_be_wrong_is_left_to_torch():
    assert why_uncollatable(["sample 3", "sample 7"], [(TENSOR, "a"), (TENSOR, "bc")]) == ""


@pytest.mark.parametrize("data", ["data/train", {"train": [1]}, (TENSOR, TENSOR)])
def test_paths_dicts_and_tuples_of_tensors_are_no_data_sets(data):
    with pytest.raises(ConfigError, match=r"was given (a|the)"):
        require_map_style(data, "run.batches")
    require_map_style([(TENSOR, 1)], "run.batches")


def test_a_dict_that_gives_samples_by_number_is_a_data_set():
    """As a TensorDict."""

    class Columns(UserDict):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    require_map_style(Columns({0: (TENSOR, 1)}), "run.batches")
    with pytest.raises(ConfigError, match="whose entries have no numbers"):
        require_map_style(UserDict({0: (TENSOR, 1)}), "run.batches")


def test_classes_are_their_number_or_a_list_of_names():
    """``classes=0`` made a table one of regression, and a text the names of its letters."""
    assert class_names(2) == class_names(np.int64(2)) == ("0", "1")
    assert class_names(["cat", "dog"]) == class_names(np.array(["cat", "dog"])) == ("cat", "dog")
    for wrong in (0, -1, "cat", {"cat", "dog"}, {"cat": 0}, [1, 2], [], None, 1.5):
        with pytest.raises(ConfigError, match="Give their number, from 1 on, or a list of their names"):
            class_names(wrong)


def test_a_gpu_in_a_loader_process_is_said_to_be_the_cause(monkeypatch):
    """torch says to use another start method, which nobody has chosen."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(RuntimeError) as raised:
        torch.cuda._lazy_init()
    said = "Lockstep moves batches to the GPU: give tensors on the CPU here, or leave out the workers."
    assert str(sample_error(range(5), 3, raised.value)).endswith(said)
    with pytest.raises(OSError, match="none") as raised:
        raise OSError("none")
    assert str(sample_error(range(5), 3, raised.value)) == "Sample 3 cannot be read: OSError: none"
