"""State of the user's loop in iterators, and in objects of Python, of NumPy and of torch, over a resume."""

import array
import asyncio
import collections
import csv
import ctypes
import functools
import io
import itertools
import logging
import multiprocessing
import queue
import random
import subprocess
import sys
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.run.jobs import GLOBAL_BATCH, Left, begin, correct, dataset, leave, train_step
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import lockstep
from lockstep.errors import ConfigError
from lockstep.run.changed_names import Carried, carried_names, changed_names
from lockstep.run.loop_state import LoopState

STEPS = 3
SETTING = ContextVar("SETTING", default=1)


@dataclass(slots=True)
class Slotted:
    value: float = 1.0


@dataclass(frozen=True)
class Frozen:
    value: float = 1.0


class Attributes(list):
    """A list with an attribute of its own."""

    value = None

    def __init__(self):
        super().__init__([1])
        self.value = 1.0


def ramp():
    value = 1.0
    while True:
        value *= 0.5
        yield value


def begun():
    """A generator that a first ``next`` has begun."""
    iterator = ramp()
    next(iterator)
    return iterator


def counting():
    count = 0

    def count_on():
        nonlocal count
        count += 1

    return count_on


def filled():
    found = queue.Queue()
    for number in range(9):
        found.put(number)
    return found


def named():
    found = threading.local()
    found.value = 1
    return found


def advance(held):
    next(held.x)


def call(held):
    held.x()


def halve(held):
    held.x = held.x * 0.5


def halve_entry(held):
    held.x[0] *= 0.5


def halve_value(held):
    held.x.value *= 0.5


ITERATORS = {
    "list": lambda: iter([1, 2, 3, 4]),
    "array": lambda: iter(np.linspace(1, 0, 9)),
    "flat": lambda: np.linspace(1, 0, 9).flat,
    "nditer": lambda: np.nditer(np.linspace(1, 0, 9)),
    "tensor": lambda: iter(torch.linspace(1, 0, 9)),
    "range": lambda: iter(range(9)),
    "reversed": lambda: reversed([1, 2, 3, 4]),
    "dict": lambda: iter({1: 0, 2: 0, 3: 0, 4: 0}),
    "cycle": lambda: itertools.cycle([1, 2, 3, 4, 5]),
    "count": itertools.count,
    "chain": lambda: itertools.chain([1], range(9)),
    "pairwise": lambda: itertools.pairwise(range(9)),
    "enumerate": lambda: enumerate("abcdef"),
    "zip": lambda: zip(range(9), itertools.count()),
    "map": lambda: map(str, range(9)),
    "expression": lambda: (number / 2 for number in range(9)),
    "begun": begun,
}
HALVED = {
    "fraction": lambda: Fraction(1),
    "timedelta": lambda: timedelta(seconds=8),
    "poly1d": lambda: np.poly1d([1.0, 2.0]),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "parameter": lambda: torch.nn.Parameter(torch.ones(1), requires_grad=False).detach(),
}
CHANGED = {
    "decimal": (lambda: Decimal(1), lambda held: setattr(held, "x", held.x / 2)),
    "range": (lambda: range(9), lambda held: setattr(held, "x", held.x[1:])),
    "set": (lambda: {1}, lambda held: held.x.add(len(held.x) + 1)),
    "set of as many": (lambda: {1}, lambda held: held.x.add(max(held.x) + 1) or held.x.discard(min(held.x))),
    "frozenset": (lambda: frozenset({1}), lambda held: setattr(held, "x", frozenset({len(held.x) + 1, 7}))),
    "array.array": (lambda: array.array("d", [1.0]), halve_entry),
    "bytearray": (lambda: bytearray(b"\x01"), lambda held: held.x.append(1)),
    "text": (io.StringIO, lambda held: held.x.write("loss 0.5\n")),
    "bytes": (io.BytesIO, lambda held: held.x.write(b"loss")),
    "shared value": (lambda: multiprocessing.Value("d", 1.0), halve_value),
    "shared array": (lambda: multiprocessing.Array("d", [1.0]), halve_entry),
    "ctypes": (lambda: ctypes.c_double(1.0), halve_value),
    "UserList": (lambda: collections.UserList([1.0]), halve_entry),
    "UserDict": (lambda: collections.UserDict({0: 1.0}), halve_entry),
    "ChainMap": (lambda: collections.ChainMap({0: 1.0}), halve_entry),
    "order": (
        lambda: dict.fromkeys("abcdef", 0),
        lambda held: held.x.update({(k := next(iter(held.x))): held.x.pop(k)}),
    ),
    "many tensors": (lambda: [torch.ones(1) for _ in range(100)], halve_entry),
    "many objects": (
        lambda: {n: Slotted() for n in range(100)},
        lambda held: setattr(held.x[0], "value", 2.0),
    ),
    "proxy": (
        lambda: types.MappingProxyType([{0: 1.0}][0]),
        lambda held: setattr(held, "x", type(held.x)({0: 2})),
    ),
    "queue": (filled, lambda held: held.x.get()),
    "queue of asyncio": (asyncio.Queue, lambda held: held.x.put_nowait(1)),
    "weak keys": (
        lambda: weakref.WeakKeyDictionary({loop: 1.0, warnings: 1.0}),
        lambda held: held.x.update({loop: held.x[loop] * 0.5}),
    ),
    "one of some pairs": (
        lambda: {("low", 0): 1.0, ("high", 1): 1.0},
        lambda held: held.x.update({("low", 0): held.x["low", 0] * 0.5}),
    ),
    "local": (named, halve_value),
    "context": (lambda: SETTING, lambda held: SETTING.set(SETTING.get() + 1)),
    "slots": (Slotted, halve_value),
    "list's attribute": (Attributes, halve_value),
    "another object": (Frozen, lambda held: setattr(held, "x", Slotted())),
    "another class": (lambda: Slotted, lambda held: setattr(held, "x", Frozen)),
    "objects": (lambda: np.array([1.0, None]), halve_entry),
    "mask": (lambda: np.ma.array([1.0, 2.0, 3.0]), lambda held: held.x.__setitem__(0, np.ma.masked)),
    "normal": (
        lambda: torch.distributions.Normal(torch.ones(1), torch.ones(1)),
        lambda held: setattr(held, "x", torch.distributions.Normal(held.x.mean * 0.5, held.x.scale)),
    ),
    "beside many lists": (
        lambda: SimpleNamespace(games=[[[0] for _ in range(50)] for _ in range(50)], rate=Slotted()),
        lambda held: setattr(held.x.rate, "value", held.x.rate.value * 0.5),
    ),
    "closure": (counting, call),
    "partial": (lambda: functools.partial(counting()), call),
    "bound": (lambda: itertools.count().__next__, call),
    "nested": (lambda: [[[[[[1.0]]]]]], lambda held: held.x[0][0][0][0][0].append(1)),
    "spawned": (lambda: np.random.SeedSequence(3), lambda held: held.x.spawn(1)),
    "requires a gradient": (lambda: torch.ones(1, requires_grad=True) * 1, halve),
    **{name: (make, halve) for name, make in HALVED.items()},
    **{f"iterator of {name}": (make, advance) for name, make in ITERATORS.items()},
}


