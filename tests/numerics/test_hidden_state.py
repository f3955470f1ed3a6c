"""A snapshot finds what objects keep, tells what changed, and puts everything back."""

import functools
import random
from collections import OrderedDict, defaultdict, deque
from functools import partial
from random import gauss, getstate
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.numerics.hidden_state import Kind, Snapshot, draws_globally, evaluating

TOTAL = 0
HISTORY = []


class Meter:
    count = 0

    def __init__(self):
        self.sum, self.values = 0.0, []

    def add(self, value):
        self.sum += value
        self.values.append(value)
        Meter.count += 1


class Slotted:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 0


def function_of_everything():
    meter, slotted, number, table = Meter(), Slotted(), 0, defaultdict(int)
    window, tensor, array = deque(maxlen=3), torch.zeros(3), np.zeros(3)
    generators = torch.Generator(), np.random.default_rng(0), random.Random(0), np.random.RandomState(0)
    names = {"a"}

    def step(*, given=[]):  # noqa: B006 - a default that is kept from call to call
        global TOTAL
        nonlocal number
        TOTAL += 1
        HISTORY.append(TOTAL)
        number += 1
        meter.add(2.0)
        slotted.value += 1
        table["x"] += 1
        window.append(number)
        tensor.add_(1)
        array[0] += 1
        given.append(1)
        names.add(str(number))
        step.calls = getattr(step, "calls", 0) + 1
        torch.rand(1, generator=generators[0])
        for each in generators[1:]:
            each.random() if hasattr(each, "random") else each.rand()
        return (meter, slotted, table, window, tensor, array, given, names, number, generators)

    return step


def test_everything_that_a_function_keeps_is_found_and_put_back():
    step = function_of_everything()
    step()
    before = Snapshot({"f": step})
    for _ in range(3):
        step()
    later = Snapshot({"f": step}, restorable=False)
    changed = before.changed(later)
    expected = {
        "the variable 'number' of f": ("1", "4"),
        "the attribute 'sum' of the variable 'meter' of f": ("2.0", "8.0"),
        "the class attribute 'count' of Meter": ("1", "4"),
        "the attribute 'value' of the variable 'slotted' of f": ("1", "4"),
        "the variable 'table' of f['x']": ("1", "4"),
        "the global variable 'TOTAL'": ("1", "4"),
        "the global variable 'HISTORY'": ("1 entries", "4 entries"),
        "the variable 'window' of f": ("1 entries", "3 entries"),
        "the attribute 'calls' of f": ("1", "4"),
    }
    assert expected.items() <= changed.items()
    for name in ("tensor", "array", "names"):
        assert f"the variable {name!r} of f" in changed
    drawn = [name for name in changed if later.kinds[name] is Kind.GENERATOR]
    assert len(drawn) == 4
    before.restore()
    assert not before.changed(Snapshot({"f": step}, restorable=False))
    meter, slotted, table, window, tensor, array, given, names, number, _ = step()
    assert (meter.sum, meter.values, Meter.count, slotted.value, table["x"]) == (4.0, [2.0, 2.0], 2, 2, 2)
    assert (list(window), tensor.tolist(), array[0], given, number) == ([1, 2], [2] * 3, 2, [1, 1], 2)
    assert (names, step.calls, TOTAL, HISTORY) == ({"a", "1", "2"}, 2, 2, [1, 2])


@pytest.mark.parametrize("length", range(1, 9))
def test_values_are_put_into_a_list_that_gets_shorter(length):
    """The list was shortened first, or its entries were set first, as the hashes of their names had it."""
    now = [0] * length
    later = Snapshot({"the list": now})
    later.put({"the list": [], **{f"the list[{place}]": 1 for place in range(length)}})
    assert now == []


@pytest.mark.parametrize("changed", [0, 1])
def test_two_classes_of_one_name_are_told_apart(changed):
    """The attributes of the one were noted under the name of the other."""

    class Rates:
        scale = 1.0

    one = Rates

    class Rates:
        __qualname__ = "Other.Rates"
        scale = 1.0

    both = one, Rates
    before = Snapshot({"f": lambda: both})
    both[changed].scale = 2.0
    (said,) = before.changed(Snapshot({"f": lambda: both}, restorable=False)).items()
    assert "the class attribute 'scale' of " in said[0]
    assert said[1] == ("1.0", "2.0")
    before.restore()
    assert both[changed].scale == 1.0


