"""When another host counts as silent, back, or lost; the clock is the test's."""

import time
from contextlib import closing
from dataclasses import replace

import pytest
from tests.launch.hosts.host import free_port

from lockstep.launch.hosts.control_link import ControlClient, ControlServer, Peer
from lockstep.launch.hosts.roll_call import Hello, HostOptions


class Line:
    """A channel of which the test says what comes over it."""

    def __init__(self):
        self.is_open, self.messages = True, []

    def receive(self):
        said, self.messages = self.messages, []
        return said

    def close(self):
        self.is_open = False


@pytest.fixture
def clock(monkeypatch):
    """Moves time on by what it is called with."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def pass_by(seconds):
        now[0] += seconds

    return pass_by


@pytest.fixture
def peer(clock):
    said = []
    made = Peer("host 1 (fb)", said.append, 13.0)
    made.said = said
    made.connect(Line())
    return made


def test_a_host_that_speaks_is_not_mentioned(peer, clock):
    for _ in range(30):
        clock(1)
        peer.channel.messages.append({"now": 5.0})
        peer.receive()
    assert (peer.said, peer.lost) == ([], "")


def test_a_glitch_is_mentioned_once_and_so_is_its_end(peer, clock):
    for _ in range(10):
        clock(1)
        peer.receive()
    peer.connect(Line())
    peer.receive()
    assert peer.said == [
        "host 1 (fb) has sent nothing for 4 s; it may come back.",
        "host 1 (fb) is back after 10 s.",
    ]
    assert not peer.lost


def test_a_silent_host_is_lost_after_its_limit_and_stays_lost(peer, clock):
    for _ in range(13):
        clock(1)
        peer.receive()
    assert not peer.lost
    clock(0.1)
    peer.receive()
    assert peer.lost == "has sent nothing for 13 s"
    peer.channel.messages.append({})
    peer.receive()
    assert peer.lost
    assert peer.said[1] == "host 1 (fb) has sent nothing for 13 s."


def test_after_a_suspension_of_this_host_the_other_has_its_whole_time(peer, clock):
    clock(600)
    for _ in range(12):
        peer.receive()
        clock(1)
    assert not peer.lost
    clock(2)
    peer.receive()
    assert peer.lost


def test_a_host_that_closes_has_three_seconds_to_come_back(peer, clock):
    peer.channel.close()
    peer.receive()
    clock(2.9)
    peer.receive()
    assert not peer.lost
    peer.connect(Line())
    clock(1)
    peer.receive()
    assert not peer.lost
    peer.channel.close()
    peer.receive()
    clock(3.1)
    peer.receive()
    assert peer.lost == "closed the connection and did not reconnect: its command has ended"


def test_a_host_that_says_why_it_leaves_is_lost_at_once(peer):
    peer.channel.messages.append({"left": "its log folder is full"})
    peer.receive()
    assert peer.lost == "left: its log folder is full"
    assert peer.said == ["host 1 (fb) left: its log folder is full."]


def test_the_difference_of_clocks_is_that_of_the_fastest_message(peer, clock):
    for sent, late in ((1000.0, 0.5), (1001.0, 0.2), (1002.0, 0.9)):
        clock(1.0)
        peer.handle({"now": sent})
        peer.handle({"now": sent - late})
    assert peer.offset == pytest.approx(101.0 - 1000.0)


@pytest.mark.fault("N6")
def test_a_host_of_a_former_run_is_refused_and_ends_itself():
    """Node 0 was started again within seconds, and a host of its former run connects again."""
    options = HostOptions(nodes=2, node=1, master=f"127.0.0.1:{free_port()}", token=b"t" * 32)
    hello = Hello(node=0, name="fa", ranks=2, instance="one", settings={})
    plan = {"name": "fa", "run_id": "", "ranks": {}, "rendezvous": ""}
    client = ControlClient(options, replace(hello, node=1, instance="two"), str)
    with closing(client):
        first = ControlServer(options, "127.0.0.1", hello, str)
        exchange(client, first, {"plan": {**plan, "run_id": first.run_id}}, lambda: "plan" in client.peer.state)
        assert client.wait_for_plan()["run_id"] == first.run_id
        assert first.peers
        first.close()
        with closing(ControlServer(options, "127.0.0.1", hello, str)) as second:
            exchange(client, second, {}, lambda: client.peer.lost)
            assert not second.peers
            assert f"host 0 was started anew, with the run {second.run_id}" in client.peer.lost


def exchange(client, server, state, until):
    """Lets both speak until it is so."""
    deadline = time.monotonic() + 10
    while not until():
        assert time.monotonic() < deadline
        server.exchange(state)
        client.exchange({})
        client.wait(0.05)
