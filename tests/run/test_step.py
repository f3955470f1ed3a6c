from collections import namedtuple

import pytest
import torch

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