@pytest.mark.parametrize("changed", [0, 1])
def test_globals_of_two_modules_with_one_name_are_told_apart(changed):
    spaces = [{"__name__": name, "rate": 1.0} for name in ("one", "other")]
    both = [eval("lambda: rate", space) for space in spaces]

    def root():
        return both[0]() + both[1]()

    before = Snapshot({"f": root})
    spaces[changed]["rate"] = 2.0
    (said,) = before.changed(Snapshot({"f": root}, restorable=False)).items()
    assert "the global variable 'rate'" in said[0]
    assert said[1] == ("1.0", "2.0")


@pytest.mark.parametrize("changed", [0, 1])
def test_entries_whose_keys_are_pairs_are_told_apart(changed):
    """Only the last one was looked at, so a model that counted under another key was trained without a word."""
    counts = {("low", 0): 0, ("high", 1): 0}
    before = Snapshot({"": lambda: counts})
    counts[[*counts][changed]] += 1
    after = Snapshot({"": lambda: counts})
    assert [*before.changed(after).values()] == [("0", "1")]
    before.restore()
    assert [*counts.values()] == [0, 0]


@pytest.mark.parametrize("base", [OrderedDict, dict])
def test_a_table_that_makes_its_entries_is_put_back_as_it_was(base):
    """As tables of activations do."""
    table = type("Registry", (base,), {"__getitem__": lambda self, key: base.__getitem__(self, key)()})()
    base.__setitem__(table, "relu", nn.ReLU)
    base.__setitem__(table, "gelu", nn.GELU)

    def function():
        return table["relu"]

    before = Snapshot({"f": function})
    before.restore()
    assert [*base.items(table)] == [("relu", nn.ReLU), ("gelu", nn.GELU)]
    table["tanh"] = base.pop(table, "gelu")
    before.restore()
    assert [*base.items(table)] == [("relu", nn.ReLU), ("gelu", nn.GELU)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls, self.cache = nn.Linear(2, 2), 0, None

    def forward(self, x):
        self.calls += 1
        self.cache = x
        self.late = 1
        return self.inner(x)


def test_attributes_of_modules_have_their_names_and_parameters_are_left_alone():
    model = nn.Sequential(Block(), nn.Sequential(Block()))
    before = Snapshot({"": model})
    model(torch.ones(1, 2))
    with torch.no_grad():
        model[0].inner.weight.add_(1)
    changed = before.changed(Snapshot({"": model}, restorable=False))
    assert changed["the attribute 'calls' of 1.0"] == ("0", "1")
    assert changed["the attribute 'late' of 0"] == ("nothing", "1")
    assert not any("weight" in name for name in changed)
    before.restore()
    assert (model[0].calls, model[0].cache, hasattr(model[1][0], "late")) == (0, None, False)


def test_what_a_hook_keeps_on_a_parameter_is_found_and_taken_away():
    """As the gradients of single samples that Opacus and BackPACK leave there."""
    layer = nn.Linear(2, 2)
    layer.bias.seen = 1
    before = Snapshot({"": nn.Sequential(layer)})
    layer.weight.grad_sample, layer.bias.seen = torch.ones(3, 2, 2), 2
    changed = before.changed(Snapshot({"": nn.Sequential(layer)}, restorable=False))
    assert changed["the attribute 'seen' of the parameter 'bias' of 0"] == ("1", "2")
    assert changed["the attribute 'grad_sample' of the parameter 'weight' of 0"][0] == "nothing"
    before.restore()
    assert (layer.bias.seen, vars(layer.weight)) == (1, {})


COUNTS = {"steps": 0}


@torch.no_grad()
def counted():
    COUNTS["steps"] += 1


def test_what_a_decorated_function_names_is_found_and_put_back():
    before = Snapshot({"the loss": counted})
    counted()
    changed = before.changed(Snapshot({"the loss": counted}, restorable=False))
    assert changed == {"the global variable 'COUNTS'['steps']": ("0", "1")}
    before.restore()
    assert COUNTS == {"steps": 0}


def test_what_a_hook_of_several_gradients_keeps_is_found_and_put_back():
    """Nothing was said of the list, and it held what the rehearsals had added, too."""
    model, norms = nn.Linear(2, 2), []

    def note(gradients):
        norms.append(float(gradients[0].norm()))

    torch.autograd.graph.register_multi_grad_hook([*model.parameters()], note)
    before = Snapshot({"": model})
    model(torch.ones(1, 2)).sum().backward()
    changed = before.changed(Snapshot({"": model}, restorable=False))
    assert changed["the variable 'norms' of a hook of the model"] == ("0 entries", "1 entries"), changed
    before.restore()
    assert norms == []


class Curvature(torch.optim.Optimizer):
    def __init__(self, model):
        super().__init__(model.parameters(), {})
        self.factors = {}
        model.register_forward_pre_hook(self.keep)

    def keep(self, module, inputs):
        self.factors[module] = self.state[module]["factor"] = inputs[0].T @ inputs[0]


def test_what_a_hook_keeps_in_its_optimizer_is_found_and_put_back():
    """K-FAC took the factors of one process's micro-batches, and of those of the rehearsals, without a word."""
    model = nn.Linear(2, 2)
    optimizer = Curvature(model)
    before = Snapshot({"": model})
    model(torch.ones(1, 2))
    changed = before.changed(Snapshot({"": model}, restorable=False))
    assert [name for name in changed if "'factors'" in name] and [name for name in changed if "'state'" in name]
    assert not [name for name in changed if "param_groups" in name]
    before.restore()
    assert (optimizer.factors, dict(optimizer.state)) == ({}, {})


def counting_calls(function):
    calls = 0

    @functools.wraps(function)
    def wrapper():
        nonlocal calls
        calls += 1
        return function()

    return wrapper


def test_what_a_decorator_of_the_users_own_counts_is_found_beside_what_the_function_names():
    function = counting_calls(counted)
    before = Snapshot({"the loss": function})
    function()
    changed = before.changed(Snapshot({"the loss": function}, restorable=False))
    assert set(changed.values()) == {("0", "1")} and len(changed) == 2
    before.restore()
    assert COUNTS == {"steps": 0}


def test_two_names_that_change_places_are_seen():
    owner = Meter()
    owner.one, owner.other = torch.zeros(2), torch.ones(2)
    before = Snapshot({"f": partial(print, owner)})
    owner.one, owner.other = owner.other, owner.one
    assert before.changed(Snapshot({"f": partial(print, owner)}, restorable=False))
    before.restore()
    assert owner.one.sum() == 0


def names_numpy(x):
    return x * np.random.rand()


def names_random(x):
    return x if random.random() < 0.5 else -x


def calls_another(x):
    return names_numpy(x)


def draws_nothing(x):
    return np.sqrt(x)


class DrawsInMethod(nn.Module):
    def forward(self, x):
        return self.noisy(x)

    def noisy(self, x):
        return x + random.gauss(0, 1)


def names_a_method(x):
    return x + gauss(0, 1)


def takes_the_state(x):
    return getstate() and x


def holds_numpys(x, generator=np.random.mtrand._rand):
    return x + generator.rand()


def test_the_global_generators_are_no_state_that_a_function_keeps():
    """They are seeded for each micro-batch, by whatever name they are drawn from."""
    for function in (names_a_method, takes_the_state, holds_numpys):
        found = Snapshot({"f": function, "torch": torch.default_generator}, restorable=False)
        assert found.draws_globally
        assert Kind.GENERATOR not in found.kinds.values()


@pytest.mark.parametrize(
    "root",
    [names_numpy, names_random, names_a_method, calls_another, DrawsInMethod(), lambda x: names_random(x)],
)
def test_code_that_names_a_global_generator_is_found(root):
    assert draws_globally(root)


@pytest.mark.parametrize("root", [draws_nothing, nn.Linear(2, 2), nn.Dropout(), nn.functional.cross_entropy, None])
def test_other_code_draws_nothing(root):
    assert not draws_globally(root)


class Bag(list):
    pass


def bag():
    made = Bag([1])
    made.level = 0
    return made


def objects():
    made = np.empty(2, object)
    made[:] = [1], Meter()
    return made


def raise_level(held):
    held.level = 1


# Each was looked into by other parts of Lockstep, and not by snapshots.
RICHER = {
    "an attribute of a list": (bag, raise_level),
    "an entry of a long list": (lambda: [0] * 2_000, lambda held: held.__setitem__(1_500, 1)),
    "an array of objects": (objects, lambda held: held[0].append(2)),
    "an object in an array": (objects, lambda held: held[1].add(1.0)),
    "the list of a method": (lambda: [].append, lambda held: held(1)),
    "an attribute of a partial": (lambda: partial(print), raise_level),
    "a mask": (lambda: np.ma.MaskedArray([1.0, 2.0], [0, 0]), lambda held: held.__setitem__(0, np.ma.masked)),
    "an object in a set": (lambda: {Meter()}, lambda held: next(iter(held)).add(1.0)),
    "a function in a tuple": (lambda: [(draws_nothing,)], lambda held: held.__setitem__(0, (calls_another,))),
}


@pytest.mark.parametrize("name", RICHER)
def test_what_others_look_into_snapshots_look_into(name):
    make, change = RICHER[name]
    held = make()
    before = Snapshot({"f": lambda: held})
    change(held)
    assert before.changed(Snapshot({"f": lambda: held}, restorable=False))
    before.restore()
    assert not before.changed(Snapshot({"f": lambda: held}, restorable=False))


def test_tables_of_pandas_are_compared():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"level": [0, 0]})
    before = Snapshot({"f": lambda: table}, restorable=False)
    table.loc[1, "level"] = 1
    assert before.changed(Snapshot({"f": lambda: table}, restorable=False))


