"""``lockstep train --dry-run``: says what would run, and leaves nothing behind."""

import subprocess
import sys
from pathlib import Path

import pytest


def test_the_default_job_is_described_and_nothing_is_written(command):
    status, output, errors = command("train", "--dry-run", "--devices", "cpu:3")
    assert (status, errors) == (0, "")
    assert "lockstep.data:Digits, 1,438 samples; evaluation: 359 samples" in output
    assert "lockstep.models:digits_net" in output
    assert "cpu:3 (3 ranks of 1 thread," in output
    assert "optimizer steps" in output
    assert "learning rate over" in output
    assert "runs/digits-001" in output
    assert not list(Path().iterdir())


def test_what_would_be_refused_is_refused_first(command):
    status, output, errors = command("train", "--dry-run", "--set", "training.micro_batches=7")
    assert (status, output) == (2, "")
    assert "micro_batches=7 does not divide" in errors


def test_what_is_no_model_is_said_to_be_none(command):
    status, output, errors = command("train", "--dry-run", "--set", 'model={target="lockstep.data:Digits"}')
    assert (status, output) == (2, "")
    assert errors == "lockstep: model: lockstep.data:Digits made a Digits, not a torch.nn.Module.\n"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("optimizer.lr=-1", "optimizer: torch.optim:SGD(lr=-1, "),
        ("loss.target=torch.nn:Softmax2", "torch.nn has no 'Softmax2'"),
        ("training.max_steps=1000", "training.max_steps is 1000, but training.epochs=20 are"),
        ("weights.freeze=['*']", "leaves nothing to train"),
    ],
)
def test_a_dry_run_makes_optimizer_schedule_and_loss_too(command, setting, said):
    """It made the model and the data alone, and so passed jobs that no rank could begin."""
    status, output, errors = command("train", "--dry-run", "--set", setting)
    assert (status, output) == (2, "")
    assert said in errors


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    code = "import sys; from lockstep.cli import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code, "train", "--dry-run"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path,
    ) as writer:  # fmt: skip
        writer.stdout.close()
        errors = writer.stderr.read()
    assert writer.returncode == 141
    assert errors == b""
