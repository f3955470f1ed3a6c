"""``lockstep verify`` on real jobs: equal ones, and some whose own code depends on the layout."""

import json
import os
import signal
import subprocess
import sys

import pytest
from tests.launch.command import wait_until

from lockstep.config.job_file import BUILT_IN_JOBS

PARTS = """
import os
import torch
from torch import nn
from lockstep.data import Digits

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

class Shifted(Digits):
    '''Images that depend on which process reads them.'''
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image + RANK, label
    get_batch = None

class ScaledLoss(nn.CrossEntropyLoss):
    '''Divides by the number of processes once more.'''
    def forward(self, output, target):
        return super().forward(output, target) / WORLD

class Drawing(nn.Module):
    '''A layer that draws numbers of the process.'''
    def forward(self, x):
        return x + 0.1 * torch.rand(x.shape, generator=torch.Generator().manual_seed(RANK))

def net(noisy=False):
    first = [Drawing()] if noisy else []
    return nn.Sequential(nn.Flatten(), *first, nn.Linear(64, 10))
"""
SHORT = ("--steps", "3", "--devices", "2", "--strategies", "ddp", "--set", "data.workers=0")


@pytest.fixture
def job(tmp_path):
    (tmp_path / "own_parts.py").write_text(PARTS)
    text = (BUILT_IN_JOBS / "digits.toml").read_text()
    (tmp_path / "own.toml").write_text(text.replace("lockstep.models:digits_net", "own_parts:net"))
    return tmp_path / "own.toml"


def verified(process, job, *arguments):
    result = process("verify", str(job), *SHORT, "--json", "found.json", *arguments)
    return result, json.loads((job.parent / "found.json").read_text())[-1]


@pytest.mark.slow
def test_a_sound_job_has_equal_bits_in_every_layout(process, tmp_path):
    result = process(
        "verify", "digits", "--steps", "2", "--devices", "2", "--set", "data.workers=0", "--json", "all.json"
    )
    assert result.returncode == 0, result.stderr
    found = {each["layout"]: each for each in json.loads((tmp_path / "all.json").read_text())}
    for each in found.values():
        assert each["reached"] == each["promised"], each
        assert each["memory"] and each["milliseconds"] > 0
    assert {"single on 1", "dp on 2", "ddp on 2", "fsdp on 2", "layers on 2", "pipeline on 2"} <= set(found)
    assert found["parameter_server (asynchronous) on 2"]["reached"] == "C"
    assert found["ddp on 2"]["sent"] > 0
    assert not (tmp_path / "runs").exists(), "verify leaves nothing in the user's folders"


def test_a_sound_job_has_equal_bits(process, job):
    result, found = verified(process, job)
    assert result.returncode == 0, result.stderr
    assert (found["layout"], found["promised"], found["reached"]) == ("ddp on 2", "A", "A")
    assert found["sent"] > 0 and found["memory"] and found["milliseconds"] > 0
    assert not (job.parent / "runs").exists(), "verify leaves nothing in the user's folders"


@pytest.mark.slow
def test_a_job_goes_on_in_every_layout_with_equal_bits(process, tmp_path):
    layouts = ("--devices", "2", "--strategies", "ddp,fsdp,parameter_server", "--set", "data.workers=0")
    result = process("verify", "digits", *layouts, "--steps", "5", "--stop-after", "3", "--json", "all.json")
    assert result.returncode == 0, result.stderr
    found = {each["layout"]: each for each in json.loads((tmp_path / "all.json").read_text())}
    resumed = [label for label in found if ", then " in label]
    assert resumed == [
        "single on 1, then ddp on 2",
        "ddp on 2, then fsdp on 2",
        "fsdp on 2, then parameter_server on 2",
        "parameter_server on 2, then single on 1",
    ]
    assert all(found[label]["reached"] == "A" and not found[label]["warnings"] for label in resumed)


@pytest.mark.slow
def test_a_ring_is_named_as_another_order_of_sums(process, job):
    result, found = verified(process, job, "--set", "training.reduce=ring", "--devices", "4")
    assert result.returncode == 0
    assert (found["promised"], found["reached"], found["cause"]) == ("B", "B", "reduction_order")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "steps", "reached", "code"),
    [("torch.nn:CrossEntropyLoss", "24", "~", 0), ("own_parts:ScaledLoss", "3", "-", 1)],
)
def test_what_is_beyond_the_bound_is_compared_with_the_model_s_own_sensitivity(
    loss, steps, reached, code, process, job
):
    settings = ("--set", "model.target=lockstep.models:digits_net", "--set", f"loss.target={loss}")
    result, found = verified(process, job, *settings, "--strategies", "tensor", "--steps", steps)
    assert result.returncode == code, result.stdout + result.stderr
    assert (found["promised"], found["reached"]) == ("B", reached), found
    assert found["difference"] > 1e-3 and found["sensitivity"] > 0
    assert "whose inputs and layers change by one unit in the last place differs by up to" in result.stdout


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (("loss.target", "own_parts:ScaledLoss"), "loss"),
        pytest.param(("model.noisy", "true"), "refused", marks=pytest.mark.slow),
        pytest.param(("data.train.target", "own_parts:Shifted"), "refused", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_job_whose_code_depends_on_the_layout_is_found_out(change, cause, process, job):
    result, found = verified(process, job, "--set", "=".join(change))
    assert result.returncode == 1, result.stdout + result.stderr
    assert found["cause"] == cause
    said = "refused while it trained" if cause == "refused" else "differs since step 0"
    assert said in result.stdout


@pytest.mark.slow
def test_a_strategy_that_was_named_and_cannot_run_the_job_says_why_and_proves_nothing(process, job):
    result = process(
        "verify",
        str(job),
        *SHORT[:4],
        "--strategies",
        "pipeline",
        "--set",
        "data.workers=0",
        "--devices",
        "3",
    )
    assert result.returncode == 1, result.stderr
    assert "pipeline on 3 did not run: strategy 'pipeline' needs 3 stages" in result.stdout


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 75, marks=pytest.mark.slow),
    ],
)
def test_a_command_that_is_asked_to_stop_ends_at_once_and_leaves_nothing(number, code, tmp_path):
    """Not the layout that runs just then alone, as if it could not run the job."""
    program = "import sys; from lockstep.cli import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "verify", "digits", *SHORT, "--steps", "300"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    with process:
        assert process.stderr.readline().startswith("running ddp on 2")
        wait_until(lambda: [*tmp_path.glob("lockstep-verify-*/0/logs")], 60, "the second layout")
        process.send_signal(number)
        assert (process.wait(60), process.stderr.read()) == (code, "")
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_refused_in_a_sentence(process):
    nothing = ["--devices", "1", "--strategies", "pipeline"]
    for arguments in (["--devices", "two"], ["--strategies", "dpp"], ["--steps", "0"], nothing):
        result = process("verify", "digits", *arguments)
        assert result.returncode == 2
        assert len(result.stderr.splitlines()) == 1
