"""``lockstep train`` with gradients that are rounded and BatchNorm over the global batch."""

import pytest

SHORT = ("--epochs", "1", "--set", "log.tensorboard=false", "--set", "checkpoint.every_epochs=0")


@pytest.mark.slow
def test_bytes_are_shown_and_no_proof_is_offered_below_level_a(process):
    options = ("--set", "training.reduce=bf16", "--set", "training.sync_batch_norm=true")
    result = process("train", "digits", *SHORT, "--devices", "cpu:2", *options)
    assert result.returncode == 0, result.stderr
    # Half of the 154 kB of the float32 gradients, and 6.3 kB for the statistics of the two BatchNorms
    assert "sent         at most 83.4 kB per step and rank" in result.stdout
    assert "fingerprint" in result.stdout and "prove it" not in result.stdout


@pytest.mark.slow
def test_a_job_without_batch_norm_is_told_so_in_one_sentence(process):
    options = ("--set", "training.sync_batch_norm=true", "--set", "model.target=lockstep.models:perceptron")
    result = process("train", "digits", *SHORT, "--devices", "cpu:2", *options)
    assert result.returncode == 2
    told = result.stderr.splitlines()[0]
    assert "needs a model with BatchNorm1d, 2d or 3d, and this model has none. Remove sync_batch_norm." in told
    assert "Traceback (" not in result.stderr