def test_a_table_that_a_class_has_is_another_one_and_is_put_back():
    class Recurrent:
        memory = (0.0,)

        def step(self):
            type(self).memory = (1.0,)

    held = Recurrent()
    before = Snapshot({"f": held.step})
    held.step()
    assert before.changed(Snapshot({"f": held.step}, restorable=False))
    before.restore()
    assert Recurrent.memory == (0.0,)


def test_two_functions_name_other_attributes_of_one_module():
    """The attribute of the second was skipped, since the module had been looked at for the first."""
    settings = ModuleType("settings_of_a_test")
    settings.rate, settings.scale = 0, 0
    one, other = (eval(f"lambda: settings.{name}", {"settings": settings}) for name in ("rate", "scale"))
    before = Snapshot({"one": one, "other": other})
    settings.scale = 1
    (said,) = before.changed(Snapshot({"one": one, "other": other}, restorable=False))
    assert said == "the global variable 'scale'"


def reads_history():
    return len(HISTORY)


def clears_history():
    HISTORY.clear()


def test_a_change_of_a_global_that_two_functions_name_is_seen():
    """The text of the second find, as of another name, stood in the place of the first."""
    roots = {"the loss": reads_history, "a hook": clears_history}
    HISTORY.clear()
    before = Snapshot(roots)
    HISTORY.append(1)
    assert "the global variable 'HISTORY'" in before.changed(Snapshot(roots))
    HISTORY.clear()


def clear():
    HISTORY.clear()


def test_an_attribute_by_the_name_of_a_function_of_the_script_is_not_that_function():
    """As ``train`` of a model beside a script's own: it was said to read what the script's function names."""
    found = Snapshot({"the loss": lambda table: table.clear()})
    assert "the global variable 'HISTORY'" not in found.texts


class Dropped(nn.Linear):
    """A layer that sets an attribute to its weight in evaluation mode, as WeightDrop of AWD-LSTM does."""

    def forward(self, x):
        self.dropped = nn.functional.dropout(self.weight, training=self.training)
        return nn.functional.linear(x, self.dropped)


def test_a_parameter_that_a_forward_pass_in_evaluation_mode_registers_is_taken_out():
    """The look at the outputs in evaluation mode registered it, and the step ended in a TypeError."""
    model = nn.Sequential(Dropped(3, 3), nn.BatchNorm1d(3).eval())
    for _ in range(2):
        model(torch.ones(2, 3))
        with evaluating(model):
            model(torch.ones(2, 3))
    assert [*dict(model.named_parameters())] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert model[0].training and not model[1].training
