"""Launches, bytes and memory of a step of ``ddp`` on simulated devices, beside torch's DistributedDataParallel.

The model is a ResNet-50, 2 samples of 32 x 32 a process, K = W.
"""

import pytest
from tests.simcuda.counting import STEPS, ddp, lockstep, plain

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def alone(machine):
    """A plain loop on one device."""
    return machine.run(plain, 1, timeout=200)[0]


@pytest.fixture(scope="module", params=[2, 4], ids=lambda ranks: f"W={ranks}")
def both(request, machine):
    """The number of ranks, and what rank 0 counted under Lockstep and under DistributedDataParallel."""
    ranks = request.param
    return ranks, machine.run(lockstep, ranks, timeout=300)[0], machine.run(ddp, ranks, timeout=300)[0]


def added(found, alone):
    """Launches of a step besides those of forward pass, backward pass and optimizer."""
    return (found.launches.total() - alone.launches.total()) / STEPS


def test_a_step_launches_little_besides_forward_and_backward(both, alone):
    ranks, ours, theirs = both
    print(f"launches a step, W={ranks}: {added(ours, alone):.0f}, DDP {added(theirs, alone):.0f}")
    assert 0 < added(ours, alone) <= 1.2 * added(theirs, alone)


def test_a_step_on_one_device_launches_nothing_more_for_each_parameter(machine, alone):
    found = machine.run(lockstep, 1, timeout=200)[0]
    print(f"launches a step, one device: {added(found, alone):.0f} more than {alone.launches.total() / STEPS:.0f}")
    assert 0 < added(found, alone) <= 50


def test_a_rank_sends_the_bytes_of_a_ring(both, alone):
    """And 1 % more at most: the header, and the statistics of BatchNorm, which DDP takes from rank 0."""
    ranks, ours, theirs = both
    ring = 2 * (ranks - 1) / ranks
    sent = [each.sent / STEPS / alone.parameters for each in (ours, theirs)]
    print(f"gradients sent a step, W={ranks}: {sent[0]:.4f}, DDP {sent[1]:.4f}")
    assert sent[1] == pytest.approx(ring, rel=1e-6)
    assert ring <= sent[0] <= 1.01 * ring


def test_a_rank_holds_two_gradients_more_than_a_plain_loop(both, alone):
    ranks, ours, theirs = both
    extra = [(each.held + each.peak - alone.held - alone.peak) / alone.parameters for each in (ours, theirs)]
    print(f"gradients held besides, W={ranks}: {extra[0]:.2f}, DDP {extra[1]:.2f}")
    assert extra[0] <= 2


def test_buckets_are_sent_while_backward_goes_on(both):
    """The exchange of bucket i starts before the backward pass of bucket i + 2 has ended."""
    _, ours, _ = both
    sent = [at for at, name in enumerate(ours.order) if "all_to_all" in name]
    backward = [at for at, name in enumerate(ours.order) if "backward" in name and "all_to_all" not in name]
    assert len(sent) >= 5
    for first, third in zip(sent, sent[2:-1]):  # the last are the statistics of BatchNorm, after backward
        assert any(first < at < third for at in backward)
