import datetime
import json
import random
import sys
from array import array
from collections import deque
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from lockstep.core.seeding import sample_seeds
from lockstep.data.keyed import (
    SampleKeys,
    content_of,
    encoded_states,
    generators_kept,
    generators_of,
    seed_generators,
    set_encoded_states,
)


def draw():
    return (
        torch.rand(3).tolist(),
        np.random.rand(3).tolist(),
        random.random(),
        np.random.randn(),
        random.gauss(0, 1),
    )


def test_the_same_seed_gives_the_same_numbers_from_all_three_generators():
    seed_generators(*sample_seeds(1, 2, [3]))
    first = draw()
    draw()
    seed_generators(*sample_seeds(1, 2, [3]))
    assert draw() == first


def test_the_generators_of_opencv_polars_and_numba_are_seeded_where_they_are_imported(monkeypatch):
    """Numbers that compiled code draws seldom differed with the number of processes, in silence."""
    found = []
    numba = SimpleNamespace(
        rnd_seed=lambda *given: found.append(given),
        rnd_get_np_state_ptr=lambda: "np",
        rnd_get_py_state_ptr=lambda: "py",
    )
    monkeypatch.setitem(sys.modules, "cv2", SimpleNamespace(setRNGSeed=lambda seed: found.append(("cv", seed))))
    monkeypatch.setitem(sys.modules, "numba._helperlib", numba)
    polars = SimpleNamespace(set_random_seed=lambda seed: found.append(("polars", seed)))
    monkeypatch.setitem(sys.modules, "polars", polars)
    for seed in (*sample_seeds(1, 2, [3]), *sample_seeds(1, 2, [3]), *sample_seeds(1, 2, [4])):
        seed_generators(seed)
    assert found[:4] == found[4:8] and [name for name, _ in found] == ["cv", "polars", "np", "py"] * 3
    assert not set(found[:4]) & set(found[8:])
    assert all(0 <= seed < 2 ** (31 if name == "cv" else 32) for name, seed in found)


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


def test_the_three_streams_are_not_copies_of_each_other():
    seed_generators(12345)
    drawn = torch.rand(1000, dtype=torch.float64).numpy(), np.random.rand(1000)
    assert abs(np.corrcoef(*drawn)[0, 1]) < 0.15
    assert not np.intersect1d(drawn[0].round(6), drawn[1].round(6)).size > 10


def test_generators_go_on_as_if_nothing_had_been_drawn():
    seed_generators(1)
    np.random.randn()  # leaves a second number waiting in NumPy's generator
    draw()
    with generators_kept():
        after_nothing = draw()
    with generators_kept():
        seed_generators(99)
        draw()
    assert draw() == after_nothing


def test_uniforms_of_a_sample_do_not_depend_on_the_micro_batch_it_is_in():
    together = SampleKeys(5, 1, np.array([3, 9, 4])).uniforms(7)
    alone = SampleKeys(5, 1, np.array([9])).uniforms(7)
    fewer = SampleKeys(5, 1, np.array([9])).uniforms(2)
    assert np.array_equal(together[1], alone[0])
    assert np.array_equal(fewer[0], alone[0, :2])


def test_uniforms_differ_by_seed_epoch_and_sample():
    drawn = {
        tuple(SampleKeys(seed, epoch, np.array([index])).uniforms(4)[0])
        for seed in (0, 1)
        for epoch in (-1, 0, 1)
        for index in (0, 1, 2)
    }
    assert len(drawn) == 18


def test_uniforms_are_spread_evenly_over_zero_to_one():
    drawn = SampleKeys(0, 0, np.arange(4000)).uniforms(5)
    assert drawn.min() >= 0.0 and drawn.max() < 1.0
    counts, _ = np.histogram(drawn, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi-squared with 19 degrees of freedom, p about 0.0001
    assert abs(np.corrcoef(drawn.T)[np.triu_indices(5, 1)]).max() < 0.06


def test_the_states_of_the_generators_go_to_another_process_as_json():
    random.gauss(0, 1)  # leaves a second number for the next call
    np.random.normal()
    sent = json.dumps(encoded_states())
    expected = (
        torch.rand(3).tolist(),
        np.random.normal(size=3).tolist(),
        [random.gauss(0, 1) for _ in range(3)],
    )
    set_encoded_states(json.loads(sent))
    found = torch.rand(3).tolist(), np.random.normal(size=3).tolist(), [random.gauss(0, 1) for _ in range(3)]
    assert found == expected


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
