"""The groups and the state of an optimizer that holds parts, as the user sees them."""

import io
from operator import itemgetter
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim

from lockstep.errors import ConfigError
from lockstep.numerics.precision import Precision
from lockstep.run.optimizer_step import GradientState, PreparedOptimizer
from lockstep.run.shared_groups import SharedGroups
from lockstep.strategies.absent import Absence, AbsentParameter
from lockstep.strategies.optimizer_trial import Unit


def shared(*, lr=0.1, left_out=0, unit=Unit.ELEMENT, shares_all=False):
    """The optimizer of a rank that has the first row of a weight, all of a bias, and nothing of a second weight."""
    wholes = {"weight": nn.Parameter(torch.ones(2, 3)), "bias": nn.Parameter(torch.ones(3))}
    wholes["other"] = nn.Parameter(torch.ones(2, 2))
    held = {"weight": nn.Parameter(torch.ones(1, 3)), "bias": nn.Parameter(torch.ones(3))}
    absence = Absence("fsdp", "no process holds it whole")
    for name, whole in wholes.items():
        place = itemgetter(slice(0, 1) if name == "weight" else slice(None))
        AbsentParameter.describe(whole, name, held.get(name), absence, place)
        whole.__class__ = AbsentParameter
    names = list(wholes)[: len(wholes) - left_out]
    own = optim.SGD([held[name] for name in names if name in held], lr=lr, momentum=0.9)
    strategy = SimpleNamespace(
        replicated=False,
        trainable=lambda: held,
        largest_unit=unit,
        cut_dimensions=1,
        whole_parameters=frozenset(),
        device=torch.device("cpu"),
        name="fsdp",
        absences=[],
        all_reduce_max=lambda flags: flags,
        writes=None,
        before_step=lambda: None,
        after_step=lambda: None,
    )
    groups = SharedGroups(own, [names], wholes, strategy)
    groups.shares_all = shares_all
    gradients = GradientState([own], strategy, Precision("fp32", strategy.device), {}, ())
    return PreparedOptimizer(own, gradients, groups), own, wholes, held


def test_groups_show_the_prepared_models_parameters():
    optimizer, own, seen, _ = shared()
    (group,) = optimizer.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in seen.values()]
    group["lr"] = 0.5
    group.setdefault("initial_lr", 0.7)
    assert own.param_groups[0]["lr"] == 0.5 and own.param_groups[0]["initial_lr"] == 0.7
    assert set(group) == set(own.param_groups[0]) and len(group) == len(own.param_groups[0])
    with pytest.raises(ConfigError, match=r"call optimizer\.add_param_group"):
        group["params"] = []


def test_a_scheduler_takes_them():
    optimizer, own, _, _ = shared()
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    optimizer._gradients.end_backward()
    optimizer.step()
    scheduler.step()
    assert own.param_groups[0]["lr"] == pytest.approx(0.01)


def test_state_is_found_by_the_prepared_models_parameters_to_be_scaled_and_forgotten():
    optimizer, own, seen, held = shared()
    momentum = own.state[held["weight"]]["momentum_buffer"] = torch.ones(1, 3)
    own.state[held["weight"]]["step"] = torch.tensor(2.0)
    state = optimizer.state
    assert [id(each) for each in state] == [id(seen["weight"]), id(seen["other"])]
    for values in state.values():
        values["momentum_buffer"].mul_(0.5)
    state[seen["weight"]]["momentum_buffer"] *= 0.5
    state[seen["weight"]]["step"].fill_(3.0)
    assert momentum.max() == 0.25 and own.state[held["weight"]]["step"] == 3
    state[seen["weight"]] = {}
    assert not own.state[held["weight"]]
    state.clear()
    assert not own.state


def test_where_every_process_has_rows_it_knows_what_state_there_is():
    optimizer, own, seen, held = shared(left_out=1, shares_all=True)
    own.state[held["weight"]].update(momentum_buffer=torch.ones(1, 3), step=torch.tensor(2.0))
    state = optimizer.state
    assert seen["weight"] in state and seen["bias"] not in state and len(state) == 1
    assert [*state[seen["weight"]]] == ["momentum_buffer", "step"] and state[seen["weight"]]["step"] == 2
    assert state[seen["weight"]]["momentum_buffer"].shape == (2, 3)


@pytest.mark.parametrize(
    "read",
    [
        lambda state, weight, other: state[weight]["momentum_buffer"].norm(),
        lambda state, weight, other: torch.save(state[weight]["momentum_buffer"], io.BytesIO()),
        lambda state, weight, other: len(state),
        lambda state, weight, other: other in state,
        lambda state, weight, other: sorted({key for each in state.values() for key in each}),
        lambda state, weight, other: float(state[other]["step"]),
    ],
)
def test_state_is_not_read_where_a_process_has_a_part_or_nothing(read):
    """Rows were given under fsdp, and nothing where another process has the parameter."""
    optimizer, own, seen, held = shared()
    own.state[held["weight"]]["momentum_buffer"] = torch.ones(1, 3)
    with pytest.raises(ConfigError, match=r"The optimizer's state (.* )?was read"):
        read(optimizer.state, seen["weight"], seen["other"])


def test_a_group_of_known_parameters_is_added():
    optimizer, own, seen, held = shared(left_out=2)
    optimizer.add_param_group({"params": [seen["bias"], seen["other"]], "lr": 0.01})
    assert [id(p) for p in own.param_groups[1]["params"]] == [id(held["bias"])]
    assert [id(p) for p in optimizer.param_groups[1]["params"]] == [id(seen["bias"]), id(seen["other"])]
    assert own.param_groups[1]["lr"] == 0.01


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (
            lambda seen: {"params": [nn.Parameter(torch.ones(5))]},
            r"a tensor of shape \[5\] that was not a parameter",
        ),
        (lambda seen: {"params": seen["weight"]}, "'weight' is in a group of the optimizer already"),
        (lambda seen: {"params": [seen["other"]], "fused": True}, "with fused=True by its place"),
    ],
)
def test_other_groups_are_refused(group, words):
    optimizer, _, seen, _ = shared(left_out=1)
    with pytest.raises(ConfigError, match=words):
        optimizer.add_param_group(group(seen))


def test_state_is_not_handed_out_in_parts():
    optimizer, own, _, _ = shared()
    with pytest.raises(ConfigError, match=r"optimizer\.state_dict\(\) was called after run\.prepare"):
        optimizer.state_dict()
    with pytest.raises(ConfigError, match=r"optimizer\.load_state_dict\(\) was called"):
        optimizer.load_state_dict(own.state_dict())


def test_state_takes_the_rows_of_a_whole_tensor():
    optimizer, own, seen, held = shared(shares_all=True)
    momentum = own.state[held["weight"]]["momentum_buffer"] = torch.ones(1, 3)
    optimizer.state[seen["weight"]]["momentum_buffer"].mul_(torch.tensor([[1.0, 2, 3], [4, 5, 6]]))
    assert momentum.tolist() == [[1.0, 2, 3]]
    optimizer.state[seen["weight"]]["momentum_buffer"].copy_(torch.tensor([[7.0, 8, 9], [4, 5, 6]]))
    assert momentum.tolist() == [[7.0, 8, 9]]
