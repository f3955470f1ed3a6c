import re
from collections import UserDict

import pytest
import torch
from PIL import Image

from lockstep.data.naming import require_map_style, sample_error, why_uncollatable
from lockstep.errors import ConfigError

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
