"""Writes to tensors that are here are noticed, and ranks are compared."""

import torch
from torch import nn

from lockstep.strategies.loop_writes import LoopWrites, RankWrites, one_sided


def noted(**tensors):
    writes = LoopWrites()
    writes.note(tensors)
    return writes


def test_writes_are_noticed_by_their_version_their_bytes_and_their_address():
    names = "kept", "written", "hidden", "moved", "zeros"
    tensors = {name: nn.Parameter(torch.ones(300, 2)) for name in names[:-1]}
    tensors["zeros"] = nn.Parameter(torch.zeros(3))
    writes = noted(**tensors)
    with torch.no_grad():
        tensors["written"].mul_(1.0)
    tensors["hidden"].data.mul_(0.5)
    tensors["moved"].data = tensors["moved"].data.clone()
    tensors["zeros"].data.mul_(0.5)
    assert writes.take() == {"kept": False, "written": True, "hidden": True, "moved": True, "zeros": None}
    assert writes.take() == {name: None if name == "zeros" else False for name in names}


def test_what_the_run_sets_is_no_write_of_the_loop():
    parameter = nn.Parameter(torch.ones(4))
    writes = noted(p=parameter)
    parameter.data.mul_(0.5)
    writes.note({"p": parameter})
    assert writes.take() == {"p": False}


def test_writes_are_noticed_in_and_after_the_inference_mode_of_the_loop():
    """Notes made in an evaluation of the loop could not be changed in the next step."""
    parameter = nn.Parameter(torch.ones(4))
    with torch.inference_mode():
        writes = noted(p=parameter)
        writes.look()
    writes.look()
    parameter.data.mul_(0.5)
    with torch.inference_mode():
        writes.look()
    assert writes.take() == {"p": True}


def test_a_tensor_may_go_grow_shrink_or_change_its_type():
    """One that is gone is a gradient that the loop has cleared."""
    gone, other = torch.ones(4), nn.Parameter(torch.ones(4))
    writes = noted(gone=gone, other=other)
    del gone
    assert writes.take() == {"gone": True, "other": False}
    for values in (torch.ones(9), torch.ones(1).expand(9), torch.ones(9, dtype=torch.float64), torch.ones(0)):
        other.data = values
        writes.look()
    assert writes.take() == {"other": True}
    assert writes.take() == {"other": None}  # it has no values any more


def test_a_rank_that_may_have_written_in_vain_is_not_blamed():
    in_vain = RankWrites({"p": False}, {}), RankWrites({}, {"p": (1, 0)})
    surely = RankWrites({"p": False}, {}), RankWrites({}, {"p": (1, 1)})
    zeros = RankWrites({"p": None}, {}), RankWrites({}, {"p": (1, 1)})
    assert [one_sided(each) for each in (in_vain, surely, zeros)] == [[], ["p"], []]
    assert one_sided([RankWrites({"p": True}, {}), RankWrites({}, {})]) == ["p"]
    assert one_sided([RankWrites({}, {"p": (2, 1)}), RankWrites({}, {"p": (1, 1)})]) == ["p"]
    assert one_sided([RankWrites({"p": True}, {}), RankWrites({"p": False}, {})]) == ["p"]


def test_ranks_that_all_change_just_what_they_hold_have_run_the_same_code():
    """Such as an optimizer's own ``eval()``, which goes by its state."""
    first, second = RankWrites({"p": True}, {}), RankWrites({"q": True}, {})
    assert one_sided([first, second]) == []
    assert one_sided([first, RankWrites({"q": False}, {})]) == ["p"]
    assert one_sided([RankWrites({"p": True, "q": False}, {}), second]) == ["p", "q"]
