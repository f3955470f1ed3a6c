"""The contract: one result, bit for bit, on every number of processes.

Each case is trained on several world sizes, and every loss, parameter, buffer, last gradient and optimizer state is
compared with those of one process. All cases of a world size share one group of processes.
"""

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from tests.ranks import run_ranks
from tests.strategies.jobs import JOBS
from tests.strategies.training import parameters_after, train_all

WORLDS = (1, 2, 3, 4, 5, 8)
pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Case:
    """A job, how it is run, and on how many processes."""

    job: str
    worlds: tuple = WORLDS
    options: dict = field(default_factory=dict)
    workers: dict = field(default_factory=dict)
    """Loader workers by world size."""

    @property
    def name(self):
        return "-".join([self.job, *(f"{value}" if key == "precision" else key for key, value in self.options.items())])


CASES = [
    Case("resnet", (3,)),
    Case("recurrent", (2,)),
    Case("experts_accumulating", (3,)),
    Case("mixed", (3,), {"channels_last": True}),
    Case("saving", (3,)),
]
"""Those of ``make test``; ``PRODUCT`` and ``WIDE`` (``make test-all``) have every job and number of processes."""
WIDE = [
    Case("resnet", (3,), {"sync_batch_norm": True}),  # in make test: test_concurrent_micro_batches_multiprocess
    Case("attention", (2,), {"precision": "fp16"}),
    Case("digits", (3,), {"precision": "fp16"}),
    Case("resnet", (2,), {"precision": "bf16", "channels_last": True}),
    Case("recurrent", (3,), {"precision": "bf16"}),
    Case("digits", (8,)),
    Case("augmented", (3, 5, 8), workers={3: 1}),
    Case("experts_accumulating", (4, 5)),
    Case("two_threads", (2,)),
    Case("mixed", (5,), {"channels_last": True}),
    Case("saving", (4,)),
]
PRODUCT = [
    Case(job, (2, 3, 4, 5) if "experts" in job else WORLDS, {"precision": precision, "channels_last": layout})
    for job in ("digits", "digits_adamw", "resnet", "resnet_frozen", "attention", "recurrent", "experts")
    for precision in ("fp32", "bf16", "fp16")
    for layout in (False, True)
]
COLLECTIVES = [Case(job, (3,), {"shared_memory": False}) for job in ("resnet", "experts_accumulating", "mixed")]


def test_every_job_is_in_a_case():
    assert {case.job for case in PRODUCT + WIDE} == set(JOBS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.fault("C6", "C8", "M4")
def test_every_number_of_processes_gives_the_result_of_one(case):
    require_one_result(case, "cases")


@pytest.mark.parametrize("case", COLLECTIVES, ids=lambda case: case.job)
def test_collectives_give_the_result_of_shared_memory(case):
    require_one_result(case, "collectives")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("case", PRODUCT + WIDE, ids=lambda case: f"{case.name}-{case.options.get('channels_last')}")
def test_every_job_in_every_precision_and_layout(case):
    alone = trained(1, (as_tuple(case, 1),))
    for world_size in set(case.worlds) - {1}:
        for rank, found in enumerate(trained(world_size, (as_tuple(case, world_size),))):
            require_same(case, found[case.name], alone[0][case.name], f"rank {rank} of {world_size}")


@pytest.mark.slow
@pytest.mark.parametrize("job", ["digits", "recurrent"])
def test_a_ring_gives_other_bits_that_are_close(job):
    """The counter-check: what is compared here does depend on the order of sums.

    The bound holds where gradients are more than rounding noise. The bias of an attention's keys has none but noise,
    which Adam divides by its own size: there the relative difference after 14 steps is 7e-5.
    """
    alone = run_ranks(parameters_after, 1, job, {})[0]
    ordered = run_ranks(parameters_after, 4, job, {})[0]
    assert torch.equal(ordered, alone)
    ring = run_ranks(parameters_after, 4, job, {"reduce": "ring"})[0]
    assert not torch.equal(ring, alone)
    assert float((ring - alone).norm() / alone.norm()) < 1e-5


def require_one_result(case, group):
    expected = of_world(1, group)[0][case.name]
    for world_size in case.worlds:
        for rank, found in enumerate(of_world(world_size, group)):
            require_same(case, found[case.name], expected, f"rank {rank} of {world_size}")


def require_same(case, found, expected, who):
    """Names what differs first, and how much."""
    assert list(found) == list(expected), f"{case.name}, {who}: other names"
    different = [name for name in expected if found[name] != expected[name]]
    assert not different, (
        f"{case.name}: {who} has other bits than one process in {len(different)} of {len(expected)} values, "
        f"first in {different[0]!r} ({found[different[0]]} instead of {expected[different[0]]}), then {different[1:6]}"
    )


def of_world(world_size, group):
    chosen = {"cases": CASES, "collectives": COLLECTIVES}[group]
    return trained(world_size, tuple(as_tuple(c, world_size) for c in chosen if world_size in (1, *c.worlds)))


def as_tuple(case, world_size):
    return case.name, case.job, tuple(case.options.items()), case.workers.get(world_size, 0)


@cache
def trained(world_size, cases):
    """The state of each rank of a world after these cases, by name."""
    threads = 1
    plain = [(name, job, dict(options), workers) for name, job, options, workers in cases]
    return run_ranks(train_all, world_size, plain, threads=threads, timeout=300)
