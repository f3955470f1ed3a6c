"""Every strategy trains on simulated devices: one fingerprint, no race, and no wait of the host in a step."""

import pytest
from tests.simcuda.layouts import LAYOUTS, require

MODELS = ("perceptron", "convolutions", "decoder")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_equal_to_one_device(trained, layout, model, precision):
    (reference,) = trained("single", model, precision=precision)
    require(
        trained(layout, model, precision=precision), reference, layout, FP16 if precision == "fp16" else 0
    )


FP16 = 5
"""Waits of a step in fp16: torch's GradScaler reads whether gradients were finite before it steps (once for each
device), and the scale before and after; where ranks hold parts, they agree on it first."""


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["ring", "bf16", "powersgd"])
def test_other_reducers_do_not_wait_and_do_not_race(trained, reduce):
    (reference,) = trained("single", "convolutions")
    found = trained("ddp 3", "convolutions", reduce=reduce)
    require(found, reference, "tensor 2" if reduce != "powersgd" else "ddp 3", 0)
