from collections import namedtuple
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep.core.world import World
from lockstep.errors import ConfigError
from lockstep.run import Run, RunOptions
from lockstep.run.step import DeviceTransfer
from lockstep.runtime import Callback
from lockstep.runtime.events import StepEvents

Pair = namedtuple("Pair", "input target")


class Graph:
    """Data of a kind that torch does not know."""

    device = "cpu"

    def to(self, device):
        self.device = str(device)
        return self


def test_tensors_of_any_depth_go_to_the_device_and_the_rest_stays():
    delivered = DeviceTransfer(torch.device("meta"))({"x": [torch.rand(2), (torch.rand(3), "text")], "n": 3})
    assert delivered["x"][0].is_meta and delivered["x"][1][0].is_meta
    assert delivered["x"][1][1] == "text" and delivered["n"] == 3


def test_named_tuples_and_objects_that_can_be_moved():
    pair = DeviceTransfer(torch.device("meta"))(Pair(torch.rand(2), Graph()))
    assert isinstance(pair, Pair) and pair.input.is_meta and pair.target.device == "meta"


def test_on_the_cpu_data_is_given_on_as_it_is():
    data = Pair(torch.rand(2), Graph())
    assert DeviceTransfer(torch.device("cpu"))(data) is data


@pytest.mark.gpus(1)
def test_a_copy_does_not_wait_for_kernels_that_were_queued_before_it():
    device = torch.device("cuda", 0)
    delivery, host = DeviceTransfer(device), torch.arange(1 << 20).pin_memory()
    delivery([host])  # the first one takes memory, which may wait
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    (copied,) = delivery([host])
    delivery._stream.synchronize()
    assert not torch.cuda.current_stream().query(), "the copy came after the kernel"
    assert torch.equal((copied * 2).cpu(), host * 2)


@pytest.mark.gpus(1)
def test_what_is_computed_from_delivered_data_is_right_whoever_takes_its_memory_next():
    delivery = DeviceTransfer(torch.device("cuda", 0))
    sums = []
    for number in range(50):
        (given,) = delivery([torch.full((1 << 18,), float(number)).pin_memory()])
        torch.cuda._sleep(1_000_000)
        sums.append(given.sum())
        del given
    assert [value.item() / (1 << 18) for value in sums] == list(range(50))


class Copies(Callback):
    def __init__(self):
        self.told = []

    def on_copy_begin(self):
        self.told.append("begin")

    def on_copy_end(self):
        self.told.append("end")


@pytest.mark.parametrize(("device", "told"), [("meta", ["begin", "end"]), ("cpu", [])])
def test_callbacks_are_told_of_copies_and_on_the_cpu_there_are_none(device, told):
    events, copies = StepEvents(), Copies()
    events.add(copies)
    DeviceTransfer(torch.device(device), events)([torch.rand(2), torch.rand(3)])
    assert copies.told == told


class Styled(nn.Module):
    """A convolution net with InstanceNorm in front of a convolution, as networks that change pictures have."""

    def __init__(self, norm=nn.InstanceNorm2d):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 4, 3), norm(4), nn.Conv2d(4, 3, 3)

    def forward(self, x):
        return self.second(self.norm(self.first(x))).mean((2, 3))


def gradients_of_styled(model, rows=8, **options):
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(rows, 3, 8, 8), torch.arange(rows) % 3)
    run = Run(RunOptions.of(**{"global_batch": 8, "micro_batches": 4, **options}), World())
    try:
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.epochs(1):
            for batch in run.batches(samples):
                run.backward(batch, F.cross_entropy)
        return [parameter.grad.clone() for parameter in model.parameters()]
    finally:
        run.close()


def styled(norm=nn.InstanceNorm2d):
    torch.manual_seed(1)
    return Styled(norm)


def with_running_statistics(channels):
    """A layer in evaluation mode; a frozen one has it."""
    return nn.InstanceNorm2d(channels, track_running_stats=True).eval()


@pytest.mark.parametrize(
    ("norm", "options"),
    [
        (nn.InstanceNorm2d, {"micro_batches": 8}),
        (nn.InstanceNorm2d, {"rows": 9}),
        (with_running_statistics, {"micro_batches": 8}),
    ],
)
def test_wrong_gradients_of_instance_norm_for_one_sample_in_channels_last_order_are_refused(norm, options):
    sample, found = torch.randn(1, 3, 8, 8), []
    for order in (torch.contiguous_format, torch.channels_last):
        model = styled(norm).to(memory_format=order)
        model(sample.to(memory_format=order)).square().sum().backward()
        found.append(model.first.weight.grad)
    if torch.allclose(*found, rtol=1e-3, atol=1e-3):
        pytest.skip("this torch computes the right gradient")
    with pytest.raises(ConfigError, match=r"one sample, and torch .* InstanceNorm 'norm'"):
        gradients_of_styled(styled(norm), channels_last=True, **options)
    with pytest.raises(ConfigError, match=r"one sample, and torch .* InstanceNorm 'norm'"):
        gradients_of_styled(styled(norm).to(memory_format=torch.channels_last), **options)


@pytest.mark.parametrize(
    ("norm", "options"),
    [
        (nn.InstanceNorm2d, {"channels_last": True}),
        (nn.InstanceNorm2d, {"micro_batches": 8}),
        (partial(nn.GroupNorm, 2), {"channels_last": True, "micro_batches": 8}),
    ],
)
def test_other_orders_and_numbers_of_samples_have_the_gradients_of_one_batch(norm, options):
    expected = gradients_of_styled(styled(norm), micro_batches=1)
    found = gradients_of_styled(styled(norm), **options)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(expected, found, strict=True))
