"""The cause of a first step that differs between numbers of micro-batches."""

import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from lockstep.verify.micro_batches import AS_IT_IS, EVALUATING, WITHOUT_BATCH_NORM, FirstStep, Pass, compared

UNKNOWN = {"f": "is of data without an entry for each sample, so whether it is a mean over samples is not known."}


@pytest.mark.parametrize(
    ("norm", "deviations", "differs", "cause", "said"),
    [
        (True, UNKNOWN, {AS_IT_IS}, "batch_norm", "^BatchNorm"),
        (True, UNKNOWN, {AS_IT_IS, WITHOUT_BATCH_NORM}, "batch_norm", "^The model draws random.*mistake. BatchNorm"),
        (False, UNKNOWN, {AS_IT_IS}, "random", "^The model draws random"),
        (True, UNKNOWN, {AS_IT_IS, WITHOUT_BATCH_NORM, EVALUATING}, "loss", "^The loss f is of data"),
        (False, {}, {AS_IT_IS, EVALUATING}, "unknown", "^The cause was not found"),
    ],
)
def test_a_loss_is_the_cause_only_if_the_step_differs_in_evaluation_mode_too(
    tmp_path, norm, deviations, differs, cause, said
):
    """Dropout by a function beside BatchNorm, and a loss over graphs: the loss was named as the cause."""

    def step(micro_batches, variant=AS_IT_IS):
        path = str(tmp_path / f"{micro_batches}-{variant}.safetensors")
        size = 2.0 if micro_batches > 1 and variant in differs else 1.0
        save_file({"weight": np.full(3, size)}, path)
        found = FirstStep(micro_batches, passes=[Pass(size, path)], tolerance=1e-4, batch_norm=norm)
        found.deviations = deviations
        return found

    (_, found) = compared([step(1), step(8)], step)
    assert found.cause == cause
    assert re.search(said, found.text)


def test_padding_is_named_beside_a_loss_that_may_be_a_mean(tmp_path):
    """Sounds padded to the longest of a micro-batch, and CTC with joined texts: only the loss was named."""

    def step(micro_batches, variant=AS_IT_IS):
        path = str(tmp_path / f"{micro_batches}-{variant}.safetensors")
        save_file({"weight": np.full(3, float(micro_batches))}, path)
        found = FirstStep(micro_batches, passes=[Pass(float(micro_batches), path)], tolerance=1e-4)
        found.deviations, found.shapes = UNKNOWN, [f"({12 - micro_batches}, 6)"]
        return found

    (_, found) = compared([step(1), step(8)], step)
    assert found.cause == "loss"
    assert re.search("^The loss f is of data .* is not known. Samples have other shapes in smaller", found.text)
