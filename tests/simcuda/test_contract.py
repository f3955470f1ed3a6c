"""Every strategy trains on simulated devices: one fingerprint, no race, and no wait of the host in a step."""

import pytest
from tests.simcuda.layouts import LAYOUTS, LEVEL_B, require

MODELS = ("perceptron", "convolutions", "decoder", "lstm")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("layout", "model"),
    # the axis ``tensor`` splits no LSTM
    [(layout, model) for layout in LAYOUTS for model in MODELS if model != "lstm" or layout not in LEVEL_B],
)
def test_every_layout_is_equal_to_one_device(trained, layout, model, precision):
    (reference,) = trained("single", model, precision=precision)
    require(trained(layout, model, precision=precision), reference, layout)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["ring", "bf16", "powersgd"])
def test_other_reducers_do_not_wait_and_do_not_race(trained, reduce):
    found = trained("ddp 3", "convolutions", reduce=reduce)
    require(found, found[0], "ddp 3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "places"),
    [
        ("ddp 2", {"lockstep/core/fingerprint.py"}),
        ("fsdp 2", {"lockstep/core/fingerprint.py"}),
        ("pipeline 2", {"lockstep/core/fingerprint.py", "lockstep/strategies/loop_writes.py"}),
    ],
)
def test_a_comparison_of_the_ranks_reads_once_in_each_place(trained, layout, places):
    """One sum for each tensor; where no rank has all of them, also what the loop has written to."""
    found = trained(layout, "convolutions", fingerprint_every=1)
    for each in found:
        reads = dict.fromkeys(places, 0)
        for (_, where), count in each.waits.items():
            reads[where.partition(":")[0]] += count
        assert reads == dict.fromkeys(places, each.steps - 1)  # between the steps that are observed
