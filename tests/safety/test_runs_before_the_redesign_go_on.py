"""Run folders that the commit before the redesign stopped halfway go on, and replay: their formats have not changed.

``tests/fixtures/runs_before_redesign`` has a run of each strategy; its README says how they were made. Bits depend on
the CPU, so ends are not compared with the machine that made them: all layouts go on from one checkpoint to one end.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.printed import fingerprint_of

from lockstep.cli import main

RUNS = Path(__file__).parent.parent / "fixtures" / "runs_before_redesign"
LAYOUTS = {
    "single": ("--devices", "1"),
    "dp": ("--devices", "cpu:2"),
    "ddp": ("--devices", "cpu:2"),
    "fsdp": ("--devices", "cpu:2"),
    "layers": ("--devices", "cpu:2"),
    "pipeline": ("--devices", "cpu:2"),
    "hybrid": ("--devices", "cpu:4", "--mesh", "fsdp=2,pipeline=2"),
    "parameter_server": ("--devices", "cpu:3"),
    "tensor": ("--devices", "cpu:2"),
}
QUICK = ("ddp",)
ELSEWHERE = ("--set", "checkpoint.force_context=true")
"""The checkpoints were written on another machine."""
pytestmark = pytest.mark.timeout(300)


def strategies(quick):
    return [pytest.param(each, marks=[pytest.mark.slow] * (each not in quick)) for each in LAYOUTS]


@pytest.fixture
def go_on(tmp_path):
    """Goes on with a copy of a strategy's run under the layout of some strategy; the finished command."""

    def run(stopped, strategy):
        home = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(RUNS / stopped, home / "runs" / stopped)
        shutil.copy(RUNS / "small.toml", home)
        command = [sys.executable, "-m", "lockstep", "train", "small.toml", "--resume", f"runs/{stopped}"]
        command += ["--strategy", strategy, *LAYOUTS[strategy], *ELSEWHERE]
        return subprocess.run(command, cwd=home, capture_output=True, text=True)

    return run


def test_there_is_a_run_of_each_strategy():
    assert {path.name for path in RUNS.iterdir() if path.is_dir()} == set(LAYOUTS)


@pytest.mark.parametrize("stopped", strategies(QUICK))
def test_a_run_goes_on_to_one_end_under_its_own_strategy_and_on_one_device(stopped, go_on):
    own = go_on(stopped, stopped)
    assert re.search(r"Resumed from .*step-000000\d\d: epoch 2", own.stdout + own.stderr)
    alone = fingerprint_of(go_on(stopped, "single"))
    if stopped == "tensor":  # level B: its sums have another order
        assert fingerprint_of(own)
    else:
        assert fingerprint_of(own) == alone


@pytest.mark.slow
@pytest.mark.parametrize("stopped", LAYOUTS)
def test_a_run_goes_on_to_the_same_end_on_two_devices(stopped, go_on):
    assert fingerprint_of(go_on(stopped, "ddp")) == fingerprint_of(go_on(stopped, "single"))


# Level A alone is recorded
@pytest.mark.parametrize(
    "stopped",
    [
        pytest.param(each, marks=[pytest.mark.slow] * (each not in ("ddp", "hybrid")))
        for each in LAYOUTS
        if each != "tensor"
    ],
)
def test_a_step_of_a_run_is_replayed(stopped, tmp_path, monkeypatch, capsys):
    """The record is read and compared with; whether the bits are equal depends on the CPU."""
    shutil.copytree(RUNS / stopped, tmp_path / "runs" / stopped)
    monkeypatch.chdir(tmp_path)
    recorded = [json.loads(line) for line in (RUNS / stopped / "gradients.jsonl").read_text().splitlines()]
    (record,) = [each for each in recorded if each["step"] == 20]
    status = main(["replay", f"runs/{stopped}", "--step", "20", "--force-context"])
    told = capsys.readouterr().out
    assert status in (0, 1), told
    assert "from      step-00000015, 5 steps before" in told
    assert re.search(r"^record    ", told, re.MULTILINE)
    loss = float(re.search(r"^loss +(\S+)$", told, re.MULTILINE)[1])
    assert loss == pytest.approx(float.fromhex(record["loss"]), rel=1e-3)
