"""Tensors whose values are in other processes: what they answer, what they change, what they refuse."""

import copy
from operator import itemgetter

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.strategies.absent import Absence, AbsentBuffer, AbsentParameter, GradientElsewhere


def absent():
    """A parameter of 6 rows whose first 3 are held here, and those."""
    whole = nn.Parameter(torch.randn(6, 4))
    rows = nn.Parameter(whole.detach()[:3].clone())
    AbsentParameter.describe(whole, "fc.weight", rows, Absence("fsdp", "no process holds it whole"))
    whole.__class__ = AbsentParameter
    return whole, rows


def test_an_absent_parameter_has_name_shape_and_flags():
    parameter, _ = absent()
    assert isinstance(parameter, nn.Parameter) and parameter.is_leaf and parameter.grad is None
    assert (tuple(parameter.shape), parameter.numel(), len(parameter)) == ((6, 4), 24, 6)
    assert parameter.device.type == "cpu" and not parameter.is_meta and parameter in {parameter}
    module = nn.Module()
    module.weight = parameter
    module.requires_grad_(False)
    assert not parameter.requires_grad


def test_changes_by_a_factor_or_a_bound_reach_the_rows():
    parameter, rows = absent()
    rows.grad = torch.randn(3, 4)
    expected = rows.grad.clone()
    parameter.grad.mul_(0.5)
    parameter.grad *= 3
    parameter.grad /= torch.tensor(7.0)
    parameter.grad.data.clamp_(max=0.2)
    parameter.grad.data *= 2
    expected = expected.mul_(0.5).mul_(3).div_(7.0).clamp_(max=0.2).mul_(2)
    assert torch.equal(rows.grad, expected)
    nn.utils.clip_grad_value_([parameter], 0.01)
    assert torch.equal(rows.grad, expected.clamp(-0.01, 0.01))
    values = rows.detach().clone()
    with torch.no_grad():
        parameter.mul_(0.9)
    parameter.data.clamp_(-0.2, 0.2)
    parameter.data *= 0.5
    assert torch.equal(rows, (values * 0.9).clamp(-0.2, 0.2) * 0.5)
    nn.init.zeros_(parameter)
    assert not rows.any()
    nn.init.constant_(parameter, 0.5)
    assert torch.equal(rows, torch.full((3, 4), 0.5))
    parameter.grad = None
    assert rows.grad is None and parameter.grad is None


def test_rows_are_taken_from_whole_tensors():
    """As masks of pruning and ``load_state_dict`` give them."""
    whole, mask = nn.Parameter(torch.randn(6, 4)), torch.rand(6, 4)
    rows = nn.Parameter(torch.zeros(2, 4))
    parameter = nn.Parameter(torch.empty(6, 4))
    AbsentParameter.describe(parameter, "w", rows, Absence("fsdp", "elsewhere"), itemgetter(slice(3, 5)))
    parameter.__class__ = AbsentParameter
    module = nn.Module()
    module.w = parameter
    module.load_state_dict({"w": whole})
    assert torch.equal(rows, whole[3:5])
    parameter.data.mul_(mask)
    assert torch.equal(rows, (whole * mask)[3:5])
    rows.grad = torch.ones(2, 4)
    parameter.grad.mul_(mask)
    assert torch.equal(rows.grad, mask[3:5])


