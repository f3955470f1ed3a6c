"""The variables that a loss can read are found from its code, and a change of one is refused."""

import argparse
import collections
import contextvars
import multiprocessing
import queue
import re
import types
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.run.metrics import LossEntries
from lockstep.run.step import with_exact_mean
from lockstep.strategies.pipeline.loss_reads import LossReads, StagesRead

KEPT = {}
ONES = torch.ones(3)


def of_global(output, target):
    return output + KEPT["x"]


class Owner:
    def __init__(self):
        self.used, self.unused, self.nested = [], [], types.SimpleNamespace(count=0)

    def helper(self):
        return self.nested.count

    def loss(self, output, target):
        return output * len(self.used) + self.helper()


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen, self.other = {}, {}
        self.register_buffer("scale", torch.ones(1))

    def forward(self, output, target):
        return output * self.scale + self.seen.get("x", 0)


def changes(loss, change):
    """The name in the message with which a change is refused."""
    reads = LossReads(loss)
    change()
    try:
        reads.require_unchanged("2")
    except ConfigError as error:
        return re.match(r"The loss reads (['\"])(.*?)\1, which", str(error))[2]
    return None


def test_a_global_dictionary():
    assert changes(of_global, lambda: KEPT.update(x=ONES)) == "KEPT"
    assert changes(of_global, lambda: KEPT.update(x=ONES + 1)) == "KEPT['x']"
    assert changes(of_global, lambda: KEPT["x"].add_(1)) == "KEPT['x']"
    assert changes(of_global, lambda: None) is None


def test_a_closure_a_variable_of_it_and_an_argument():
    kept, last = [], None

    def loss(output, target):
        return output + sum(kept) + (last or 0)

    def rebind():
        nonlocal last
        last = ONES

    assert changes(loss, lambda: kept.append(ONES)) == "kept"
    assert changes(loss, rebind) == "last"
    assert changes(partial(lambda found, output, target: output + found[0], kept), lambda: kept.append(ONES)) == "[0]"
    assert changes(lambda output, target, found=kept: found, lambda: kept.append(1)) == "found"
    assert changes(lambda output, target: (lambda: kept)(), lambda: kept.append(1)) == "kept"


def test_attributes_that_the_code_mentions():
    owner = Owner()
    assert changes(owner.loss, lambda: owner.used.append(ONES)) == "self.used"
    assert changes(owner.loss, lambda: setattr(owner.nested, "count", 2)) == "self.nested.count"
    assert changes(owner.loss, lambda: owner.unused.append(ONES)) is None
    assert changes(lambda output, target: owner.loss(output, target), lambda: owner.used.append(1)) == "owner.used"


def test_a_loss_module():
    criterion = Criterion()
    assert changes(criterion, lambda: criterion.seen.update(x=1)) == "seen"
    assert changes(criterion, lambda: criterion.scale.mul_(2)) == "scale"
    assert changes(criterion, lambda: criterion.other.update(x=1)) is None
    entries = LossEntries(criterion, ["loss"])  # as with also= of run.backward
    assert changes(entries, lambda: criterion.seen.update(x=2)) == "seen['x']"
    wrapped = with_exact_mean(nn.CrossEntropyLoss())
    assert changes(wrapped, lambda: KEPT.clear()) is None


