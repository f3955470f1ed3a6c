"""Random numbers of a model depend on where they are drawn, never on what was drawn before."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.models import digits_net, transformer
from lockstep.numerics.randomness import KeyedRandomness, find_units

CPU = torch.device("cpu")
ONES = torch.ones(16, 8)


class Mask(nn.Module):
    """Gives the random numbers it draws, and notes them."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def forward(self, x):
        self.drawn.append(torch.rand(4))
        return x


class Rude(nn.Module):
    """Draws as much as it was told to, as code of another version might."""

    def __init__(self, draws):
        super().__init__()
        self.draws = draws

    def forward(self, x):
        torch.rand(self.draws)
        return x


class Around(nn.Module):
    """Draws before, between and after its children."""

    def __init__(self, *children):
        super().__init__()
        self.inner = nn.ModuleList(children)
        self.drawn = []

    def forward(self, x):
        self.drawn.append(torch.rand(4))
        for child in self.inner:
            x = child(x)
            self.drawn.append(torch.rand(4))
        return x


def forward(model, x=ONES, *, step=3, k=1, seed=0):
    randomness = KeyedRandomness(model, seed, CPU)
    randomness.begin_micro_batch(step, k)
    try:
        return model(x)
    finally:
        randomness.remove()


def same(first, second):
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def watched(model):
    randomness = KeyedRandomness(model, 0, CPU)
    found = {name for name, module in model.named_modules() if module._forward_pre_hooks}
    randomness.remove()
    return found


@pytest.mark.parametrize("before", [0, 1, 1000])
def test_a_unit_draws_the_same_whatever_the_units_before_it_drew(before):
    masks = [Mask(), Mask()]
    forward(nn.Sequential(Rude(5), masks[0]))
    forward(nn.Sequential(Rude(before), masks[1]))
    assert same(masks[0].drawn, masks[1].drawn)


def test_a_unit_draws_the_same_when_it_is_run_alone_as_a_later_stage_would():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Sequential(Mask(), nn.Dropout()), Mask())
    forward(model)
    expected = [model[2][0].drawn.pop(), model[3].drawn.pop()]
    randomness = KeyedRandomness(model, 0, CPU)
    randomness.begin_micro_batch(3, 1)
    model[3](model[2](ONES))
    assert same([model[2][0].drawn.pop(), model[3].drawn.pop()], expected)
    randomness.remove()


def test_the_parent_s_own_draws_do_not_depend_on_what_its_children_draw():
    models = [Around(Rude(count), Rude(2 * count), nn.Linear(8, 8)) for count in (1, 50)]
    for model in models:
        forward(model)
    assert same(models[0].drawn, models[1].drawn)
    assert len({tuple(drawn.tolist()) for drawn in models[0].drawn}) == 4


def test_seed_step_micro_batch_unit_and_call_all_change_the_numbers():
    shared = Mask()
    model = nn.Sequential(shared, Mask(), shared)
    for options in ({}, {"seed": 1}, {"step": 4}, {"k": 2}):
        forward(model, **options)
    drawn = shared.drawn + model[1].drawn
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == len(drawn) == 12


def test_calls_are_counted_anew_in_each_micro_batch():
    mask = Mask()
    model = nn.Sequential(mask, mask)
    forward(model, k=1)
    forward(model, k=2)
    forward(model, k=1)
    assert same(mask.drawn[:2], mask.drawn[4:]) and not same(mask.drawn[:2], mask.drawn[2:4])


def test_nested_containers_of_every_kind_are_units():
    model = nn.ModuleDict(
        {
            "list": nn.ModuleList([nn.Sequential(nn.Dropout(), nn.Linear(2, 2))]),
            "block": Around(Mask(), nn.ModuleDict({"x": Mask()})),
            "plain": nn.TransformerEncoderLayer(8, 2),
        }
    )
    assert set(find_units(model)) == {
        "",
        "list",
        "list.0",
        "list.0.0",
        "list.0.1",
        "block",
        "block.inner",
        "block.inner.0",
        "block.inner.1",
        "block.inner.1.x",
        "plain",
    }


def test_a_module_used_under_two_names_is_one_unit():
    mask = Mask()
    model = nn.Sequential(nn.Sequential(mask), nn.Sequential(mask))
    assert set(find_units(model)) == {"", "0", "0.0", "1"}
    forward(model)
    assert not same(mask.drawn[:1], mask.drawn[1:])


def test_the_usual_models_watch_their_dropouts_only():
    model = digits_net()
    assert watched(model) == {
        "",
        *(name for name, module in model.named_modules() if isinstance(module, nn.Dropout)),
    }
    assert watched(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.BatchNorm1d(2))) == set()


