"""A server's handling of messages, one after the other, without a process: the loop is driven by a list."""

import math
from unittest.mock import Mock

import pytest
import torch
from tests.strategies.parameter_server.asynchronous.scripted import (
    PULL,
    a_server,
    answered,
    at_barrier,
    push,
)

from lockstep.errors import ConfigError, NonFiniteError, RankError
from lockstep.strategies.parameter_server.asynchronous_transport import ServerMessage


def test_an_update_is_due_when_as_many_pushes_have_come_as_workers_live():
    server, script, holding = a_server()
    script.arriving = [(1, push(1.0)), (1, PULL), (1, push(4.0, weight=2.0)), (2, push(9.0))]
    accumulator = server.collect()
    assert script.arriving == [(2, push(9.0))], "two pushes of the faster one make an update"
    assert bool(accumulator.set_gradients())
    assert torch.equal(holding.own["weight"].grad, torch.full((1, 3), 2.0)), "weighted by samples"
    assert (accumulator.loss, accumulator.weight, accumulator.leaves) == (2.0, 6.0, 2)


def test_who_is_within_the_bound_is_answered_at_once_and_others_when_the_slowest_has_come():
    server, script, _ = a_server(staleness=1)
    script.arriving = [(1, push(1)), (1, PULL), (1, push(1)), (1, PULL)]
    server.collect()
    assert answered(script) == [1], "the first pull"
    server.publish(True)
    assert answered(script) == [], "two steps ahead"
    script.arriving += [(2, push(1)), (2, PULL), (2, push(1))]
    server.collect()
    assert answered(script) == [1, 2]


def test_values_are_given_after_the_update_that_a_push_makes_due():
    server, script, _ = a_server(staleness=0)
    script.arriving = [(1, push(1)), (1, PULL), (2, push(1)), (2, PULL)]
    server.collect()
    assert answered(script) == [], "they would be the old ones"
    server.publish(True)
    assert script.sent[0][1].content["version"] == 1
    assert answered(script) == [1]


def values(rank):
    return (rank, ServerMessage("values", {"stop_at": 0, "stop_reason": 0}, b"theirs"))


def test_workers_that_are_past_a_barrier_are_not_given_the_values_before_their_update():
    """A server that still fetches the values of another was fast to answer and slow to collect: workers trained on
    values that lacked the update they had pushed. Seen once in many runs, on a busy machine."""
    server, script, _ = a_server(workers=(2, 3), servers=(0, 1), staleness=0)
    script.arriving = [(1, at_barrier(1)), (2, at_barrier(1)), (3, at_barrier(1))]
    server.barrier("synchronize", None)
    script.sent.clear()
    step = [(2, push(1)), (2, PULL), (3, push(1)), (3, PULL)]
    script.arriving = [(1, PULL), (2, PULL), (3, PULL), *step, values(1)]
    assert server.pull_from(1).body == b"theirs"
    assert answered(script) == [1, 2, 3], "what they fetched, and not yet what follows their pushes"
    assert server.collect().pushes == 2
    server.publish(True)
    assert answered(script) == [2, 3]


def test_servers_that_both_have_an_update_to_make_show_each_other_their_values():
    server, script, _ = a_server(workers=(2, 3), servers=(0, 1), staleness=0)
    script.arriving = [(2, push(1)), (3, push(1)), (1, PULL), values(1)]
    server.pull_from(1)
    assert answered(script) == [1]


def test_a_worker_for_which_a_server_waits_gets_there_also_with_an_update_left():
    """Its peer was lost, so the server has made its steps and the worker has not."""
    server, script, _ = a_server(workers=(1,), staleness=0)
    script.arriving = [(1, push(1)), (1, PULL), (1, push(1)), (1, PULL), (1, at_barrier(1))]
    server.barrier("synchronize", None)
    assert answered(script) == [1, 1]
    script.arriving = [(1, push(1)), (1, PULL), (1, ServerMessage("bye"))]
    server.shutdown()
    assert answered(script) == [1]


