"""Texts, digests and JSON of values in checkpoints: an earlier version's have to be found equal, byte by byte.

``tests/fixtures/stored_texts.json`` has what the version of November 2026 made of them.
"""

import array
import collections
import ctypes
import dataclasses
import datetime
import decimal
import enum
import functools
import hashlib
import json
import random
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.core.values import VARIABLE, Part
from lockstep.data.changes import Notes
from lockstep.data.rereading import content_of
from lockstep.numerics.hidden_state import Snapshot
from lockstep.run.attributes import Values
from lockstep.run.checks.agreement import made_with
from lockstep.run.frame_variables import Variables, _Search
from lockstep.verify.plain.recorder import attributes

FIXTURE = Path(__file__).parent.parent / "fixtures" / "stored_texts.json"


class Color(enum.Enum):
    RED = 1


class Model(nn.Module):
    pass


class Bag(list):
    pass


class Table(dict):
    pass


class Box:
    rate = 0.5

    def __init__(self, **held):
        self.__dict__.update(held)

    def grow(self):
        self.rate *= 2


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


@dataclasses.dataclass
class Settings:
    rate: float = 0.1
    layers: tuple = (1, 2)


Point = collections.namedtuple("Point", "x y")


def filled(container, **attributes):
    vars(container).update(attributes)
    return container


def cyclic():
    found = [1]
    found.append(found)
    return found


def chain():
    first, second = Box(count=1), Box(count=2)
    first.next, second.next = second, first
    return first


def counter(start):
    held = [start]

    def count(step=1, *, scale=2):
        return held[0] + step * scale

    return count


MADE = {
    "none": lambda: None,
    "bool": lambda: True,
    "int": lambda: 7,
    "large int": lambda: 3**1000,
    "float": lambda: 0.1,
    "nan": lambda: float("nan"),
    "complex": lambda: 1 + 2j,
    "str": lambda: "text",
    "path": lambda: "/data/set",
    "long str": lambda: "ab" * 100,
    "bytes": lambda: b"ab",
    "enum": lambda: Color.RED,
    "dtype": lambda: torch.float16,
    "device": lambda: torch.device("cpu"),
    "size": lambda: torch.Size([1, 2]),
    "range": lambda: range(3),
    "date": lambda: datetime.date(2026, 1, 1),
    "decimal": lambda: decimal.Decimal("0.1"),
    "list": lambda: [1, "a", None],
    "nested list": lambda: [[1, [2, [3, [4, [5, [6]]]]]], (7,)],
    "long list": lambda: list(range(2_000)),
    "list of pairs": lambda: [("a", 1), ("b", 2)] * 100,
    "list of boxes": lambda: [Box(number=n) for n in range(3)],
    "long list of boxes": lambda: [Box(number=n) for n in range(100)],
    "list of tensors": lambda: [torch.arange(3), torch.ones(2)],
    "list of arrays": lambda: [np.arange(3), np.ones(2)],
    "tuple": lambda: (1, [2]),
    "empty tuple": lambda: (),
    "named tuple": lambda: Point(1, [2]),
    "dict": lambda: {"b": 1, "a": [2]},
    "dict with odd keys": lambda: {(1, 2): 3, None: 4, Color.RED: 5},
    "long dict": lambda: {n: n * n for n in range(500)},
    "ordered dict": lambda: collections.OrderedDict(b=1, a=2),
    "counter": lambda: collections.Counter("abca"),
    "default dict": lambda: collections.defaultdict(list, a=[1]),
    "mapping proxy": lambda: types.MappingProxyType({"a": [1]}),
    "set": lambda: {3, 1, 2},
    "set of texts": lambda: {"b", "a", "c"},
    "frozen set": lambda: frozenset((1, 2)),
    "set of tuples": lambda: {(1, 2)},
    "deque": lambda: collections.deque([1, 2], 5),
    "user dict": lambda: collections.UserDict(a=1),
    "user list": lambda: collections.UserList([1]),
    "class of lists": lambda: filled(Bag([1, 2]), rate=3),
    "class of dicts": lambda: filled(Table(a=1), rate=3),
    "box": lambda: Box(a=1, b=Box(c=[2]), d=None),
    "slots": lambda: Slotted([1]),
    "data class": Settings,
    "namespace": lambda: types.SimpleNamespace(a=1),
    "cyclic list": cyclic,
    "cyclic boxes": chain,
    "tensor": lambda: torch.arange(6).view(2, 3),
    "tensor of one": lambda: torch.tensor(1.5),
    "transposed tensor": lambda: torch.arange(6.0).view(2, 3).t(),
    "large tensor": lambda: torch.arange(10_000.0),
    "very large tensor": lambda: torch.arange(300_000.0),
    "bfloat16": lambda: torch.ones(2, dtype=torch.bfloat16),
    "sparse tensor": lambda: torch.eye(3).to_sparse(),
    "array": lambda: np.arange(6.0).reshape(2, 3),
    "array of Fortran's order": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "large array": lambda: np.arange(5_000.0),
    "masked array": lambda: np.ma.array([1.0, 2.0], mask=[False, True]),
    "array of objects": lambda: np.array([[1], None], dtype=object),
    "array of records": lambda: np.zeros(2, dtype=[("a", "f4"), ("b", "i4")]),
    "array of texts": lambda: np.array(["a", "b"]),
    "NumPy's generator": lambda: np.random.default_rng(0),
    "NumPy's old generator": lambda: np.random.RandomState(0),
    "Python's generator": lambda: random.Random(0),
    "dict of generators": lambda: {"a": np.random.default_rng(1)},
    "byte array": lambda: bytearray(b"abc"),
    "array of Python's": lambda: array.array("d", [1.0]),
    "number of C": lambda: ctypes.c_int(3),
    "partial": lambda: functools.partial(max, [1], key=None),
    "function": lambda: counter(1),
    "method": lambda: Box(a=1).grow,
    "built-in method": lambda: [1].append,
    "class": lambda: Box,
    "iterator": lambda: iter([1, 2]),
    "module": lambda: [nn.Dropout(0.1)],
}


