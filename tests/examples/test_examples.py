"""Every chapter of examples/ runs, on one process and on several, and prints what it promises."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LOCKSTEP = (sys.executable, "-m", "lockstep", "run", "--devices")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
PYTHON = (sys.executable,)


def run(launcher, name, *arguments):
    command = [*launcher, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fingerprint(output):
    (found,) = re.findall(r"fingerprint ([0-9a-f]{64})", output)
    return found


def number(output, name="accuracy"):
    return float(re.search(rf"{name} ([0-9.]+)", output).group(1))


@pytest.mark.parametrize(
    "launcher",
    [(*LOCKSTEP, "cpu:2"), pytest.param(TORCHRUN, marks=pytest.mark.slow)],
    ids=["lockstep run", "torchrun"],
)
def test_one_file_gives_one_fingerprint_under_python_and_a_launcher(launcher):
    assert fingerprint(run(launcher, "02_lockstep.py")) == fingerprint(run(PYTHON, "02_lockstep.py"))


@pytest.mark.slow
def test_one_file_prints_the_same_under_python_and_lockstep_run_and_is_as_accurate_as_a_plain_loop():
    alone = run(PYTHON, "02_lockstep.py")
    assert run((*LOCKSTEP, "cpu:2"), "02_lockstep.py") == alone
    single_device = number(run(PYTHON, "01_single_device.py"))
    assert single_device >= 0.94
    assert number(alone) == pytest.approx(single_device, abs=0.025)


@pytest.mark.slow
def test_a_stopped_run_ends_like_one_that_never_stopped(tmp_path):
    whole = run(PYTHON, "03_resume.py", "--directory", tmp_path / "whole")
    stopped = run((*LOCKSTEP, "cpu:2"), "03_resume.py", "--directory", tmp_path / "cut", "--stop-at", 17)
    assert "stopped after 17 steps" in stopped
    resumed = run((*LOCKSTEP, "cpu:3"), "03_resume.py", "--directory", tmp_path / "cut")
    assert "begins at epoch 1, step 17" in resumed
    assert fingerprint(resumed) == fingerprint(whole)


@pytest.mark.slow
def test_pretrained_weights_load_but_for_the_head_and_the_rest_is_frozen(tmp_path):
    output = run((*LOCKSTEP, "cpu:2"), "04_pretrained_and_frozen.py", "--weights", tmp_path / "five.safetensors")
    assert "14.weight" in output.partition("trained:")[0]
    assert "trained: 11.weight, 11.bias, 14.weight, 14.bias" in output
    assert number(output) > 0.9
    again = run(PYTHON, "04_pretrained_and_frozen.py", "--weights", tmp_path / "five.safetensors")
    assert fingerprint(again) == fingerprint(output)


@pytest.mark.slow
def test_a_program_launches_ranks_and_gets_one_result():
    output = run(PYTHON, "05_launch_from_python.py")
    assert output.count("one result") == 2
    assert "DIFFERENT" not in output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["06_bring_your_dataloader.py", "07_moving_average.py"])
def test_the_result_is_that_of_one_process(name):
    assert run((*LOCKSTEP, "cpu:2"), name) == run(PYTHON, name)