def loop(state, make, change, *, stop=None, given=0):
    """An epoch whose steps change an object; returns what the checkpoint after step ``stop`` holds of the loop."""
    held, stored = SimpleNamespace(x=make()), None
    for _ in range(given):
        change(held)
    state.begin_epoch()
    state.begin_steps()
    for step in range(given, stop or STEPS):
        change(held)
        stored = state.capture() if step + 1 == stop else stored
    return stored


def resumed(stored, *, inside):
    state = LoopState({}, is_main=True)
    state.resume(stored, inside=inside)
    return state


def warnings(caplog, name=""):
    found = [each.getMessage() for each in caplog.records if "not what they were" in each.getMessage()]
    return [each for each in found if name in each]


@pytest.mark.parametrize("name", CHANGED)
def test_an_object_that_begins_anew_is_named(name, caplog):
    """Such a run went on with other values, and without a word."""
    make, change = CHANGED[name]
    SETTING.set(1)
    stored = loop(LoopState({}, is_main=True), make, change, stop=2)
    SETTING.set(1)
    loop(resumed(stored, inside=True), make, change)
    (warning,) = warnings(caplog)
    assert "loop: held.x" in warning
    assert "digest" not in warning


@pytest.mark.parametrize("name", CHANGED)
def test_an_object_that_the_script_brings_to_its_place_is_not_named(name, caplog):
    make, change = CHANGED[name]
    SETTING.set(1)
    stored = loop(LoopState({}, is_main=True), make, change, stop=2)
    SETTING.set(1)
    loop(resumed(stored, inside=True), make, change, given=2)
    assert warnings(caplog) == []


def write_line(held):
    held.x.write("loss 0.5\n")


def write_row(held):
    held.x.writerow({"loss": 0.5} if isinstance(held.x, csv.DictWriter) else [0.5])