def short(found):
    """The JSON itself, or of a long one a digest."""
    text = json.dumps(found, sort_keys=True)
    return found if len(text) <= 500 else hashlib.sha256(text.encode()).hexdigest()[:16]


def variables_of(value):
    variables = Variables({})
    _Search(variables)._look(Part(VARIABLE, "fit", "held", value), "fit: held")
    return variables


def looks(value):
    """What each look at a value would put into a checkpoint."""
    model, variables = Model(), variables_of(value)
    model.held = value
    values = Values({"module ": model})
    certain, others = made_with(model)[:2]
    found = {
        "attributes": [[*place, each] for place, each in values.found.items()],
        "unheld": sorted(map(list, values.unheld)),
        "tensors": sorted(values.tensors),
        "places": Snapshot({"": model}, restorable=False).texts,
        "variables": variables.texts,
        "made with": [certain, others],
        "sample": content_of(value),
    }
    return {name: short(each) for name, each in found.items()}


@pytest.mark.parametrize("name", MADE)
def test_values_have_the_texts_that_earlier_versions_stored(name):
    assert json.loads(json.dumps(looks(MADE[name]()))) == json.loads(FIXTURE.read_text())[name]


def counting(base, calls):
    """A class of containers whose methods note that they were called."""

    def noting(name):
        return lambda self, *given: calls.append(name) or getattr(base, name)(self, *given)

    named = ("__iter__", "__len__", "__contains__", "__getitem__", "items", "keys", "values", "copy", "clear", "update")
    names = filter(functools.partial(hasattr, base), [*named, "extend", "append", "__repr__", "__eq__"])
    return type("Counting", (base,), {"__hash__": None, **{name: noting(name) for name in names}})


class Rows(torch.utils.data.Dataset):
    def __init__(self, held):
        self.held = held

    def __len__(self):
        return 1


@pytest.mark.parametrize("base", [list, tuple, set, frozenset, collections.deque, dict, collections.OrderedDict])
def test_no_method_of_the_users_own_containers_is_called(base):
    """A list that is iterated over without end hung; a count of reads in ``__iter__`` was too large."""
    is_mapping = issubclass(base, dict)
    plain = base({1: 2, 3: 4}) if is_mapping else base((1, 2, 3))
    calls, model = [], Model()
    held = counting(base, calls)(plain)
    rows = Rows(held)
    calls.clear()
    assert looks(held)["sample"] == looks(plain)["sample"]
    assert variables_of(held).texts.items() >= variables_of(plain).texts.items()
    assert Notes(rows) == Notes(rows)
    model.held = held
    before = Snapshot({"": model})
    if base in (list, dict, set, collections.deque, collections.OrderedDict):
        base.clear(held)
        assert before.changed(Snapshot({"": model}))
        before.restore()
        assert not before.changed(Snapshot({"": model}))
    assert calls == []


class Lazy:
    def __getattr__(self, name):
        return Lazy()


def test_an_object_that_makes_what_it_is_asked_for_is_described_by_its_class():
    """Ranks, and a run that is resumed, had other texts, with the addresses of objects."""
    model = Model()
    model.held = Lazy()
    assert made_with(model)[1] == {"the attribute 'held' of the model": f"{__name__}.Lazy"}


def test_a_module_may_hold_a_number_of_any_size():
    """A mask of 20,000 bits ended ``run.prepare`` in an error of Python about digits."""
    model, other = Model(), Model()
    model.held, other.held = [1 << 20_000], [1 << 20_000 | 1]
    assert made_with(model) != made_with(other)
    assert attributes({"": model}) != attributes({"": other})
