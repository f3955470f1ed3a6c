import json
import random
import sys
from types import SimpleNamespace

import numpy as np
import torch

from lockstep.core.generators import encoded_states, generators_kept, seed_generators, set_encoded_states
from lockstep.core.seeding import sample_seeds


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
