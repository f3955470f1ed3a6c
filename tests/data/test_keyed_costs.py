"""The cost of keys, as the project promises it; the numbers of a machine are in benchmarks/loading."""

import statistics
import time
import tracemalloc
from itertools import islice

import numpy as np
import pytest

from lockstep.core.generators import generators_kept, seed_generators
from lockstep.core.plan import BatchShape, SamplePlan
from lockstep.data.keyed import SampleKeys
from lockstep.data.loader import planned_steps

BILLION = SamplePlan(samples=10**9, shape=BatchShape(global_batch=1024, micro_batches=8))
MOST_BYTES = 50 * 10**6
MOST_SECONDS_OF_A_STEP = 1e-3
MOST_SECONDS_OF_A_SAMPLE = 10e-6


def test_the_plan_of_a_billion_samples_is_computed_in_place_and_in_under_50_megabytes():
    tracemalloc.start()
    steps = list(islice(planned_steps(BILLION, epoch=3, first=500_000), 64))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MOST_BYTES
    seen = np.concatenate([part for step in steps for part in step.indices])
    assert len(np.unique(seen)) == len(seen) and seen.min() >= 0 and seen.max() < BILLION.samples
    wanted = BILLION.step(3, 500_063)
    assert all(np.array_equal(a, b) for a, b in zip(steps[-1].indices, wanted.indices, strict=True))


@pytest.mark.slow
def test_a_step_of_a_billion_samples_is_planned_in_under_a_millisecond():
    steps, times = planned_steps(BILLION, epoch=0), []
    for _ in range(40):
        began = time.process_time()
        for _ in islice(steps, 64):
            pass
        times.append((time.process_time() - began) / 64)
    assert statistics.median(times) < MOST_SECONDS_OF_A_STEP


@pytest.mark.slow
def test_randomness_keyed_by_sample_costs_under_ten_microseconds_a_sample():
    """As a step of 128 samples that are read here has it: state kept once, three generators seeded for each sample."""
    times = []
    for epoch in range(200):
        keys = SampleKeys(0, epoch, np.arange(128))
        began = time.process_time()
        with generators_kept():
            for seed in keys.seeds():
                seed_generators(seed)
        times.append((time.process_time() - began) / 128)
    assert statistics.median(times) < MOST_SECONDS_OF_A_SAMPLE