def test_modules_that_the_loss_goes_over():
    """As one that adds up what the modules of a mixture of experts keep: it had the part of the last stage."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    model[0].aux = model[1][0].aux = 0.0

    def over_all(output, target):
        return sum(each.aux for each in model.modules() if hasattr(each, "aux"))

    def by_name(output, target):
        return sum(getattr(each, "aux", 0.0) for each in model)

    for loss in (over_all, by_name, lambda output, target: model[1][0].aux):
        assert changes(loss, lambda: setattr(model[1][0], "aux", model[1][0].aux + 1.0)) == "model.1.0.aux"
        assert changes(loss, lambda: setattr(model[0], "unread", 1.0)) is None


@dataclass(slots=True)
class Slotted:
    total: float = 1.0
    other: float = 1.0


class Rated:
    rate = 1.0

    def __init__(self):
        self._scale, self.other = 1.0, 1.0

    @property
    def scale(self):
        return self._scale


class Bag(list):
    rate = 1.0


def noted():
    return noted.total


CONTEXT = contextvars.ContextVar("context")
SHARED = types.ModuleType("shared_notes")
FIRST = np.array([1.0, None], dtype=object)
PROXY = types.MappingProxyType({"x": [1.0]})


@pytest.mark.parametrize(
    ("held", "read", "change", "name"),
    [
        (Slotted(), lambda held: held.total, lambda held: setattr(held, "total", 2.0), "held.total"),
        (Slotted(), lambda held: held.total, lambda held: setattr(held, "other", 2.0), None),
        ({"x": Slotted()}, lambda h: h["x"].total, lambda h: setattr(h["x"], "total", 2.0), "held['x'].total"),
        (Rated(), lambda held: held.rate, lambda held: setattr(Rated, "rate", 2.0), "Rated.rate"),
        (Rated, lambda held: held.rate, lambda held: setattr(Rated, "rate", 3.0), "Rated.rate"),
        (Rated(), lambda held: held.scale, lambda held: setattr(held, "_scale", 2.0), "held._scale"),
        (Rated(), lambda held: held.scale, lambda held: setattr(held, "other", 2.0), None),
        (Bag([1.0]), lambda held: held.rate, lambda held: setattr(held, "rate", 2.0), "held.rate"),
        (np.zeros(2), lambda held: held[0], lambda held: held.__setitem__(1, 2.0), "held"),
        (FIRST, lambda held: held[0], lambda held: held.__setitem__(0, 2.0), "held"),
        (PROXY, lambda held: held["x"][0], lambda held: held["x"].__setitem__(0, 2.0), "held['x'][0]"),
        (collections.UserDict(x=1.0), lambda h: h["x"], lambda h: h.update(x=2.0), "held.data['x']"),
        (multiprocessing.Value("d", 1.0), lambda h: h.value, lambda h: setattr(h, "value", 2.0), "held._obj"),
        (queue.SimpleQueue(), lambda held: held.empty(), lambda held: None, None),
        (queue.Queue(), lambda held: held.get(), lambda held: held.put(2.0), "held.queue"),
        (argparse.Namespace(x=1, y=1), lambda held: held.x, lambda held: setattr(held, "y", 2), None),
        (CONTEXT, lambda held: held.get(), lambda held: held.set(2.0), "held"),
        (bytearray(b"a"), lambda held: held[0], lambda held: held.__setitem__(0, 2), "held"),
        (noted, lambda held: held(), lambda held: setattr(held, "total", 2.0), "held.total"),
        (types.SimpleNamespace(x=1, y=1), lambda held: held.x, lambda held: setattr(held, "y", 2), None),
        (None, lambda held: SHARED.total, lambda held: setattr(SHARED, "total", 2.0), "shared_notes.total"),
        (None, lambda held: SHARED.total, lambda held: setattr(SHARED, "other", 2.0), None),
    ],
)
def test_all_that_can_hold_a_value_is_looked_into(held, read, change, name):
    """A loss that read a slot, an attribute of a class, an array or another module's global had the first value."""
    noted.total = SHARED.total = SHARED.other = 1.0
    CONTEXT.set(1.0)

    def loss(output, target):
        return output * read(held)

    assert changes(loss, lambda: change(held)) == name


def test_an_object_that_holds_itself_ends():
    loop = {}
    loop["loop"] = loop
    assert changes(lambda output, target: loop, lambda: None) is None


def test_the_sentence_names_the_stage_and_the_remedy():
    reads = LossReads(of_global)
    KEPT["y"] = 1
    with pytest.raises(ConfigError, match=r"The loss reads 'KEPT'.*begins with 'layer2.0'.*strategy 'ddp' or 'fsdp'"):
        reads.require_unchanged("layer2.0")


class Gated(nn.Module):
    """Reads what another module of the model sets."""

    def __init__(self, shared):
        super().__init__()
        self.shared, self.own = shared, {}

    def forward(self, x):
        return x * self.shared.gate


def test_what_modules_of_another_stage_can_read_is_refused_where_it_changes():
    shared, notes = types.SimpleNamespace(gate=1.0, unread=[]), {}
    module = Gated(shared)
    module.register_forward_hook(lambda module, given, found: notes.setdefault("x", found))
    reads = StagesRead({"3": module})
    notes["y"] = 1  # by a hook, for the loop
    reads.require_unchanged("0")
    shared.gate = torch.ones(2)
    said = r"changes the attribute 'gate' of the attribute 'shared' of 3 in the stage that begins with '0'.*in a tuple"
    with pytest.raises(ConfigError, match=said):
        reads.require_unchanged("0")


