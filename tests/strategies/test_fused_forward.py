"""Inputs of micro-batches put into one, and outputs taken apart, by rows."""

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.strategies.fused_forward import join, split


def test_nested_inputs_are_put_one_below_the_other_and_taken_apart_again():
    parts = [
        (
            (torch.arange(n * 3).view(n, 3) + 100 * n,),
            {"mask": torch.full((n,), n), "mode": "a", "all": [None]},
        )
        for n in (2, 1, 3)
    ]
    joined = join(parts, [2, 1, 3])
    assert torch.equal(joined[0][0], torch.cat([part[0][0] for part in parts]))
    assert joined[1]["mask"].tolist() == [2, 2, 1, 3, 3, 3] and joined[1]["mode"] == "a"
    for found, part in zip(split(joined, [2, 1, 3]), parts):
        assert torch.equal(found[0][0], part[0][0]) and torch.equal(found[1]["mask"], part[1]["mask"])
        assert found[1]["mode"] == "a" and found[1]["all"] == [None]


def test_one_micro_batch_is_not_copied():
    x = torch.randn(4, 2)
    assert join([(x,)], [4])[0].data_ptr() == x.data_ptr()


def test_channels_last_is_kept():
    images = [torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last) for _ in range(3)]
    assert join(images, [2, 2, 2]).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((torch.zeros(2, 5), torch.zeros(2, 7)), r"\(2, 5\), \(2, 7\). Let the collate function pad"),
        ((torch.zeros(2, 5), torch.zeros(2, 5).double()), "otherwise one shape"),
        ((torch.zeros(2, 5), torch.zeros(3, 5)), r"\[2, 2\] samples have \(2, 5\), \(3, 5\)"),
        ((torch.zeros(()), torch.zeros(())), r"\[2, 2\] samples have \(\), \(\)"),
        (("a", "b"), "must be equal in all of them. Found 'a'"),
        (({"x": 1}, {"y": 1}), "they must be alike"),
    ],
)
def test_inputs_that_do_not_fit_together_are_refused(parts, said):
    with pytest.raises(ConfigError, match=said):
        join(list(parts), [2, 2])


@pytest.mark.parametrize("output", [torch.zeros(()), torch.zeros(3, 2), {"loss": torch.zeros(())}])
def test_an_output_without_a_row_for_each_sample_is_refused(output):
    with pytest.raises(ConfigError, match="Let it return a row for each sample"):
        split(output, [2, 2])
