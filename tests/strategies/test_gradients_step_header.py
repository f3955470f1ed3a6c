"""The row of numbers that holders tell each other in a step comes apart again as it was put together."""

import pytest
import torch

from lockstep.core.plan import Share
from lockstep.strategies.gradients import StepHeader

SHARES = {
    "one": {},
    "contiguous": {"holders": 3},
    "interleaved": {"holders": 3, "interleaved": True},
    "rounds": {"holders": 3, "rounds": True},
}


@pytest.mark.parametrize("leaves", [1, 2, 5, 7])
@pytest.mark.parametrize("kind", SHARES)
def test_losses_come_in_order_of_micro_batches_and_counts_are_added(kind, leaves):
    rows = []
    holders = SHARES[kind].get("holders", 1)
    for holder in range(holders):
        share = Share(**{**SHARES[kind], "holder": holder})
        header = StepHeader(share, 7, parameters=2, counters=1, flags=2)
        mine = [k for k in share.of(leaves) if k < leaves]
        losses = [torch.tensor(0.1 * k) for k in mine]
        weights = [torch.tensor(float(k + 1)) for k in mine]
        rows.append(header.pack(losses, weights, [len(mine), 0], torch.tensor([holder]), [holder, 1 - holder]))
        assert rows[-1].shape == (header.size,)
    rows = torch.stack(rows)
    losses, weight, used, advanced = header.unpack(rows, leaves)
    assert losses.tolist() == [float(torch.tensor(0.1 * k)) for k in range(leaves)]
    assert float(weight) == sum(k + 1.0 for k in range(leaves))
    assert used.tolist() == [leaves, 0]
    assert advanced.tolist() == [sum(range(holders))]
    assert (float(header.flag(rows)), float(header.flag(rows, 1))) == (holders - 1, 1)


def test_a_row_may_have_neither_counts_nor_flags():
    header = StepHeader(Share(), 2)
    row = header.pack([torch.tensor(1.0)] * 2, [torch.tensor(2.0)] * 2, [], torch.zeros(0), [])
    assert row.tolist() == [1, 1, 2, 2]
