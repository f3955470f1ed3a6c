"""Hooks of users: the places where they are found, and the order in which they run beside Lockstep's."""

from functools import partial

import torch
from torch import nn

from lockstep.numerics.hooks import (
    Surrounded,
    first_hooked,
    gradient_hooks,
    hooks_made,
    is_users,
    put_users_first,
    share_hooks,
)
from lockstep.numerics.randomness import KeyedRandomness, draws_in_forward
from lockstep.strategies.gradients import GradientTree


def test_hooks_of_lockstep_are_not_the_users():
    assert is_users(print) and is_users(partial(print, 1)) and is_users(lambda: None)
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    KeyedRandomness(model, 0, torch.device("cpu"))
    GradientTree(dict(model.named_parameters()), None)
    assert model[1]._forward_hooks and first_hooked(model) is None


def test_the_first_hook_is_found_wherever_it_is():
    for put, name in (
        (lambda model: model.register_forward_hook(print), "the model"),
        (lambda model: model[1].register_forward_pre_hook(print), "1"),
        (lambda model: model[1].register_full_backward_pre_hook(print), "1"),
        (lambda model: model[0].bias.register_hook(print), "0.bias"),
        (lambda model: model[0].weight.register_post_accumulate_grad_hook(print), "0.weight"),
    ):
        model, before = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), hooks_made()
        assert not draws_in_forward(model)
        put(model)
        assert hooks_made() > before and first_hooked(model) == name and draws_in_forward(model)


def test_a_shared_hook_comes_and_goes_with_the_parameter_it_was_put_on():
    first, second, seen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), []
    early = first.register_hook(lambda gradient: seen.append("early"))
    share_hooks(first, second)
    late = first.register_hook(lambda gradient: gradient * 3)
    after = second.register_post_accumulate_grad_hook(lambda parameter: seen.append("after"))
    second.sum().backward()
    assert second.grad.tolist() == [3.0, 3.0] and seen == ["early", "after"]
    for handle in (early, late, after):
        handle.remove()
    second.sum().backward()
    assert second.grad.tolist() == [4.0, 4.0] and seen == ["early", "after"]


def test_hooks_of_lockstep_run_around_the_users_and_the_sum_is_taken_last():
    parameter, seen = nn.Parameter(torch.ones(1)), []
    tree = GradientTree({"weight": parameter}, None)
    for number in range(2):
        parameter.register_post_accumulate_grad_hook(lambda p, number=number: seen.append(number))
    _, hooks = gradient_hooks(parameter)
    surrounded = Surrounded(hooks, lambda *_: seen.append("begin"), lambda *_: seen.append("end"))
    for hook in list(hooks.values())[-2:]:
        hook.__module__ = "lockstep.test"
    surrounded.arrange()
    parameter.sum().backward()
    assert seen == ["begin", 0, 1, "end"] and len(hooks) == 5
    surrounded.remove()
    assert len(hooks) == 3
    put_users_first(hooks)
    assert [is_users(hook) for hook in hooks.values()] == [True, True, False] and tree.slots