USES = {
    "norm": lambda p: p.norm(),
    "data": lambda p: p.data.norm(),
    "noise": lambda p: p.data.add_(torch.randn_like(p)),
    "copied from rows": lambda p: p.data.copy_(torch.zeros(4)),
    "copied from itself": lambda p: p.data.copy_(p),
    "assigned": lambda p: setattr(p, "data", torch.zeros(6, 4)),
    "copied": copy.deepcopy,
    "compared": lambda p: p == p,
    "drawn": nn.init.normal_,
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "indexed": lambda p: p[0],
    "numbers": lambda p: p.tolist(),
    "detached": lambda p: p.detach(),
    "moved": lambda p: p.to(torch.float64),
}
GRADIENT_USES = {
    "clipped by norm": lambda p: nn.utils.clip_grad_norm_([p], 0.1),
    "clipped by norm, all at once": lambda p: nn.utils.clip_grad_norm_([p], 0.1, foreach=True),
    "clipped by value, all at once": lambda p: nn.utils.clip_grad_value_([p], 0.1, foreach=True),
    "norm": lambda p: p.grad.norm(),
    "scaled apart": lambda p: p.grad * 2,
    "noise": lambda p: p.grad.add_(torch.randn_like(p.grad)),
    "assigned": lambda p: setattr(p, "grad", torch.zeros(6, 4)),
    "number": lambda p: float(p.grad.sum()),
}


@pytest.mark.parametrize("use", USES)
def test_values_that_are_not_here_are_refused_by_name(use):
    parameter, rows = absent()
    before = rows.detach().clone()
    with pytest.raises(
        ConfigError, match=r"'fc\.weight.*under strategy 'fsdp' no process holds it whole.*AveragedModel"
    ):
        USES[use](parameter)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("use", GRADIENT_USES)
def test_gradients_that_are_not_here_are_refused_with_the_call_to_use(use):
    parameter, rows = absent()
    rows.grad = torch.ones(3, 4)
    with pytest.raises(ConfigError, match=r"The gradient of 'fc\.weight'.*run\.clip_gradients"):
        GRADIENT_USES[use](parameter)
    assert torch.equal(rows.grad, torch.ones(3, 4))


def test_of_several_that_are_not_here_one_is_named():
    """It was 'the parameter' of all their names, in one pair of quotation marks."""
    parameter, _ = absent()
    other, _ = absent()
    other.parameter_name = "fc.other"
    with pytest.raises(ConfigError, match=r"The parameter 'fc\.weight' is used"):
        torch._foreach_mul_([parameter, other], 0.5)


def test_within_a_step_nothing_is_changed_in_place():
    """Every rank runs micro-batches of its own."""
    parameter, _ = absent()
    parameter.absence.is_computing = True
    with pytest.raises(ConfigError, match="outside of the forward pass"):
        parameter.data.mul_(0.5)


def test_a_buffer_that_is_not_here_is_refused_by_name():
    buffer = AbsentBuffer(torch.zeros(3), "norm.mean", Absence("pipeline", "rank 1 has its stage"))
    assert buffer.shape == (3,)
    with pytest.raises(ConfigError, match=r"The buffer 'norm\.mean'.*rank 1 has its stage"):
        buffer.mean()


def test_a_module_may_be_compiled_while_a_server_has_its_gradients():
    """As in an evaluation after a step, where the loop clears gradients before the backward pass."""
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    for name, parameter in layer.named_parameters():
        absence = Absence("parameter_server", "the server has it")
        parameter.grad = GradientElsewhere(parameter, name, None, absence)
    assert torch.equal(torch.compile(layer, backend="eager")(x), layer(x))


def test_a_gradient_that_a_server_has_is_scaled_there():
    whole = nn.Parameter(torch.randn(4, 3))
    own = nn.Parameter(whole.detach()[:2])
    own.grad = torch.ones(2, 3)
    whole.grad = GradientElsewhere(whole, "w", own, Absence("parameter_server", "the servers share it"))
    whole.grad.mul_(0.5)
    whole.grad *= 0.5
    assert torch.equal(own.grad, torch.full((2, 3), 0.25))
    whole.grad.data.mul_(2)
    whole.grad.data *= 3
    whole.grad.detach().div_(4)
    assert torch.equal(own.grad, torch.full((2, 3), 0.375))
    with pytest.raises(ConfigError, match=r"The gradient of 'w'.*the servers share it"):
        nn.utils.clip_grad_norm_([whole], 0.1)
    whole.grad = None
