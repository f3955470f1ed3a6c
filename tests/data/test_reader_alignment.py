from collections import namedtuple

import numpy as np
import pytest
import torch

from lockstep.data.reader import aligned

Pair = namedtuple("Pair", "input target")


def misaligned(count=5):
    """A tensor that begins 4 bytes behind a multiple of 64."""
    return torch.arange(float(count + 1))[1:]


def test_tensors_are_moved_to_a_multiple_of_64_bytes_and_keep_their_values():
    assert misaligned().data_ptr() % 64
    data = {"x": misaligned(), "more": [misaligned(), (misaligned(), "text")], "n": 3}
    result = aligned(data)
    moved = [result["x"], result["more"][0], result["more"][1][0]]
    assert all(tensor.data_ptr() % 64 == 0 and torch.equal(tensor, misaligned()) for tensor in moved)
    assert result["more"][1][1] == "text" and result["n"] == 3
    assert isinstance(result["more"], list) and isinstance(result["more"][1], tuple)


def test_what_begins_right_is_not_copied():
    tensor = torch.rand(7)
    assert aligned(tensor) is tensor


def test_named_tuples_stay_what_they_are():
    result = aligned(Pair(misaligned(), torch.from_numpy(np.arange(3))))
    assert isinstance(result, Pair) and result.input.data_ptr() % 64 == 0


@pytest.mark.gpus(1)
def test_page_locked_tensors_stay_where_they_are():
    part = torch.empty(6).pin_memory()[1:]
    assert part.data_ptr() % 64 and aligned(part) is part
