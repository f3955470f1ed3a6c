"""The parts of a rehearsal's pass: what it finds on all ranks together, and the buffers that it puts back."""

import json
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lockstep.run.checks.short_step import Buffers, Findings

FOUND = {"foreign": {"a": "b"}, "changed": {"a": ["b", "c"]}, "deviation": "why"}
FOUND |= dict.fromkeys(("losses_differ", "keeps", "ranks_differ"), True)


def together(*ranks):
    """The findings of ranks, as the first one sees them; they are exchanged as JSON."""
    records = json.loads(json.dumps([vars(each) for each in ranks]))
    return ranks[0].of_all_ranks(SimpleNamespace(gather_records=lambda own: records))


@pytest.mark.parametrize("name", [field.name for field in fields(Findings)])
def test_whatever_one_rank_finds_is_found(name):
    found = FOUND.get(name, ["here"])
    alone, nothing = Findings(**{name: found}), Findings()
    for ranks in ((alone, nothing), (nothing, alone), (nothing, alone, nothing)):
        assert vars(together(*ranks)) == {**vars(Findings()), name: found}


def test_what_several_ranks_find_is_named_once_in_the_order_of_the_ranks():
    first = Findings(written=["b", "a", "b"], foreign={"x": "1"}, deviation="is a sum")
    second = Findings(written=["c", "a"], foreign={"y": "2"}, deviation="has no rows")
    whole = together(first, second)
    assert (whole.written, whole.foreign, whole.deviation) == (["b", "a", "c"], {"x": "1", "y": "2"}, "is a sum")
    assert first.written == ["b", "a", "b"]


def test_buffers_that_a_forward_pass_has_moved_are_named_and_put_back():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    before = {name: each.clone() for name, each in model.named_buffers()}
    buffers = Buffers([model])
    model(torch.ones(3, 2))
    model[0].register_buffer("made", torch.zeros(1))
    assert sorted(buffers.moved(model)) == ["0.num_batches_tracked", "0.running_mean", "0.running_var"]
    buffers.restore()
    assert buffers.moved(model) == []
    assert all(torch.equal(each, before[name]) for name, each in model.named_buffers())