FILES = {
    "lines": ("r", lambda file: file, advance, "lines.txt' at byte 0, was "),
    "readline": ("r", lambda file: file, lambda held: held.x.readline(), "lines.txt' at byte 0, was "),
    "bytes": ("rb", lambda file: file, lambda held: held.x.read(2), "lines.txt' at byte 0, was "),
    "log": ("w", lambda file: file, write_line, "lines.txt' at byte 0, was "),
    "csv": ("w", csv.writer, write_row, "held.x (other values)"),
    "csv of dicts": ("w", lambda file: csv.DictWriter(file, ["loss"]), write_row, "held.x (other values)"),
    "csv read": ("r", csv.reader, advance, "held.x"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_a_resumed_run_begins_anew_is_named(name, tmp_path, caplog):
    """A log that a script opens with "w" was emptied by the resumed run, and a file was read from its beginning."""
    mode, hold, change, said = FILES[name]
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{number}.5\n" for number in range(9)))
    with path.open(mode) as file:
        stored = loop(LoopState({}, is_main=True), lambda: hold(file), change, stop=2)
    with path.open(mode) as file:
        loop(resumed(stored, inside=True), lambda: hold(file), change)
    (warning,) = warnings(caplog)
    assert said in warning


@pytest.mark.parametrize("name", ["a", "another"])
def test_a_log_that_a_resumed_run_goes_on_with_is_not_named(name, tmp_path, caplog):
    """It is opened with "a", or has a name of its own, as by the time."""
    paths = [tmp_path / (f"log-{number}" if name == "another" else "log") for number in range(2)]
    with paths[0].open("w") as file:
        stored = loop(LoopState({}, is_main=True), lambda: file, write_line, stop=2)
    with paths[1].open("w" if name == "another" else "a") as file:
        loop(resumed(stored, inside=True), lambda: file, write_line, stop=2)
    assert warnings(caplog) == []


@pytest.mark.parametrize("mode", ["w", "a"])
def test_a_file_of_logging_that_a_resumed_run_begins_anew_is_named(mode, tmp_path, caplog):
    logger = logging.getLogger("tests.run.script")
    logger.propagate = False

    def run(state, **more):
        handler = logging.FileHandler(tmp_path / "log", mode=mode)
        logger.addHandler(handler)
        try:
            return loop(state, list, lambda _: logger.warning("loss 0.5"), **more)
        finally:
            logger.removeHandler(handler)
            handler.close()

    run(resumed(run(LoopState({}, is_main=True), stop=2), inside=True))
    assert ["of logging" in each for each in warnings(caplog)] == [True] * (mode == "w")


class Counted(random.Random):
    """A generator with a number of its own, which is no part of its state."""

    def __init__(self, seed):
        super().__init__(seed)
        self.drawn = 0

    def draw(self):
        self.drawn += 1
        return self.random()


def test_what_a_generator_of_a_class_of_the_users_keeps_beside_its_state_is_named(caplog):
    stored = loop(LoopState({}, is_main=True), lambda: Counted(3), lambda held: held.x.draw(), stop=2)
    loop(resumed(stored, inside=True), lambda: Counted(3), lambda held: held.x.draw())
    (warning,) = warnings(caplog)
    assert "held.x.drawn" in warning
    assert "gauss" not in warning


GENERATORS = {
    "method": lambda: random.Random(3).random,
    "NumPy's method": lambda: np.random.default_rng(3).random,
    "partial": lambda: functools.partial(np.random.default_rng(3).uniform, 0, 1),
    "closure": lambda: (lambda own: lambda: own.random())(random.Random(3)),
    "bits": lambda: (lambda own: lambda: np.random.Generator(own).random())(np.random.PCG64(3)),
    "slots": lambda: (lambda own: lambda: own.value.random())(Slotted(random.Random(3))),
    "loader": lambda: functools.partial(
        lambda loader: next(iter(loader))[0].item(),
        DataLoader(
            TensorDataset(torch.arange(100.0)),
            sampler=RandomSampler(range(100), generator=torch.Generator().manual_seed(3)),
        ),
    ),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_that_only_an_object_leads_to_goes_on(name, caplog):
    make, drawn = GENERATORS[name], []
    state = LoopState({}, is_main=True)

    def draw(held):
        drawn.append(held.x())

    stored = loop(state, make, draw, stop=2)
    loop(LoopState({}, is_main=True), make, draw)
    whole = drawn[2:]
    drawn.clear()
    loop(resumed(stored, inside=True), make, draw, given=0)
    assert drawn[0] == whole[2]
    assert warnings(caplog, "held.x") == []


def remembering(kept=[1.0]):  # noqa: B006  that is what is tested
    kept[0] *= 0.5


class Shared:
    count = 0

    @classmethod
    def step(cls):
        cls.count += 1


counted = counting()


@functools.lru_cache
def cached():
    counted()


OWN = types.ModuleType("a_module_of_the_script")
exec("level = 1\ndef step():\n    global level\n    level += 1\n", vars(OWN))


@pytest.mark.parametrize(
    ("step", "reset", "said"),
    [
        (
            lambda: remembering(),
            lambda: remembering.__defaults__[0].__setitem__(0, 1.0),
            "remembering(default 0)[0]",
        ),
        (lambda: Shared.step(), lambda: setattr(Shared, "count", 0), "Shared.count (0, was 2)"),
        (lambda: OWN.step(), lambda: setattr(OWN, "level", 1), "a_module_of_the_script.level (1, was 3)"),
        (
            lambda: cached() or cached.cache_clear(),
            lambda: counted.__closure__[0].__setattr__("cell_contents", 0),
            "counted.count (0, was 2)",
        ),
    ],
)
def test_what_functions_classes_and_modules_keep_is_named(step, reset, said, caplog):
    reset()
    stored = loop(LoopState({}, is_main=True), lambda: step, call, stop=2)
    reset()
    loop(resumed(stored, inside=True), lambda: step, call)
    (warning,) = warnings(caplog)
    assert said in warning


class Epochs:
    """A loop that changes an attribute where an epoch begins."""

    def __init__(self, make):
        self.x, self.other = make(), 0

    def walk(self, state, change, epochs):
        stored = None
        for epoch in epochs:
            state.begin_epoch()
            if epoch:
                change(self, epoch)
            state.begin_steps()
            for _ in range(STEPS):
                self.other = self.x
            stored = state.capture()
            state.end_steps()
        return stored


def by_epoch(held, epoch):
    held.x = 0.5**epoch


def in_place(held, epoch):
    held.x *= 0.5


def rotated(held, epoch):
    held.x.rotate(1)


def replaced(held, epoch):
    held.x = replace(held.x, value=held.x.value * 0.5)


def halved_value(held, epoch):
    held.x.value *= 0.5


def taken(held, epoch):
    held.other = next(held.x)


def refilled(held, epoch):
    held.x.clear()
    held.x.append(epoch)


def reset(held, epoch):
    held.x = 0.0
    held.x += epoch


@pytest.mark.parametrize(
    ("make", "change", "is_lost"),
    [
        (lambda: 1.0, in_place, True),
        (lambda: Fraction(1), in_place, True),
        (lambda: collections.deque([1, 2, 3, 4]), rotated, True),
        (Frozen, replaced, True),
        (lambda: multiprocessing.Value("d", 1.0), halved_value, True),
        (lambda: iter([1, 2, 3, 4]), taken, True),
        (lambda: 1.0, by_epoch, False),
        (list, refilled, False),
        (lambda: 0.0, reset, False),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_what_the_start_of_an_epoch_makes_of_what_was_lost_is_named(make, change, is_lost, inside, caplog):
    """As ``self.scale *= 0.5``: in a resumed run it begins with the first value, and ended in other bits."""
    stored = Epochs(make).walk(LoopState({}, is_main=True), change, range(3))
    Epochs(make).walk(resumed(stored, inside=inside), change, [2 if inside else 3])
    assert bool(warnings(caplog, "self.x")) == is_lost


class Centred:
    """A loop whose start of an epoch may compute ``centre`` from ``weight``, which stands for the model."""

    def __init__(self, weight):
        self.weight = weight

    def walk(self, state, fill, epochs):
        self.centre, self.is_ready, self.kept, self.stage = None, False, {}, None
        for epoch in epochs:
            state.begin_epoch()
            fill(self, epoch)
            state.begin_steps()
            for _ in range(STEPS):
                self.weight += 1.0 / (1.0 + float(self.centre))
            stored = state.capture()
            state.end_steps()
        return stored, self.weight


def once(held, epoch):
    if held.centre is None:
        compute(held)


def where_not_ready(held, epoch):
    if not held.is_ready:
        held.is_ready = True
        held.centre = torch.tensor(held.weight)


def where_not_kept(held, epoch):
    if "centre" not in held.kept:
        held.kept["centre"] = torch.tensor(held.weight)
    held.centre = held.kept["centre"]


def compute(held):
    held.centre = torch.tensor(held.weight)


def of_each_epoch(held, epoch):
    held.centre = torch.tensor(held.weight)


def of_every_third(held, epoch):
    if epoch % 3 == 0:
        held.centre = torch.tensor(held.weight)


def of_a_stage(held, epoch):
    stage = epoch // 3
    if stage != held.stage:
        held.stage, held.centre = stage, torch.tensor(float(stage))


def once_of_a_constant(held, epoch):
    if held.centre is None:
        held.centre = torch.tensor(3.0)


@pytest.mark.parametrize(
    ("fill", "is_lost"),
    [
        (once, True),
        (where_not_ready, True),
        (where_not_kept, True),
        (of_each_epoch, False),
        (of_every_third, False),
        (of_a_stage, False),
        (once_of_a_constant, False),
    ],
)
def test_what_the_first_epoch_computes_for_all_later_ones_is_named(fill, is_lost, caplog):
    """A resumed run computed it again, from another model, and ended in other bits without a word."""
    stored, weight = Centred(8.0).walk(LoopState({}, is_main=True), fill, range(3))
    state = resumed(stored, inside=False)
    Centred(weight).walk(state, fill, [3])
    assert bool(warnings(caplog, "self.centre")) == is_lost == any("centre" in name for name in state.lost)


class Counting:
    """Counts its steps in a function of its own, as a scheduler that is called in one does."""

    def __init__(self, count):
        self.count = count

    def train(self, state):
        state.begin_steps()
        for _ in range(STEPS):
            self.count += 1
            stored = state.capture()
        return stored

    def walk(self, state):
        state.begin_epoch()
        return self.train(state)


@pytest.mark.parametrize("given", [0, STEPS])
def test_a_count_that_is_given_back_is_not_named(given, caplog):
    """It was, where a function has the loop within an epoch, and refused if the loss reads it."""
    stored = Counting(0).walk(LoopState({}, is_main=True))
    Counting(given).walk(resumed(stored, inside=True))
    assert bool(warnings(caplog, "self.count")) == (given == 0)


def test_what_code_makes_of_what_it_was_is_known():
    def changes(task, table, number):
        task.scale *= 0.5
        task.rate = task.rate * 0.5
        task.total = 0
        task.total += 1
        task.limit = table.limit
        table["weight"] += 1
        table["level"] = number

    parts = [(changes.__code__, -1, float("inf"))]
    values = {each.name for each in carried_names(parts, {}) if each.what == "value"}
    assert values == {"scale", "rate", "table", "weight"}
    replaced = {Carried("scale", "attribute"), Carried("rate", "attribute"), Carried("table", "entries")}
    assert replaced <= carried_names(parts, {}) <= replaced | {*map(Carried, values)}


def test_what_the_test_of_a_loop_takes_from_an_iterator_is_known():
    """It is there twice, before the body and behind it: ``next`` itself counted as changed, and as not set."""

    def changes(source):
        while (item := next(source, None)) is not None:
            print(item)

    assert changed_names([(changes.__code__, -1, float("inf"))], {}) == {"source", "item"}


def test_what_code_changes_is_known_where_one_instruction_loads_two_variables():
    """Python 3.13 and later join such loads, and keep the place of the first in its line."""

    def changes(table, other, third, index, value, total):
        def add(one, two):
            nonlocal total
            total = total + one * two

        table[index] = value
        return value, other.append(index), [third.append(each) for each in table], add, total

    parts = [(changes.__code__, -1, float("inf"))]
    assert changed_names(parts, {}) >= {"table", "other", "third", "total"}
    replaced = {Carried("total", "object"), Carried("table", "entries")}
    assert carried_names(parts, {}) == replaced | {*map(Carried, ("other", "third", "total"))}


def test_what_variables_of_a_function_get_of_what_they_were_is_known():
    """Python 3.13 and later join two loads, and since 3.12 a comprehension is a part of the code around it."""

    def changes(rate, factor, scale, shift, each, table):
        rate = factor * rate
        scale = shift = [scale + each for each in table]
        each = [each + 1 for each in table]
        return rate, scale, shift, each

    parts = [(changes.__code__, -1, float("inf"))]
    assert {each.name for each in carried_names(parts, {})} == {"rate", "scale"}


@pytest.mark.slow
def test_what_code_changes_is_known_where_python_leaves_out_columns():
    """As with PYTHONNODEBUGRANGES: then all names of the line count."""
    names = "{*'scale rate table weight index it total'.split()}"
    lines = (
        "from lockstep.run.changed_names import carried_names, changed_names",
        "def changes(task, table, it, index, value):",
        "    task.scale *= 0.5",
        "    task.rate = task.rate * 0.5",
        "    table['weight'] += 1",
        "    table[index] = value",
        "    next(it)",
        "    task.total = 0",
        "parts = [(changes.__code__, -1, float('inf'))]",
        "carried = {each.name for each in carried_names(parts, {}) if each.what == 'value'}",
        f"assert changed_names(parts, {{}}) >= {names}, changed_names(parts, {{}})",
        "assert {'scale', 'rate', 'table', 'weight', 'it'} <= carried and 'total' not in carried, carried",
    )
    command = [sys.executable, "-X", "no_debug_ranges", "-c", "\n".join(lines)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not ended.returncode, ended.stderr


def test_methods_that_super_leads_to_are_followed():
    class Base:
        def advance(self):
            self.scale *= 0.5

    class Advancing(Base):
        def go_on(self):
            super().advance()

    parts = [(Advancing.go_on.__code__, -1, float("inf"))]
    assert "scale" in changed_names(parts, {"advance": [Base.advance.__code__]})


class Scaled(TensorDataset):
    scale = 1.0

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return inputs * self.scale, target


def curriculum(folder, epochs):
    run, _, optimizer = begin(directory=folder, resume="auto")
    data = Scaled(*dataset().tensors)
    data.scale = 1.0
    for epoch in run.epochs(3):
        if epoch:
            data.scale *= 0.5
        for batch in run.batches(data):
            train_step(run, batch, optimizer)
        if epoch + 1 == epochs:
            leave(run)
    run.close()


def test_a_data_set_whose_scale_goes_on_from_what_it_was_is_refused(tmp_path):
    with pytest.raises(Left):
        curriculum(tmp_path, 2)
    with pytest.raises(ConfigError, match=r"The loop had changed curriculum: data.scale in a data set"):
        curriculum(tmp_path, None)


class Mined(TensorDataset):
    """Weighs the samples that its loop has found hard; keeps which it has read, as a cache does."""

    def __init__(self, *tensors, hard):
        super().__init__(*tensors)
        self.hard, self.met, self.last = hard, set(), {}

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        self.keep(index, float(target))
        return inputs * (2.0 if index in self.hard else 1.0), target

    def keep(self, index, target):
        self.met.add(index)
        self.last[index] = target


def mine(hard, places):
    """A function, as the code of the loop would tell what it changes itself."""
    if isinstance(hard, set | Counter):
        hard.update(places)
    elif isinstance(hard, dict):
        hard.update(dict.fromkeys(places, 1.0))
    else:
        hard.extend(places)


def mining(folder, make, leave_at=None, *, within=False, give_back=False, clear=False):
    run, _, optimizer = begin(directory=folder, resume="auto")
    data = Mined(*dataset().tensors, hard=make())
    if give_back:
        mine(data.hard, run.extra.get("hard", []))
    for epoch in run.epochs(3):
        for batch in run.batches(data):
            number = batch.plan.position
            train_step(run, batch, optimizer)
            if within:
                mine(data.hard, [3 * epoch + number + 20, 21])
                run.extra["hard"] = list(data.hard)
            if (epoch, number) == leave_at:
                leave(run)
        run.evaluate(data, correct)
        if not within:
            mine(data.hard, [3 * epoch + 20, 21])
        if clear:
            data.hard.clear()
        run.extra["hard"] = list(data.hard)
    weights = run.fingerprint()
    run.close()
    return weights


def fading(folder, stop=False):
    run, _, optimizer = begin(directory=folder, resume="auto")
    data = dataset()
    rows = data.tensors[0]
    for _ in run.epochs(3):
        for batch in run.batches(data):
            train_step(run, batch, optimizer)
            rows.mul_(0.9)
            if stop:
                leave(run)
    run.close()


def test_what_the_loop_changes_in_a_data_set_by_a_name_of_its_own_is_not_lost(tmp_path):
    with pytest.raises(Left):
        fading(tmp_path, stop=True)
    with pytest.raises(ConfigError, match=r"The loop had changed fading: data.tensors\[0\] in a data set"):
        fading(tmp_path)


RARE = [list, deque, Counter, OrderedDict, functools.partial(defaultdict, float)]
CONTAINERS = [set, dict, *(pytest.param(each, marks=pytest.mark.slow) for each in RARE)]


@pytest.mark.parametrize("within", [False, True], ids=["between epochs", "within"])
@pytest.mark.parametrize("make", CONTAINERS)
def test_what_a_loop_puts_into_an_empty_container_of_a_data_set_is_not_lost_in_silence(make, within, tmp_path):
    """None of the samples that are compared at a resume is one of those."""
    with pytest.raises(Left):
        mining(tmp_path, make, (1, 0), within=within)
    with pytest.raises(ConfigError, match=r"The loop had changed mining: data.hard in a data set"):
        mining(tmp_path, make, within=within)


def growing(folder, change, make, stop=None):
    run, _, optimizer = begin(directory=folder, resume="auto")
    data = Mined(*dataset().tensors, hard=make())
    for epoch in run.epochs(3):
        change(data, epoch)
        for batch in run.batches(data):
            train_step(run, batch, optimizer)
        if epoch == stop:
            leave(run)
    weights = run.fingerprint()
    run.close()
    return weights


def add(data, epoch):
    data.hard.add(20 + epoch)


def update(data, epoch):
    data.hard.update({20 + epoch: 1.0})


def set_entry(data, epoch):
    data.hard[20 + epoch] = 1.0


def make_anew(data, epoch):
    data.hard.clear()
    data.hard.update({20 + epoch: 1.0})


@pytest.mark.parametrize(("make", "change"), [(set, add), (set, update), (dict, update), (dict, set_entry)])
def test_a_container_of_a_data_set_that_grows_where_epochs_begin_is_refused(make, change, tmp_path):
    with pytest.raises(Left):
        growing(tmp_path, change, make, 1)
    with pytest.raises(ConfigError, match=r"The loop had changed growing: data.hard in a data set"):
        growing(tmp_path, change, make)


@pytest.mark.parametrize("make", [set, dict])
def test_a_container_of_a_data_set_that_each_epoch_fills_anew_goes_on(make, tmp_path):
    whole = growing(tmp_path / "whole", make_anew, make)
    with pytest.raises(Left):
        growing(tmp_path / "left", make_anew, make, 1)
    assert growing(tmp_path / "left", make_anew, make) == whole


@pytest.mark.parametrize(
    "how",
    [
        ("give_back", "within"),
        *(pytest.param((each,), marks=pytest.mark.slow) for each in ("give_back", "clear")),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("make", [set, pytest.param(dict, marks=pytest.mark.slow)])
def test_a_container_of_a_data_set_that_is_as_it_was_goes_on(make, how, tmp_path, caplog):
    options = dict.fromkeys(how, True)
    whole = mining(tmp_path / "whole", make, **options)
    with pytest.raises(Left):
        mining(tmp_path / "left", make, (1, 0), **options)
    caplog.clear()
    assert mining(tmp_path / "left", make, **options) == whole
    assert "variables that are not what they were" not in caplog.text


def weighted(folder, *, stop):
    run, _, optimizer = begin(directory=folder, resume="auto")
    weights, other = itertools.cycle([1.0, 0.5, 0.25, 0.125]), [1, 2, 3, 4]
    for _ in run.epochs(2):
        fresh = iter(other)
        for batch in run.batches(dataset()):
            weight = next(weights)
            train_step(run, batch, optimizer, lambda output, target, w=weight: w * output.square().mean())
            next(fresh)
        if run.position.step == stop:
            leave(run)
    run.close()


def test_a_run_names_the_iterator_that_its_weights_come_from(tmp_path, caplog):
    with pytest.raises(Left):
        weighted(tmp_path, stop=3)
    weighted(tmp_path, stop=None)
    (warning,) = warnings(caplog)
    assert "weighted: weights" in warning
    assert "fresh" not in warning


def around(batches):
    last = None
    for batch in batches:
        last = batch
        yield last


def test_a_generator_around_the_batches_is_not_named(tmp_path, caplog):
    def train(stop):
        run, _, optimizer = begin(directory=tmp_path, resume="auto")
        for _ in run.epochs(2):
            batches = around(run.batches(dataset()))
            for batch in batches:
                train_step(run, batch, optimizer)
                if run.position.step + 1 == stop:
                    leave(run)
        run.close()

    with pytest.raises(Left):
        train(2)
    train(None)
    assert warnings(caplog) == []


def changing_over(folder, stop=None, *, anew=False):
    """Another optimizer takes the place of the first one; ``anew``: each epoch chooses."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    run = lockstep.init(global_batch=12, micro_batches=4, directory=folder, resume="auto")
    late = torch.optim.SGD(model.parameters(), lr=0.5)
    model, early, late = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), late)
    optimizer = early
    for epoch in run.epochs(3):
        if anew:
            optimizer = early if epoch < 1 else late
        elif epoch == 1:
            optimizer = late
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
            if run.position.step + 1 == stop:
                leave(run)
    return run.fingerprint(), run.close()


def test_an_optimizer_that_takes_the_place_of_another_is_named_where_a_resumed_run_has_the_first(tmp_path, caplog):
    """Such a run stepped the first optimizer, ended in other bits, and said nothing."""
    stop = 2 * -(-len(dataset()) // 12) + 2  # in the third epoch
    for anew in (False, True):
        caplog.clear()
        with pytest.raises(Left):
            changing_over(tmp_path / f"{anew}", stop, anew=anew)
        resumed_bits = changing_over(tmp_path / f"{anew}", anew=anew)
        assert (resumed_bits == changing_over(tmp_path / "whole", anew=anew)) == anew
        said = warnings(caplog, "changing_over: optimizer (SGD 0, was SGD 1)")
        assert len(said) == (not anew)


def squared(output, data):
    return output.square().mean()


def growing_net(folder, stop=None):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(6, 3), "b": torch.nn.Linear(6, 3)})
    run, model, optimizer = begin(model, directory=folder, resume="auto")
    net = model["a"]
    for epoch in run.epochs(3):
        if epoch == 1:
            net = model["b"]
        for batch in run.batches(dataset()):
            run.backward(batch, squared, forward=lambda data: net(data[0]))  # noqa: B023  as a script has it
            optimizer.step()
            optimizer.zero_grad()
        if epoch == stop:
            leave(run)
    run.close()


def test_a_part_of_the_model_that_takes_the_place_of_another_in_the_loss_is_refused_where_it_is_lost(
    tmp_path,
):
    """Such a run trained the first part again, and said nothing."""
    with pytest.raises(Left):
        growing_net(tmp_path, 1)
    with pytest.raises(ConfigError, match="The loss or the model reads growing_net: net, which the loop changes"):
        growing_net(tmp_path)


def with_another_loss(folder, stop=None):
    run, _, optimizer = begin(directory=folder, resume="auto")
    criterion = torch.nn.CrossEntropyLoss()
    for epoch in run.epochs(3):
        if epoch == 1:
            criterion = torch.nn.MultiMarginLoss()
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer, criterion)
        if epoch == stop:
            leave(run)
    run.close()


def test_a_loss_of_torch_that_takes_the_place_of_another_is_named(tmp_path, caplog):
    """Such a run went on with the first loss, and said nothing."""
    with pytest.raises(Left):
        with_another_loss(tmp_path, 1)
    with_another_loss(tmp_path)
    (warning,) = warnings(caplog, "with_another_loss: criterion")
    assert "CrossEntropyLoss, was torch.nn.modules.loss.MultiMarginLoss" in warning


LONG = """
def long(folder, stop=None):
    run, _, optimizer = begin(directory=folder, resume="auto")
    rate = 0.9
    for epoch in run.epochs(4):
        if epoch == 1:
            rate = 0.5
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
            if run.position.step + 1 == stop:
                leave(run)
            {body}
        optimizer.param_groups[0]["lr"] *= rate
    run.close()
"""


@pytest.mark.parametrize("lines", [1, 60])
def test_what_is_read_after_a_loop_is_named_however_long_its_body_is(lines, tmp_path, caplog):
    """A jump over more than 255 words of code leads to another instruction. The run ended in other bits, in silence."""
    space = {**globals(), "__name__": __name__}
    exec(compile(LONG.format(body="; ".join(["str(epoch + 1)"] * lines)), __file__, "exec"), space)
    with pytest.raises(Left):
        space["long"](tmp_path, 2 * -(-len(dataset()) // GLOBAL_BATCH) + 1)
    space["long"](tmp_path)
    assert len(warnings(caplog, "long: rate (0.9, was 0.5)")) == 1


class Meter:
    def __init__(self):
        self.losses = []

    def record(self, loss):
        self.losses.append(loss)


NOTED = []


def note(loss):
    NOTED.append(loss)


def noted():
    return sum(NOTED)


FINISHED = """
def finished(folder):
    run, model, optimizer = begin(directory=folder, resume="auto")
    {make}
    for _ in run.epochs(1):
        for batch in run.batches(dataset()):
            loss = float(train_step(run, batch, optimizer))
            {step}
        run.save()
    run.close()
    return {shown}
"""
SHOWN = {
    "method": ("meter = Meter()", "meter.record(loss)", "sum(meter.losses)", "finished: meter.losses"),
    "function": ("NOTED.clear()", "note(loss)", "noted()", "NOTED"),
    "argument": ("losses = []", "(lambda held: held.append(loss))(losses)", "sum(losses)", "finished: losses"),
    "other name": ("held = [[]]; losses = held[0]", "losses.append(loss)", "sum(held[0])", "finished: held[0]"),
    "closure": ("count = counting()", "count()", "count.__closure__[0].cell_contents", "finished: count.count"),
    "class": ("Shared.count = 0; own = Shared()", "Shared.step()", "own.count", "finished: own.count"),
    "not shown": ("meter = Meter()", "meter.record(loss)", "0", ""),
}


@pytest.mark.parametrize("case", SHOWN)
def test_what_a_finished_script_prints_at_its_end_is_named_where_it_is_started_again(case, tmp_path, caplog):
    """Without a step left it printed other numbers, without a word, unless its own code changed them in the loop."""
    make, step, shown, name = SHOWN[case]
    space = {**globals(), "__name__": __name__}
    exec(compile(FINISHED.format(make=make, step=step, shown=shown), __file__, "exec"), space)
    whole = space["finished"](tmp_path)
    assert warnings(caplog) == []
    assert (space["finished"](tmp_path) == whole) is (case == "not shown")
    assert [f"{name} (" in each for each in warnings(caplog)] == [True] * bool(name)
