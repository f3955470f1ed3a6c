import datetime
import random
from array import array
from collections import deque
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from lockstep.data.rereading import content_of, generators_of


class Odd:
    """Makes of any attribute one of itself, as objects of torch that wrap C functions do."""

    __slots__ = "own"

    @property
    def __dict__(self):
        return self

    def __getattr__(self, name):
        return Odd()


def test_generators_are_found_wherever_a_data_set_leads_to_them():
    made = [random.Random(n) for n in range(5)]
    inner = Odd()
    inner.own = made[0]

    class Reader:
        shared = made[1]

        def __init__(self):
            self.parts = [{"a": partial(len, made[2])}, inner, made[3].random]

        def read(self):
            return made[4]

    found = generators_of({"Reader": Reader()})
    assert {id(each) for each in found.values()} == set(map(id, made))


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


@dataclass
class Extended:
    one: int = 1

    def __post_init__(self):
        self.other = None


def extended(value):
    made = Extended()
    made.other = value
    return made


def table_of(value):
    made = np.empty(1, object)
    made[0] = [value]
    return made


# Each was no content of a sample, so that one which differed was taken for equal.
CONTENT = {
    "a deque": lambda value: deque([value]),
    "a set": lambda value: {value, "a"},
    "slots": Slotted,
    "an attribute beside fields": extended,
    "an array of objects": table_of,
    "a mask": lambda value: np.ma.MaskedArray([1.0, 2.0], [0, value - 1]),
    "bytes": lambda value: bytearray([value]),
    "an array": lambda value: array("d", [value]),
    "complex": lambda value: complex(value),
    "compressed rows": lambda value: (torch.eye(2) * value).to_sparse_csr(),
    "a large number": lambda value: 10**5_000 + value,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("name", CONTENT)
def test_all_that_a_sample_holds_is_its_content(name):
    make = CONTENT[name]
    assert content_of([make(1)]) == content_of([make(1)]) != content_of([make(2)])


def test_content_may_refer_to_itself_and_to_times():
    def sample():
        made = [1, SimpleNamespace(read_at=datetime.datetime.now(), path="/tmp/a", value=2)]
        made.append(made)
        return made

    assert content_of(sample()) == content_of(sample())


@pytest.mark.timeout(60)
def test_the_content_of_a_graph_of_objects_is_read_in_a_while():
    """Each way through the graph was followed: a run hung before its first step."""

    def graph(value):
        nodes = [SimpleNamespace(value=number) for number in range(40)]
        for number, node in enumerate(nodes):
            node.near = [nodes[(number * 7 + other) % 40] for other in range(1, 7)]
        nodes[0].value = value
        return nodes

    assert content_of(graph(0)) == content_of(graph(0)) != content_of(graph(1))


def test_the_text_of_common_samples_is_what_checkpoints_have():
    """Digests of samples are compared with those of a run that another version of Lockstep began."""
    assert content_of((1, "a", 2.5, b"c", True, None, {"k": [3]})) == [
        "1",
        "'a'",
        "2.5",
        "b'c'",
        "True",
        "'k'",
        "3",
    ]
    assert len(content_of([torch.ones(3), np.ones(3, np.float32)])) == 2


def test_generators_in_modules_sets_and_methods_are_found():
    made = [random.Random(n) for n in range(4)]
    module = ModuleType("tools_of_a_test")
    module.generator, module.unread = made[0], random.Random(9)

    def keeps(*, held=made[3]):
        return held

    space = {"module": module}
    roots = {"read": eval("lambda: module.generator", space), "held": [{made[1]}, made[2].random, keeps]}
    assert set(map(id, generators_of(roots).values())) == set(map(id, made))
