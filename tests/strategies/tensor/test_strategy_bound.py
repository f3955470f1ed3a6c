"""Strategy tensor against one device: 12 steps, every loss, norm, parameter, buffer and optimizer tensor."""

import logging
from functools import cache, partial

import pytest
import torch
from tests.ranks import run_ranks
from tests.strategies.contract_jobs import train
from tests.strategies.tensor.tensor_jobs import JOBS

from lockstep.runtime.lazy_compiler import postpone_compiler

pytestmark = pytest.mark.timeout(300)
FOUR = ("heads", "features", "channels", "blocks")
LAYOUTS = {
    "tensor 2": (2, {"strategy": "tensor"}),
    "tensor 3": (3, {"strategy": "tensor"}),
    "tensor 4": (4, {"strategy": "tensor"}),
    "data x tensor": (4, {"strategy": "hybrid", "mesh": "data=2,tensor=2"}),
    "tensor x data": (4, {"strategy": "hybrid", "mesh": "tensor=2,data=2"}),
}
BOUND = {torch.float64: 1e-10, torch.float32: 1e-3}
"""Largest difference, relative to the tensor's norm (or to 0.001 where that is less)."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "data x tensor")) for name in LAYOUTS],
)
@pytest.mark.slow
def test_twelve_steps_in_float64_are_those_of_one_device(name):
    compare(alone(), laid_out(name), torch.float64)


@pytest.mark.slow
def test_twelve_steps_in_float32_stay_within_the_bound():
    world, options = LAYOUTS["tensor 4"]
    jobs = ("features", "blocks")
    expected = run_ranks(train_jobs, 1, {"strategy": "single"}, torch.float32, jobs, timeout=120)[0]
    compare(expected, run_ranks(train_jobs, world, options, torch.float32, jobs, timeout=120)[0], torch.float32)


@pytest.mark.slow
def test_fp16_skips_the_same_steps_and_trains():
    """A loss scale that begins too high overflows on parts of layers: all ranks must skip the step."""
    options = {"strategy": "tensor", "precision": "fp16"}
    expected = run_ranks(train_jobs, 1, {**options, "strategy": "single"}, torch.float32, ("steep",), timeout=120)[0]
    found = run_ranks(train_jobs, 2, options, torch.float32, ("steep",), timeout=120)[0]
    assert int(found["steep"]["skipped"]) > 0
    assert int(found["steep"]["skipped"]) == int(expected["steep"]["skipped"])
    for name, tensor in expected["steep"].items():
        if name.startswith("loss"):
            assert torch.allclose(found["steep"][name].double(), tensor.double(), rtol=0.02), name


def compare(expected, found, dtype):
    for job in expected:
        assert set(found[job]) == set(expected[job]), f"{job}: other names"
        for name, tensor in expected[job].items():
            difference = float((found[job][name].double() - tensor.double()).norm())
            limit = BOUND[dtype] * max(1e-3, float(tensor.double().norm()))
            assert difference <= limit, f"{job}, {name}: {difference} is more than {limit}"


def train_jobs(world, options, dtype, jobs=FOUR):
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    return {job: train(world, partial(JOBS[job], dtype), options) for job in jobs}


@cache
def alone():
    return run_ranks(train_jobs, 1, {"strategy": "single"}, torch.float64, timeout=120)[0]


@cache
def laid_out(name):
    world, options = LAYOUTS[name]
    return run_ranks(train_jobs, world, options, torch.float64, timeout=120)[0]