def test_a_server_that_takes_its_leave_still_shows_its_values_to_the_others():
    server, script, _ = a_server(workers=(2,), servers=(0, 1))
    script.arriving = [(2, ServerMessage("bye")), (1, PULL), (1, ServerMessage("bye"))]
    server.shutdown()
    assert answered(script) == [1]


def test_the_values_of_a_server_that_has_gone_are_not_waited_for():
    server, script, _ = a_server(workers=(2,), servers=(0, 1))
    script.arriving = [(1, ServerMessage("bye")), (1, None)]
    with pytest.raises(ConnectionError, match=r"Connection closed by peer: the parameter server on rank 1"):
        server.pull_from(1)


def test_staleness_is_how_many_updates_a_gradient_missed():
    server, script, _ = a_server(staleness=5)
    for versions in ((0, 0), (0, 1), (2, 1)):
        script.arriving = [(1, push(1, versions[0])), (2, push(1, versions[1]))]
        server.collect()
        server.publish(True)
    assert (server.staleness.most, server.staleness.mean) == (1, 2 / 6)


def test_a_lost_worker_is_waited_for_no_longer():
    server, script, _ = a_server(staleness=0)
    script.arriving = [(1, push(1)), (1, PULL), (2, None)]
    assert server.collect().pushes == 1
    server.publish(True)
    assert answered(script) == [1]
    assert server.lost == {2: 0}


def test_when_all_workers_are_lost_the_run_ends_with_their_names():
    server, script, _ = a_server()
    script.arriving = [(1, None), (2, None)]
    with pytest.raises(RankError, match=r"All workers .* \(rank 1 after update 0, rank 2 after update 0\)"):
        server.collect()


def test_a_lost_server_is_no_loss_that_the_others_survive():
    server, script, _ = a_server(workers=(2, 3), servers=(0, 1))
    script.arriving = [(1, None)]
    with pytest.raises(ConnectionError, match=r"Connection closed by peer: the parameter server on rank 1"):
        server.collect()


def test_a_barrier_waits_for_all_that_live_and_gives_everyone_what_each_brought():
    server, script, _ = a_server(workers=(1, 2, 3))
    script.arriving = [(1, at_barrier(1, value=[1.5])), (3, None), (2, at_barrier(1, value=[2.5]))]
    met = server.barrier("synchronize", [0.5])
    assert met.values == [[0.5], [1.5], [2.5]]
    assert met.living == [1, 2]
    assert [(rank, message.content["values"]) for rank, message in script.sent] == [
        (1, met.values),
        (2, met.values),
    ]


def test_pushes_that_come_while_a_server_waits_for_a_barrier_count_for_the_next_update():
    server, script, _ = a_server()
    script.arriving = [(1, push(1)), (1, PULL), (1, at_barrier(1)), (2, at_barrier(1))]
    server.barrier("synchronize", None)
    assert answered(script) == [1]
    script.arriving = [(2, push(1))]
    assert server.collect().pushes == 2


def test_an_update_is_made_of_what_there_is_when_no_more_can_come():
    """One of two workers was lost in the epoch: the other waits at its end, and the server has steps left."""
    server, script, _ = a_server()
    script.arriving = [(1, push(1)), (1, at_barrier(1)), (2, at_barrier(1))]
    assert server.collect().pushes == 1
    assert server.collect().pushes == 0
    assert server.barrier("synchronize", None).living == [1, 2]
    script.arriving = [(1, push(1)), (2, push(1))]
    assert server.collect().pushes == 2, "after the barrier they continue"


def test_ranks_that_make_different_calls_are_told_so():
    server, script, _ = a_server(workers=(1,))
    script.arriving = [(1, at_barrier(1, "gather"))]
    with pytest.raises(ConfigError, match=r"Rank 1 is at barrier 1 \(gather\) while .* 1 \(synchronize\)"):
        server.barrier("synchronize", None)


def test_all_stop_at_a_step_that_none_has_begun():
    server, script, _ = a_server(staleness=3)
    script.arriving = [(1, push(1)), (1, push(1))]
    server.collect()
    server.request_stop(130)
    server.request_stop(75)
    assert (server.stop.at, server.stop.reason) == (4, 130)
    script.arriving = [(1, PULL), (2, push(1)), (2, push(1))]
    server.collect()
    assert script.sent[0][1].content == {"version": 0, "stop_at": 4, "stop_reason": 130}


