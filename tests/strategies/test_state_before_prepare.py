"""An optimizer that has state before ``prepare``, as Adagrad always has, is shared out with its parameters."""

import logging

import pytest
import torch
from tests.ranks import run_ranks
from tests.run.jobs import begin, dataset, network
from torch import nn

from lockstep.runtime.lazy_compiler import postpone_compiler


def trained(world, options, warm):
    """The fingerprint after three steps with Adagrad, or with an Adam that has already stepped once."""
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    model = network()

    def make(parameters, lr):
        parameters = list(parameters)
        if not warm:
            return torch.optim.Adagrad(parameters, lr=lr, initial_accumulator_value=0.5)
        optimizer = torch.optim.Adam(parameters, lr=lr)
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    run, _, optimizer = begin(model, make, lr=0.01, **options)
    for batch in run.batches(dataset(72)):
        run.backward(batch, nn.functional.cross_entropy)
        run.clip_gradients(0.5)
        optimizer.step()
        optimizer.zero_grad()
    found = run.fingerprint()
    run.close()
    return found


@pytest.mark.parametrize("warm", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        (3, "fsdp"),
        (2, "ddp"),
        pytest.param(3, "parameter_server", marks=pytest.mark.slow),
        pytest.param(2, "pipeline", marks=pytest.mark.slow),
    ],
)
def test_its_state_is_that_of_one_device(world, strategy, warm):
    alone = run_ranks(trained, 1, {"strategy": "single"}, warm)
    assert run_ranks(trained, world, {"strategy": strategy}, warm) == alone * world
