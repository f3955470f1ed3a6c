"""The cost of keys: a sample plan of a billion samples, and random numbers that follow from a sample's key."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable
from itertools import islice

import numpy as np
import torch
from harness import report
from harness.spread import Spread

from lockstep.core.generators import generators_kept, seed_generators
from lockstep.core.plan import BatchShape, SamplePlan
from lockstep.data.keyed import SampleKeys
from lockstep.data.loader import planned_steps

BILLION = 10**9
_STEPS = 640
_SAMPLES = 1024


def plan_section(rounds: int) -> str:
    """Milliseconds of a step and the most bytes at a time, of the plan alone."""
    rows = []
    for batch in (128, 1024, 8192):
        plan = SamplePlan(samples=BILLION, shape=BatchShape(global_batch=batch, micro_batches=8))
        times = Spread(tuple(_milliseconds_of_a_step(plan, number) for number in range(rounds)))
        rows.append([str(batch), times.text(3), f"{_peak(plan) / 1e6:.2f}"])
    head = ["global batch", "ms of a step", "MB at the most"]
    return "## The sample plan of 10^9 samples\n\n" + report.table(head, rows)


def _milliseconds_of_a_step(plan: SamplePlan, number: int) -> float:
    steps = planned_steps(plan, epoch=number, first=plan.steps_per_epoch // 2)
    began = time.perf_counter()
    for _ in islice(steps, _STEPS):
        pass
    return 1000 * (time.perf_counter() - began) / _STEPS


def _peak(plan: SamplePlan) -> int:
    tracemalloc.start()
    for _ in islice(planned_steps(plan, epoch=0), 100):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def randomness_section(rounds: int) -> str:
    """Microseconds a sample, beyond what the draws themselves cost."""
    rows = []
    for name, once in _WAYS.items():
        for _ in range(2):
            once()
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            once()
            times.append(1e6 * (time.perf_counter() - began) / _SAMPLES)
        rows.append([name, Spread(tuple(times)).text(2)])
    return "## Random numbers keyed by sample\n\n" + report.table(["way", "microseconds a sample"], rows)


def _for_any_transform() -> None:
    """Seeds torch, NumPy and random for every sample of steps of 128, as a rank without workers does."""
    for start in range(0, _SAMPLES, 128):
        with generators_kept():
            for seed in SampleKeys(0, 0, np.arange(start, start + 128)).seeds():
                seed_generators(seed)


def _draws_of_such_a_transform() -> None:
    """The same and one draw from each, which generates a generator's whole block of numbers."""
    for start in range(0, _SAMPLES, 128):
        with generators_kept():
            for seed in SampleKeys(0, 0, np.arange(start, start + 128)).seeds():
                seed_generators(seed)
                torch.rand(1)
                np.random.rand()
                random.random()


def _for_own_transforms() -> None:
    """Eight numbers for each sample, computed from the key."""
    for start in range(0, _SAMPLES, 16):
        SampleKeys(0, 0, np.arange(start, start + 16)).uniforms(8)


_WAYS: dict[str, Callable[[], None]] = {
    "seed torch, NumPy and random (any transform)": _for_any_transform,
    "the same, and one draw from each of the three": _draws_of_such_a_transform,
    "eight numbers from the key (transforms of ours)": _for_own_transforms,
}
