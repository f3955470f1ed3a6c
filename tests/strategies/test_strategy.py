"""The contract over all strategies: the same start and data, 12 steps with clipping and a ragged tail, one result.

Level A: every loss, norm, parameter, buffer and optimizer tensor has the bits of ``single``. Level B: within a bound.
Level C has tests of its own: ``parameter_server/asynchronous/test_digits_accuracy.py``.
"""

from dataclasses import dataclass, field
from functools import cache

import pytest
from tests.ranks import run_ranks
from tests.strategies.contract_jobs import JOBS, train_all

from lockstep.config.strategy_options import STRATEGIES
from lockstep.core.fingerprint import digest_tensors

pytestmark = pytest.mark.timeout(600)
PRECISIONS = ("fp32", "fp16")
UNTIED = ("perceptron", "resnet", "attention_untied")
"""Where a weight cannot be tied across stages."""


@dataclass(frozen=True)
class Layout:
    """A strategy on a number of processes."""

    strategy: str
    world: int
    options: dict = field(default_factory=dict)
    jobs: tuple = ("perceptron", "resnet", "attention")
    bound: float = 0.0
    """Largest relative difference of a tensor from ``single``; 0: equal bits."""
    slow: bool = False
    """Left to ``make test-all``."""

    @property
    def name(self):
        told = [
            value for each in self.options.values() for value in (each.values() if isinstance(each, dict) else [each])
        ]
        return "-".join(map(str, [self.strategy, self.world, *told]))

    @property
    def settings(self):
        return {"strategy": self.strategy, **self.options}


LAYOUTS = [
    Layout("single", 1),
    *[Layout("dp", 1, {"dp": {"replicas": count}}, slow=count != 3) for count in (1, 2, 3, 4)],
    *[Layout("layers", 1, {"layers": {"devices": count}}, UNTIED, slow=count != 3) for count in (2, 3, 4)],
    Layout("hybrid", 2, {"mesh": "data=2,layers=2"}, UNTIED, slow=True),
    *[
        Layout("parameter_server", world, {"parameter_server": {"servers": servers}}, slow=servers == 1)
        for world, servers in ((2, 1), (3, 1), (4, 2), (4, 1))
    ],
    *[Layout("ddp", world, slow=True) for world in (2, 3, 4)],  # of their own: test_ddp_multiprocess
    *[Layout("fsdp", world, slow=True) for world in (2, 3, 4)],  # and fsdp/test_gathering_...
    *[Layout("pipeline", world, jobs=UNTIED, slow=True) for world in (2, 3, 4)],  # and pipeline/test_strategy_...
    Layout("pipeline", 3, {"pipeline": {"schedule": "gpipe"}}, UNTIED, slow=True),
    Layout("pipeline", 2, {"pipeline": {"schedule": "interleaved"}}, UNTIED, slow=True),
    Layout("tensor", 2, bound=1e-3, slow=True),  # of its own: tensor/test_strategy_bound
    Layout("hybrid", 4, {"mesh": "data=2,tensor=2"}, bound=1e-3, slow=True),
    Layout("hybrid", 4, {"mesh": "data=2,pipeline=2"}, UNTIED, slow=True),
    Layout("hybrid", 4, {"mesh": "pipeline=2,data=2", "pipeline": {"schedule": "interleaved"}}, UNTIED, slow=True),
    Layout("hybrid", 4, {"mesh": "fsdp=2,pipeline=2"}, UNTIED, slow=True),
    Layout("hybrid", 4, {"mesh": "pipeline=2,fsdp=2", "pipeline": {"schedule": "interleaved"}}, UNTIED, slow=True),
    Layout("fsdp", 8, slow=True),
]


def parameters(layouts):
    return [pytest.param(each, marks=[pytest.mark.slow] * each.slow, id=each.name) for each in layouts]


def precisions():
    return [pytest.param(each, marks=[pytest.mark.slow] * (each != "fp32")) for each in PRECISIONS]


def test_every_strategy_has_a_layout():
    assert {layout.strategy for layout in LAYOUTS} == set(STRATEGIES)


@pytest.mark.parametrize("precision", precisions())
@pytest.mark.parametrize("layout", parameters(each for each in LAYOUTS if not each.bound))
def test_a_strategy_of_level_a_gives_the_bits_of_one_device(layout, precision):
    for job in layout.jobs:
        expected, found = alone(precision)[job], laid_out(LAYOUTS.index(layout), precision)[job]
        assert set(found) == set(expected), f"{layout.name}, {job}: other names"
        wanted, given = digest_tensors(expected), digest_tensors(found)
        different = [name for name in wanted if given[name] != wanted[name]]
        assert not different, (
            f"{layout.name}, {job}, {precision}: {len(different)} of {len(wanted)} tensors have other bits, first "
            f"{different[0]!r} ({found[different[0]]} instead of {expected[different[0]]}), then {different[1:6]}"
        )


@pytest.mark.parametrize("layout", parameters(each for each in LAYOUTS if each.bound))
def test_a_strategy_of_level_b_stays_within_its_bound(layout):
    for job in layout.jobs:
        expected, found = alone("fp32")[job], laid_out(LAYOUTS.index(layout), "fp32")[job]
        assert set(found) == set(expected), f"{layout.name}, {job}: other names"
        for name, tensor in expected.items():
            difference = (found[name].double() - tensor.double()).norm()
            assert difference <= layout.bound * max(1e-3, float(tensor.double().norm())), (
                job,
                name,
                difference,
            )


def test_twelve_steps_train():
    """The counter-check: what is compared here moves."""
    for job in JOBS:
        found = alone("fp32")[job]
        assert float(found["loss 11"]) != float(found["loss 00"])
        assert any(float(found[f"norm {step:02}"]) > 0.3 for step in range(12)), "nothing was clipped"


def cases(jobs, settings):
    return [(job, job, settings) for job in jobs]


@cache
def alone(precision):
    return run_ranks(train_all, 1, cases(JOBS, {"strategy": "single", "precision": precision}), timeout=300)[0]


@cache
def laid_out(number, precision):
    layout = LAYOUTS[number]
    settings = {**layout.settings, "precision": precision}
    return run_ranks(train_all, layout.world, cases(layout.jobs, settings), timeout=300)[0]
