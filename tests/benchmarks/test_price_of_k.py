"""The counts of ``benchmarks/strategies/price_of_k.py``."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def price_of_k(monkeypatch):
    """The script as a module; what it imports from its folder is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "strategies"))
    yield importlib.import_module("price_of_k")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("price_of_k", "run", "harness"):
            del sys.modules[name]


def test_a_rank_holds_a_partial_sum_for_every_one_in_the_number_of_micro_batches_it_has_done(price_of_k):
    assert [price_of_k.partial_sums(k, 2) for k in (2, 4, 8, 16, 32)] == [0, 1, 2, 3, 4]
    assert [price_of_k.partial_sums(3 * m, 3) for m in range(1, 10)] == [0, 1, 1, 2, 2, 2, 2, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("strategy, share", [("ddp", 1), ("fsdp", 2)])
def test_what_two_ranks_hold_is_what_the_formula_says(price_of_k, strategy, share):
    for k in (2, 4, 8):
        assert price_of_k.held(strategy, 2, k).gradients == pytest.approx(
            price_of_k.partial_sums(k, 2) / share, abs=1e-3
        )
