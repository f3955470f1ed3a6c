"""``lockstep train`` as it is used: real processes, one result, one short report of what went wrong."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.printed import fingerprint_of

SHORT = ("--epochs", "1", "--set", "log.tensorboard=false", "--set", "checkpoint.every_epochs=0")

OWN_MODEL = """
import functools
from torch import nn

def passed_on(function):
    @functools.wraps(function)
    def call(**settings):
        return function(**settings)
    return call

@passed_on
def net(width=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


def proof_of(result):
    """The words of the command that a run prints as its proof."""
    (words,) = re.findall(r"^prove it +lockstep (.*?) {3}\(", result.stdout, re.MULTILINE)
    return shlex.split(words)


@pytest.fixture
def own_job(tmp_path):
    from lockstep.config.job_file import BUILT_IN_JOBS

    (tmp_path / "own_wrapped.py").write_text(OWN_MODEL)
    text = (BUILT_IN_JOBS / "digits.toml").read_text()
    path = tmp_path / "own.toml"
    path.write_text(text.replace("lockstep.models:digits_net", "own_wrapped:net"))
    return path


def test_the_same_job_ends_in_the_same_fingerprint_on_three_processes_and_on_one(process):
    on_three = process("train", "digits", *SHORT, "--set", "run.name=named", "--devices", "cpu:3")
    on_one = process(*proof_of(on_three))
    assert "cpu:1" in proof_of(on_three)
    assert fingerprint_of(on_three) == fingerprint_of(on_one)


@pytest.mark.slow
def test_ranks_of_torchrun_choose_one_run_folder_and_end_in_the_same_fingerprint(process, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Fmt: skip
    joined = subprocess.run(
        [*torchrun, "-m", "lockstep", "train", "digits", *SHORT, "--set", "run.name=named"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert fingerprint_of(joined) == fingerprint_of(process(*proof_of(joined)))
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["digits-001", "named"]


def test_a_refused_resume_names_a_remedy_that_the_command_has(process):
    """It named --force-context, which `lockstep train` does not take."""
    process("train", "digits", *SHORT, "--devices", "cpu:1")
    resume = (
        "train",
        "digits",
        *SHORT,
        "--epochs",
        "2",
        "--devices",
        "cpu:1",
        "--resume",
        "auto",
        "--precision",
        "bf16",
    )
    refused = process(*resume)
    (remedy,) = re.findall(r"in a job (--set \S+)\.$", refused.stderr, re.MULTILINE)
    assert refused.returncode == 2 and "precision: 'fp32' there, 'bf16' here" in refused.stderr
    assert fingerprint_of(process(*resume, *remedy.split()))


@pytest.mark.slow
def test_a_model_of_the_user_is_found_beside_the_job_file(process, own_job):
    result = process("train", str(own_job), *SHORT, "--devices", "cpu:2")
    assert fingerprint_of(result)


@pytest.mark.fault("M11")
def test_an_argument_that_only_the_ranks_can_refuse_is_one_error_and_status_two(process, own_job):
    """The model's signature is hidden behind a decorator, so the look into its source says nothing."""
    own_job.write_text(own_job.read_text().replace('own_wrapped:net"', 'own_wrapped:net"\nwidht = 4'))
    result = process("train", str(own_job), *SHORT, "--devices", "cpu:2")
    assert result.returncode == 2
    assert "model.widht is not an argument of own_wrapped:net. Did you mean 'width'?" in result.stderr.splitlines()[0]
    assert len(result.stderr.splitlines()) <= 6
    assert "was removed. Its logs are now in" in result.stderr.splitlines()[-1]
    assert not list(own_job.parent.glob("runs/*"))


@pytest.mark.parametrize("name", [pytest.param("broken", marks=pytest.mark.slow), "missing"])
def test_a_module_that_cannot_be_imported_is_named(process, own_job, name):
    own_job.with_name("own_broken.py").write_text("import surely_not_installed\n\n\ndef net(): ...\n")
    own_job.write_text(own_job.read_text().replace("own_wrapped:net", f"own_{name}:net"))
    result = process("train", str(own_job), *SHORT, "--devices", "cpu:2")
    assert result.returncode == 2
    assert ("surely_not_installed" if name == "broken" else "own_missing") in result.stderr
    assert (Path(own_job.parent) / "runs").exists() == (name == "broken")
