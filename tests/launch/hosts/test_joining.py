"""The position of a host among those that remain; pure values."""

from lockstep.launch.hosts.joining import Joined
from lockstep.launch.hosts.roll_call import Plan


def positions(joined):
    layout = joined.layout
    return layout.node, layout.nodes, layout.first_rank, layout.world_size


def test_remaining_hosts_are_renumbered():
    plan = Plan(name="n0", run_id="r", ranks={0: 2, 1: 3, 2: 1}, rendezvous="tcp://10.0.0.1:5")
    joined = Joined(None, 2, plan, "ib0")
    assert positions(joined) == (2, 3, 5, 6)
    joined.note([1])
    assert positions(joined) == (1, 2, 2, 3)
    assert joined.attempt == 1