def test_a_subclass_of_a_silent_layer_may_draw():
    class NoisyLinear(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.randn(self.out_features)

    assert watched(nn.Sequential(NoisyLinear(2, 2))) == {"", "0"}


def test_functional_dropout_in_a_parent_s_own_forward_is_keyed():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))

        def forward(self, x):
            return F.dropout(self.body(F.dropout(x, 0.5)), 0.5)

    torch.manual_seed(0)
    block = Block()
    torch.manual_seed(1)
    first = forward(block)
    torch.manual_seed(2)
    assert torch.equal(forward(block), first)
    assert not torch.equal(forward(block, k=0), first)


def test_draws_around_the_model_and_in_the_loss_are_keyed_by_the_micro_batch():
    """The user's own forward and loss function may draw too: mixup, noise on the input, sampled softmax."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    drawn = []
    for noise in (0, 10):
        randomness = KeyedRandomness(model, 0, CPU)
        torch.rand(noise)
        randomness.begin_micro_batch(2, 3)
        drawn.append(torch.rand(3))
        model(ONES)
        drawn.append(torch.rand(3))
        randomness.begin_loss()
        drawn.append(torch.rand(3))
        model[1](ONES)
        drawn.append(torch.rand(3))
        randomness.remove()
    assert same(drawn[:4], drawn[4:])
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == 4


def test_a_micro_batch_that_is_left_anywhere_draws_on_as_if_no_other_had_come():
    model, alone, together = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), {}, {}
    randomness = KeyedRandomness(model, 0, CPU)
    randomness.key_global_generators()
    resume, found = {}, {1: [], 2: []}

    def draws():
        return [model(ONES), torch.rand(3), torch.tensor(random.random()), torch.tensor(np.random.rand())]

    for k in (1, 2):
        randomness.begin_micro_batch(0, k)
        alone[k] = [*draws(), *draws()]
    for k in (1, 2):
        randomness.begin_micro_batch(0, k)
        found[k] += draws()
        resume[k] = randomness.pause()
    for k in (1, 2):
        resume[k]()
        together[k] = [*found[k], *draws()]
    randomness.remove()
    assert all(same(alone[k], together[k]) for k in (1, 2))


def test_a_model_called_twice_in_one_forward_has_two_masks():
    model = nn.Sequential(nn.Dropout(0.5))
    randomness = KeyedRandomness(model, 0, CPU)
    randomness.begin_micro_batch(0, 0)
    first, second = model(ONES), model(ONES)
    randomness.begin_loss()
    third = model(ONES)
    assert not torch.equal(first, second) and not torch.equal(second, third) and not torch.equal(first, third)
    randomness.remove()


def test_after_a_step_every_rank_has_the_same_stream():
    model = nn.Sequential(nn.Dropout(0.5))
    numbers = []
    for micro_batches in ([0, 1], [2], []):
        randomness = KeyedRandomness(model, 0, CPU)
        for k in micro_batches:
            randomness.begin_micro_batch(5, k)
            model(ONES)
        randomness.end_step(5)
        numbers.append(torch.rand(3))
        model(ONES)
        randomness.remove()
    assert same(numbers[:1], numbers[1:2]) and same(numbers[:1], numbers[2:])


def test_without_a_micro_batch_nothing_is_seeded():
    model = nn.Sequential(Mask())
    randomness = KeyedRandomness(model, 0, CPU)
    torch.manual_seed(11)
    model(ONES)
    torch.manual_seed(11)
    assert torch.equal(model[0].drawn[0], torch.rand(4))
    randomness.remove()


def test_removed_hooks_leave_the_model_as_it_was():
    model = transformer(vocabulary_size=5, width=8, depth=1)
    KeyedRandomness(model, 0, CPU).remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(module._forward_hooks_always_called for module in model.modules())


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        raise ArithmeticError("no")


class Catching(nn.Module):
    """Goes on after a child has failed."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([Failing()])
        self.drawn = []

    def forward(self, x):
        for _ in range(2):
            try:
                self.inner[0](x)
            except ArithmeticError:
                self.drawn.append(torch.rand(4))
        return x


def test_an_exception_leaves_no_unit_entered():
    model = nn.Sequential(Catching())
    randomness = KeyedRandomness(model, 0, CPU)
    randomness.begin_micro_batch(0, 0)
    model(ONES)
    assert [frame.unit for frame in randomness._frames] == ["<forward>"]
    randomness.remove()
    assert not same(model[0].drawn[:1], model[0].drawn[1:])


def test_a_forward_that_failed_does_not_change_the_next():
    mask = Mask()
    good, bad = nn.Sequential(mask), nn.Sequential(nn.Sequential(Failing()), mask)
    forward(good)
    randomness = KeyedRandomness(bad, 0, CPU)
    randomness.begin_micro_batch(3, 1)
    with pytest.raises(ArithmeticError):
        bad(ONES)
    randomness.remove()
    forward(good)
    assert same(mask.drawn[:1], mask.drawn[1:])
