"""What a server makes of the pushes of an update, without a process."""

import pytest
import torch
from tests.strategies.parameter_server.asynchronous.scripted import a_service, push
from torch import nn

from lockstep.buffers import RunningBuffers
from lockstep.errors import ConfigError, NonFiniteError
from lockstep.strategies.parameter_server.asynchronous.server import Server
from lockstep.strategies.parameter_server.asynchronous.tensors import ModelBuffers


def a_server(step=0):
    service, script, holding = a_service()
    model = nn.Identity()
    return (
        Server(service, [0], holding, RunningBuffers(model), ModelBuffers(model, ()), step, 1),
        script,
        holding,
    )


def backward(server, stop=0):
    return server.backward(None, None, scale=1.0, stop=stop)


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
    with pytest.raises(NonFiniteError, match=r"Update 1 is NaN or infinite and was not made"):
        backward(server)


def test_a_step_without_pushes_changes_nothing_and_tells_the_last_loss():
    server, script, holding = a_server()
    script.arriving = [(1, push(1)), (2, push(3))]
    backward(server)
    server.after_step()
    for worker in (1, 2):
        server._service._attendance.come(worker, 1)
    assert float(backward(server).loss) == 2.0 / 8.0
    assert holding.own["weight"].grad is None
    server.after_step()
    assert server._service.ledger.version == 1


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