def test_what_a_hook_of_another_stage_reads_by_name_is_refused_where_it_changes():
    kept, module, holder = {"scale": 1.0}, nn.ReLU(), types.SimpleNamespace(scale=1.0)
    module.register_forward_hook(lambda module, given, found: found * kept["scale"] * holder.scale)
    for change, name in (
        (lambda: kept.update(scale=2.0), "kept"),
        (lambda: setattr(holder, "scale", 2.0), "holder"),
    ):
        reads = StagesRead({"3": module})
        reads.require_unchanged("0")
        change()
        with pytest.raises(ConfigError, match=f"changes 'scale' of '{name}' in the stage that begins with '0'"):
            reads.require_unchanged("0")


def test_hooks_of_other_stages_may_keep_something_for_the_loop():
    kept, module, name = {"last": 0, "calls": 0, "0": 1}, nn.ReLU(), "3"

    def keep(module, given, found):
        kept["last"] = found
        kept["calls"] += 1
        kept[name] = found

    def keep_and_give(module, given, found):
        kept["last"] = kept[name] = found
        return found * 2

    module.register_forward_hook(keep)
    module.register_forward_hook(keep_and_give)
    holder = types.SimpleNamespace(seen=[], last=0)
    module.register_forward_hook(lambda module, given, found: kept.update({name: found}))
    module.register_forward_hook(lambda module, given, found: holder.seen.append(found))
    module.register_forward_hook(lambda module, given, found: setattr(holder, "last", found))
    reads = StagesRead({"3": module})
    kept.update({"last": 1, "0": 2, "calls": 1, "1": 3})
    holder.seen.append(1)
    holder.last = 1
    reads.require_unchanged("0")


class Scale:
    """Hooks that are methods, and an object that is a hook."""

    def __init__(self, kept):
        self.kept, self.factor, self.seen, self.calls = kept, 1.0, [], 0

    def keep(self, name, module, given, found):
        self.seen.append(found)
        self.calls += 1

    def use(self, module, given, found):
        return self.scaled(found)

    def scaled(self, found):
        return found * self.factor

    def __call__(self, gradient):
        return gradient * self.kept["scale"]


def by_partial(kept, key, module, given, found):
    return found * kept[key]


def inner_hook(kept):
    def hook(module, given, found):
        found.register_hook(lambda gradient: gradient * kept["scale"])

    return hook


def in_place(kept):
    def hook(parameter):
        parameter.grad.mul_(kept["scale"])

    return hook


def changed_by(register, change):
    """The words for what another stage's hook reads and a pass here changes; None where that is nothing."""
    module = nn.Linear(2, 2)
    register(module)
    reads = StagesRead({"3": module})
    change()
    try:
        reads.require_unchanged("0")
    except ConfigError as error:
        return re.match("A hook, a module's forward or the loss changes (.*) in the stage", str(error))[1]
    return None


def test_hooks_that_are_methods_objects_or_partial_and_those_of_gradients_are_looked_at():
    kept, skips = {"scale": 1.0}, []
    scale = Scale(kept)
    rescale, grow = lambda: kept.update(scale=kept["scale"] + 1), lambda: setattr(scale, "factor", 2.0)
    assert changed_by(lambda m: m.register_forward_hook(scale.use), grow) == "'factor' of 'self'"
    for register, name in (
        (lambda m: m.weight.register_hook(scale), "'kept' of 'self'"),
        (lambda m: m.register_forward_hook(partial(by_partial, kept, "scale")), "'kept'"),
        (lambda m: m.register_forward_hook(inner_hook(kept)), "'kept'"),
        (lambda m: m.bias.register_post_accumulate_grad_hook(in_place(kept)), "'kept'"),
        (lambda m: m.register_full_backward_hook(lambda m, g, o: (g[0] * kept["scale"],)), "'kept'"),
    ):
        assert changed_by(register, rescale) == f"'scale' of {name}"

    def pop(module, given, found):
        return found + skips.pop()

    assert changed_by(lambda m: m.register_forward_hook(pop), lambda: skips.append(1)) == "the variable 'skips'"


