"""Node 0's report of the windows of all hosts, from windows that a test writes down."""

import json

import pytest

from lockstep.launch.hosts.coordinator import SharedStepWindows
from lockstep.launch.stragglers import StepWindow


class TwoHosts:
    """Node 0, called fa, with rank 0, and what host 1, called fb, says of rank 1."""

    def __init__(self):
        self.node, self.other = SharedStepWindows(), SharedStepWindows()

    def heard(self):
        return {"fb": json.loads(json.dumps(self.other.to_json()))}

    def say(self, *windows):
        """Both hosts have a new window, of (work, waited, step) in ms; what node 0 says."""
        for place, (host, each) in enumerate(zip((self.node, self.other), windows, strict=True)):
            work, waited, step = (value / 1000 for value in each)
            assert host.take({place: StepWindow(work=work, waited=waited, step=step)}) == ""
        return self.node.judge("fa", self.heard())


@pytest.fixture
def hosts():
    return TwoHosts()


@pytest.mark.fault("M5")
def test_an_exchange_for_which_every_rank_waits_most_of_the_step_is_named_once(hosts):
    windows = (20, 90, 120), (15, 95, 121)
    assert hosts.say(*windows) == ""
    said = hosts.say(*windows)
    assert said.startswith(
        "lockstep: the exchange between the hosts limits this run: of 121 ms per step every rank waits for data of "
        "others (fa 90 ms, fb 95 ms). "
    )
    assert said.count("\n") == 1
    assert hosts.say(*windows) == ""


@pytest.mark.fault("P11")
def test_a_rank_that_is_slower_than_those_of_another_host_is_named(hosts):
    windows = (20, 90, 120), (110, 1, 120)
    assert hosts.say(*windows) == ""
    said = hosts.say(*windows)
    assert said.startswith("lockstep: rank 1 is slow: it works 110.0 ms on a micro-batch")
    assert "exchange" not in said.replace("exchange between", "")


@pytest.mark.parametrize(
    "windows",
    [((20, 50, 120), (20, 90, 120)), ((1, 7, 9), (1, 7, 9)), ((0, 119, 120), (110, 1, 120))],
    ids=["one host waits less than half", "steps of a few ms", "a rank without micro-batches"],
)
def test_what_is_no_slow_exchange_is_not_called_one(hosts, windows):
    assert [hosts.say(*windows) for _ in range(4)] == [""] * 4


def test_nothing_is_said_before_every_host_has_a_new_window(hosts):
    windows = (20, 90, 120), (20, 90, 120)
    hosts.say(*windows)
    assert [hosts.node.judge("fa", hosts.heard()) for _ in range(3)] == [""] * 3
    assert SharedStepWindows().judge("fa", {"fb": {}}) == "", "a host that has said nothing yet"
    assert hosts.say(*windows) != ""
