"""Parts of the user's values, which every check takes from one function."""

import ctypes
import functools
import sys
import threading
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType, ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from lockstep.core.values import (
    OF_CLASS,
    differing,
    globals_of,
    inside,
    of_class,
    reached_from,
    refill,
    slots_of,
    text_of_size,
    text_of_table,
    text_of_tensor,
)

CONTEXT = ContextVar("context")
CONTEXT.set(1)


class Bag(list):
    pass


class Slotted:
    __slots__ = ("__own", "value")

    def __init__(self):
        self.value, self.__own = 1, 2


@dataclass(frozen=True, slots=True)
class Frozen:
    value: int = 1


class Base:
    shared = [1]

    @property
    def first(self):
        return self.shared[0]


class Derived(Base):
    rate = 0.5

    @functools.cached_property
    def second(self):
        return 2

    @staticmethod
    def third():
        return 3


def bag():
    made = Bag([1])
    made.name = "a"
    return made


def around():
    variable = 1

    def function(x=2, *, y=3):
        return variable, x, y

    function.calls = 4
    return function


def local():
    made = threading.local()
    made.value = 1
    return made


def table_of_objects():
    made = np.empty(2, object)
    made[:] = 1, 2
    return made


Pair = namedtuple("Pair", "a b")
KINDS = {
    "list": (lambda: [1, 2], {"x[0]": 1, "x[1]": 2}),
    "tuple": (lambda: Pair(1, 2), {"x[0]": 1, "x[1]": 2}),
    "deque": (lambda: deque([1]), {"x[0]": 1}),
    "dict": (lambda: {"a": 1, Base: 2}, {"x['a']": 1, "x[... 1]": 2}),
    "ordered": (lambda: OrderedDict(a=1), {"x['a']": 1}),
    "defaultdict": (lambda: defaultdict(int, a=1), {"x['a']": 1}),
    "proxy": (lambda: MappingProxyType({"a": 1}), {"x['a']": 1}),
    "set": (lambda: {1}, {"x[0]": 1}),
    "array": (table_of_objects, {"x[0]": 1, "x[1]": 2}),
    "numbers": (lambda: np.ones(2), {}),
    "subclass": (bag, {"x[0]": 1, "x.name": "a"}),
    "namespace": (lambda: SimpleNamespace(a=1), {"x.a": 1}),
    "UserDict": (lambda: UserDict(a=1), {"x.data": {"a": 1}}),
    "slots": (Slotted, {"x.value": 1, "x._Slotted__own": 2}),
    "frozen": (Frozen, {"x.value": 1}),
    "partial": (lambda: functools.partial(max, 1, key=2), {"x": max, "x[0]": 1, "x['key']": 2}),
    "method": (lambda: [7].append, {"x": [7]}),
    "function": (around, {"x.variable": 1, "x(default 0)": 2, "x(default y)": 3, "x.calls": 4}),
    "local": (local, {"x.value": 1}),
    "context": (lambda: CONTEXT, {"x": 1}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_value_has_its_parts(kind):
    make, expected = KINDS[kind]
    assert {part.path("x"): part.value for part in inside(make())} == expected


@pytest.mark.parametrize("kind", KINDS)
def test_another_value_is_put_where_that_is_possible(kind):
    value = KINDS[kind][0]()
    for part in inside(value):
        if not part.is_fixed:
            part.put(9)
    fixed = kind in ("tuple", "proxy", "set", "method", "context", "deque", "array", "numbers")
    found = inside(value)
    assert all(part.is_fixed for part in found) if fixed else 9 in [part.value for part in found]


def test_a_method_of_the_users_container_is_not_called():
    table = type("Table", (dict,), {"__getitem__": None, "__setitem__": None, "items": None, "__len__": None})()
    dict.__setitem__(table, "a", 1)
    (part,) = inside(table)
    part.put(2)
    assert dict.__getitem__(table, "a") == 2


def test_entries_are_given_up_to_a_number_and_attributes_without_some():
    value = bag()
    value += range(100)
    assert [part.key for part in inside(value, most=3)] == [0, 1, 2, "name"]
    assert [part.key for part in inside(value, ("name",), 1)] == [0]


def test_a_class_gives_functions_for_its_methods_and_what_it_inherits():
    found = {part.key: part.value for part in of_class(Derived)}
    assert (found["shared"], found["rate"]) == ([1], 0.5)
    assert [found[name](Derived()) for name in ("first", "second")] + [found["third"]()] == [1, 2, 3]
    assert not [*of_class(torch.nn.Linear)]


def test_a_static_method_stays_one_where_its_function_is_put_back():
    """One in a cache takes the object as its first argument otherwise."""

    class Cached(Base):
        @staticmethod
        @functools.lru_cache
        def mask(width):
            return width

    for part in of_class(Cached):
        part.put(part.value)
    assert Cached().mask(3) == 3


def test_a_slot_that_has_no_value_yet_is_none():
    assert slots_of(object.__new__(Slotted)) == {}


def reads_a_module():
    return SETTINGS.level + OTHER.level  # noqa: F821  globals of the test


def test_attributes_of_the_users_own_modules_are_found_by_their_names():
    one, other = ModuleType("one"), ModuleType("other")
    one.level, other.level, one.other, other.one, one.unread = 1, 2, other, one, 3
    space = {"SETTINGS": one, "OTHER": other, "torch": torch}
    found = [(part.key, part.value) for part in globals_of({"SETTINGS", "OTHER", "level", "other", "one"}, space)]
    assert ("level", 1) in found and ("level", 2) in found
    assert len(found) == 6  # each module once, though each has the other
    held = [part.value for part in reached_from(reads_a_module, 9) if part.how != OF_CLASS]
    assert torch not in held


def test_a_module_that_may_not_be_imported_or_that_other_code_imports_is_not_looked_into(monkeypatch):
    one, other = ModuleType("one"), ModuleType("other")
    one.level, other.level = 1, 2
    for name, module in (("blocked", None), ("one", one), ("other", other)):
        monkeypatch.setitem(sys.modules, name, module)
    found = globals_of({"blocked", "one"}, {}, {"level", "other"})  # an attribute has the name of the other one
    assert [(part.holder["__name__"], part.value) for part in found] == [("one", 1)]


def test_keys_that_differ_or_that_one_side_lacks_are_given():
    one, other = {"c": 1, "a": 1, "b": 1}, {"c": 2, "a": 1, "d": 1}
    assert differing(one, other) == ["c", "b", "d"]
    assert differing(one, dict(one)) == []


def test_a_digest_tells_long_lists_apart():
    one, other = list(range(100_000)), list(range(100_000))
    other[0] = -1
    assert text_of_size(one, 64)[0].startswith("100000 entries of digest ")
    assert text_of_size(one, 64) != text_of_size(other, 64)
    assert text_of_size([1], 64) == ("1 entries", False)


def test_tables_have_texts():
    pandas = pytest.importorskip("pandas")
    one, other = (pandas.DataFrame({"a": [1, 2], "b": ["x", each]}) for each in "yz")
    assert text_of_table(one) != text_of_table(other) and not text_of_table([])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_have_texts(layout):
    def text(value):
        parts = [torch.ones(2), torch.full((3,), value)]
        return text_of_tensor(torch.nested.nested_tensor(parts, layout=layout))

    assert text(1.0) == text(1.0) != text(2.0)


def test_structures_of_c_have_no_parts():
    assert inside(ctypes.c_int(1)) == []


def test_a_dict_whose_keys_are_tensors_gets_its_entries_back():
    """As one with an optimizer for each parameter, which raised torch's error about the value of a tensor."""
    first, second = torch.ones(2), torch.zeros(2)
    held = {second: 1, first: 2}
    refill(held, {first: 1, second: 2})
    assert [(id(key), value) for key, value in held.items()] == [(id(first), 1), (id(second), 2)]