@pytest.mark.parametrize(
    "message",
    [
        push(1, size=2),
        push(1, weight=math.nan),
        push(1, weight=math.inf),
        push(1, weight=-1.0),
        push(1, counters=[[1], 2]),
        push(1, leaves=-3),
        push(1, unused="a"),
        push(1, version=None),
        ServerMessage("push", {}, b""),
        ServerMessage("run this", {}),
        ServerMessage("sum_counts", {"row": ["x"]}),
        ServerMessage("sum_counts", {}),
        ServerMessage("at_barrier", {"number": "one"}),
        at_barrier("first"),
    ],
)
def test_who_sends_nonsense_is_cut_off_and_the_others_go_on(message):
    server, script, _ = a_server()
    script.arriving = [(1, message), (1, None), (2, push(1))]
    assert server.collect().pushes == 1
    assert script.cut_off == [1]


def test_a_push_of_a_rank_that_is_no_worker_is_refused():
    server, script, _ = a_server()
    script.arriving = [(7, push(1)), (1, push(1)), (2, push(1))]
    assert server.collect().pushes == 2
    assert script.cut_off == [7]


def test_a_worker_without_micro_batches_counts_its_step():
    server, script, _ = a_server()
    script.arriving = [(1, push(0, leaves=0)), (2, push(1))]
    accumulator = server.collect()
    assert (accumulator.pushes, accumulator.leaves) == (2, 1)


def test_what_no_push_has_used_gets_no_gradient():
    server, script, holding = a_server()
    script.arriving = [(1, push(1, unused=["weight"])), (2, push(1, unused=["weight"]))]
    server.collect().set_gradients()
    assert holding.own["weight"].grad is None


def test_a_server_serves_until_all_workers_have_parted():
    server, script, _ = a_server()
    script.arriving = [(1, ServerMessage("bye")), (1, None), (2, PULL), (2, ServerMessage("bye")), (2, None)]
    server.shutdown()
    assert answered(script) == [2]
    assert script.arriving == [(2, None)]
    assert server.lost == {}


def backward(server, stop=0):
    return server.backward(None, Mock(), scale=1.0, stop=stop)


def test_an_update_is_the_mean_gradient_of_its_pushes_and_their_mean_loss():
    server, script, holding = a_server()
    script.arriving = [(1, push(1)), (2, push(3))]
    result = backward(server)
    assert float(result.loss) == 2.0 / 8.0
    assert torch.equal(holding.own["weight"].grad, torch.full((1, 3), 2.0))
    server.after_step()
    assert holding.own["weight"].grad is None


@pytest.mark.parametrize("bad", [{"value": float("nan")}, {"value": 1, "loss": float("inf")}])
def test_an_update_that_is_not_finite_is_not_made(bad):
    server, script, _ = a_server()
    script.arriving = [(1, push(**bad)), (2, push(3))]
    with pytest.raises(
        NonFiniteError,
        match=r"Update 1 was not made: a worker pushed a loss or gradient that is NaN or infinite",
    ):
        backward(server)


def test_a_step_without_pushes_changes_nothing_and_tells_the_last_loss():
    server, script, holding = a_server()
    script.arriving = [(1, push(1)), (2, push(3))]
    backward(server)
    server.after_step()
    for worker in (1, 2):
        server.barriers.arrive(worker, 1)
    assert float(backward(server).loss) == 2.0 / 8.0
    assert holding.own["weight"].grad is None
    server.after_step()
    assert server.version == 1


def test_a_second_backward_pass_before_the_step_is_refused():
    server, script, _ = a_server()
    script.arriving = [(1, push(1)), (2, push(3))]
    backward(server)
    with pytest.raises(ConfigError, match="called twice before optimizer"):
        backward(server)


def test_a_stop_is_told_with_the_step_that_all_stop_after():
    server, script, _ = a_server()
    script.arriving = [(worker, push(1)) for worker in (1, 2, 1, 2)]
    assert int(backward(server, stop=130).stop) == 0, "workers may have begun the next"
    server.after_step()
    assert int(backward(server).stop) == 130
