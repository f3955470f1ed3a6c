"""Rows of ranks, and models that cannot be sharded by rows."""

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.strategies.sharding import require_rows, rows_of


def test_every_row_is_held_by_one_rank_also_where_rows_are_fewer_than_ranks():
    for rows in (1, 3, 4, 10):
        for ranks in (2, 3, 4, 8):
            held = [row for rank in range(ranks) for row in range(rows)[rows_of(rows, ranks, rank)]]
            assert held == list(range(rows))


def test_single_numbers_and_channels_last_weights_are_refused():
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match=r"'scale' is a scalar.*\(1,\)"):
        require_rows(model, "fsdp")
    convolution = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    with pytest.raises(ConfigError, match=r"'weight' of shape .* is stored in channels-last.*'ddp'"):
        require_rows(convolution, "hybrid")
    require_rows(convolution, "fsdp", permuted=True)
    with pytest.raises(ConfigError, match=r"'weight' of shape \(4, 4, 3, 3\) is stored with strides"):
        convolution.weight = nn.Parameter(torch.zeros(4, 4, 3, 6)[..., ::2])
        require_rows(convolution, "fsdp", permuted=True)