HOOKS = """
def whole(module, given, found):
    found[:] = found * kept["scale"]
def masked(module, given, found):
    found[found > 0] *= kept["scale"]
def first(module, given):
    given[0][..., 0] = kept["scale"]
def through_data(module, given, found):
    found.data[:, index] = kept["scale"]
def loaded_with_its_value(module, given, found):
    scale = kept["scale"]
    found[:1] = scale
def into(module, given, found):
    torch.mul(found, kept["scale"], out=found)
def scaled(found, key):
    found[0] = found[0] * kept[key]
def by_another(module, given, found):
    scaled(found, "scale")
def note(module, given, found):
    notes["scale"], notes[index], module.notes[index] = found, kept["scale"], found
def noted(notes, found):
    notes[index] = notes["x"] = (found, kept["scale"])
def note_by_another(module, given, found):
    noted(notes, found)
"""


def test_hooks_that_set_entries_of_what_they_are_given_are_looked_at():
    """They give nothing back: they counted as hooks that only keep notes, and the run ended in other bits."""
    names = {"kept": {"scale": 1.0}, "notes": {}, "torch": torch, "index": 0, "__name__": __name__}
    exec(HOOKS, names)
    grow = lambda: names["kept"].update(scale=names["kept"]["scale"] + 1)  # noqa: E731  a change that is handed over
    for hook in ("whole", "masked", "through_data", "loaded_with_its_value", "into", "by_another"):
        assert changed_by(lambda m, hook=hook: m.register_forward_hook(names[hook]), grow) == "'scale' of 'kept'", hook
    assert changed_by(lambda m: m.register_forward_pre_hook(names["first"]), grow) == "'scale' of 'kept'"
    for hook in ("note", "note_by_another"):
        assert changed_by(lambda m, hook=hook: m.register_forward_hook(names[hook]), grow) is None, hook


@pytest.mark.parametrize(
    ("holder", "name"),
    [(Slotted(), "'total' of 'holder'"), (Rated(), "'rate' of 'holder'"), (np.zeros(1), "the variable 'holder'")],
)
def test_hooks_that_read_slots_attributes_of_classes_and_arrays_are_looked_at(holder, name):
    def hook(module, given, found):
        return found * (holder[0] if isinstance(holder, np.ndarray) else holder.total + holder.rate)

    def grow():
        if isinstance(holder, np.ndarray):
            holder[0] += 1
        else:
            setattr(*((Rated, "rate") if isinstance(holder, Rated) else (holder, "total")), 5.0)

    assert changed_by(lambda m: m.register_forward_hook(hook), grow) == name


def test_a_factor_that_stands_before_or_and_one_that_two_variables_get_are_read():
    """Python 3.12 and later copy the first for ``or``, as all do for the second, and as ``+=`` does."""
    holder = types.SimpleNamespace(scale=1.0)

    def doubled(module, given, found):
        first = second = holder.scale
        return found * first * second

    names = {"holder": holder, "__name__": __name__}
    exec("def on_one_line(module, given, found):\n    found *= holder.scale; other = found\n", names)
    for hook in (lambda m, g, found: found * (holder.scale or 2.0), doubled, names["on_one_line"]):
        grow = partial(setattr, holder, "scale", holder.scale + 1)
        assert changed_by(lambda m, hook=hook: m.register_forward_hook(hook), grow) == "'scale' of 'holder'"


def test_a_hook_of_a_gradient_that_a_hook_registers_may_keep_it_in_a_list():
    """Python 3.13 has one instruction for reading a variable and for handing it to an inner function."""
    seen = []

    def keep_gradient(module, given, found):
        found.register_hook(lambda gradient: seen.append(gradient))

    assert changed_by(lambda m: m.register_forward_hook(keep_gradient), lambda: seen.append(1)) is None


def test_hooks_of_other_stages_may_note_what_they_see():
    scale = Scale({"scale": 1.0})

    def note():
        scale.keep("1", None, None, ONES)
        scale.kept["other"] = 1

    def register(module):
        module.register_forward_hook(partial(scale.keep, "0"))
        module.register_full_backward_hook(partial(scale.keep, "1"))
        module.weight.register_hook(scale)
        module.weight.register_post_accumulate_grad_hook(lambda p: scale.seen.append(p.grad))

    assert changed_by(register, note) is None
