"""Methods that the user's optimizer adds to torch's, where each process steps a part of the parameters."""

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep.config.options import RunOptions
from lockstep.errors import ConfigError
from lockstep.run import Run
from lockstep.runtime.lazy_compiler import postpone_compiler


class Own(torch.optim.SGD):
    """SGD with methods and properties as optimizers of papers have them."""

    def _members(self):
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def ascend(self):
        """The first step of SAM."""
        norm = sum(p.grad.square().sum() for p in self._members()) ** 0.5
        for p in self._members():
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=float(0.1 / norm))

    def norm(self):
        return float(sum(p.square().sum() for p in self._members()))

    @property
    def largest(self):
        return max(float(p.abs().max()) for p in self._members())

    def set_by(self, function):
        for p in self._members():
            p.data = function(p.data)

    @torch.no_grad()
    def shrink(self, by, *, twice=False):
        for p in self._members():
            p.mul_(by ** (1 + twice))

    @torch.no_grad()
    def backup(self):
        for p in self._members():
            self.state[p]["old"] = p.clone()

    @torch.no_grad()
    def swap(self):
        for p in self._members():
            old, now = self.state[p]["old"], p.clone()
            p.copy_(old)
            old.copy_(now)

    def rate(self):
        return self.param_groups[0]["lr"]

    @property
    def momentum(self):
        return self.param_groups[0]["momentum"]


def uses(optimizer, how):
    if how == "set_by":
        optimizer.set_by(lambda values: 0.5 * values)
    elif how == "largest":
        assert optimizer.largest > 0
    elif how == "elements":
        optimizer.backup()
        optimizer.shrink(0.9, twice=True)
        optimizer.shrink(1.01)
        optimizer.swap()
        assert (optimizer.rate(), optimizer.momentum) == (0.05, 0.9)
    else:
        getattr(optimizer, how)()


def trained(world, strategy, how):
    """The loss after an epoch, and the fingerprint; or the message of the refusal."""
    postpone_compiler()
    torch.manual_seed(1)
    run = Run(RunOptions(global_batch=12, micro_batches=4, seed=3, strategy=strategy), world)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    model, optimizer = run.prepare(model, Own(model.parameters(), lr=0.05, momentum=0.9))
    data = TensorDataset(torch.randn(24, 6), torch.randint(6, (24,)))
    try:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                run.backward(batch, F.cross_entropy)
                uses(optimizer, how)
                optimizer.step()
                optimizer.zero_grad()
        return run.evaluate(data, F.cross_entropy), run.fingerprint()
    except ConfigError as error:
        return str(error)
    finally:
        run.close()


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline", "parameter_server"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("ascend", r"Own.ascend() updates a parameter by what it finds in others"),
        ("norm", r"Own.norm() returns what it has computed from all parameters together"),
        ("largest", r"Own.largest returns what it has computed from all parameters together"),
        ("set_by", r"Own.set_by() is given a function, with which it cannot be tried"),
    ],
)
def test_a_method_that_looks_at_several_parameters_is_refused(strategy, how, said):
    """It saw those of one process: other bits or numbers, with exit status 0."""
    for found in run_ranks(trained, 2, strategy, how):
        assert said in found and "or strategy 'ddp'" in found


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_methods_of_single_elements_have_the_bits_of_one_device(strategy):
    (expected,) = run_ranks(trained, 1, "single", "elements")
    assert run_ranks(trained, 2, strategy, "elements") == [expected, expected]


@pytest.mark.parametrize("how", ["ascend", "norm", "largest", "set_by"])
def test_processes_that_hold_all_parameters_may_call_any_method(how):
    (expected,) = run_ranks(trained, 1, "single", how)
    assert run_ranks(trained, 2, "ddp", how) == [expected, expected]
