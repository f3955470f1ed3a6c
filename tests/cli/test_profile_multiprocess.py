"""``lockstep train --profile`` and ``lockstep run --profile``: one file of all ranks, or one sentence why not."""

import json

import pytest

SCRIPT = """\
import torch
from torch.nn import Linear
from torch.nn.functional import mse_loss
import lockstep
run = lockstep.init(global_batch=8, micro_batches=4, directory="runs/own", profile="0:1")
model = Linear(3, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), values_from_main=True)
for epoch in run.epochs(1):
    for batch in run.batches(torch.utils.data.TensorDataset(torch.ones(40, 3), torch.ones(40, 1))):
        run.backward(batch, mse_loss)
        optimizer.step()
        optimizer.zero_grad()
"""
SHORT = ("--epochs", "1", "--set", "log.tensorboard=false", "--set", "checkpoint.every_epochs=0")


def test_all_ranks_write_the_steps_that_were_asked_for_into_one_file(process, command, tmp_path):
    result = process("train", "digits", *SHORT, "--devices", "cpu:2", "--profile", "1:2")
    assert result.returncode == 0, result.stderr
    path = tmp_path / "runs" / "digits-001" / "timeline.json"
    assert "/runs/digits-001/timeline.json. Open it with" in result.stderr
    assert "--profile" not in result.stdout and "prove it" in result.stdout
    events = json.loads(path.read_text())["traceEvents"]
    steps = {(e["pid"], e["args"]["step"]) for e in events if e.get("cat") == "steps"}
    assert steps == {(rank, step) for rank in (0, 1) for step in (1, 2)}
    for rank in (0, 1):
        lanes = {event["cat"] for event in events if event["pid"] == rank and event["ph"] == "X"}
        assert {"reduce, in flight", "reduce, exposed", "forward", "backward", "optimizer"} <= lanes
    first = {e["pid"]: e["ts"] for e in events if e["name"] == "step 1"}
    last = {e["pid"]: e["ts"] + e["dur"] for e in events if e["name"] == "step 2"}
    assert first[0] < last[1] and first[1] < last[0]  # they stand on one clock: the steps are common to both
    status, text, errors = command("explain", "timeline", str(path))
    assert (status, errors) == (0, "") and "rank 1 (ddp, cpu)" in text


def test_a_timeline_that_cannot_be_written_ends_the_command_with_one_sentence(process, tmp_path):
    (tmp_path / "runs" / "mine" / "timeline.json").mkdir(parents=True)
    options = ("--set", "run.name=mine", "--resume", "auto", "--profile")
    result = process("train", "digits", *SHORT, "--devices", "cpu:2", *options)
    assert result.returncode == 2
    resumed, said = result.stderr.splitlines()
    assert "nothing to resume" in resumed
    assert "Cannot write the timeline to 'runs/mine/timeline.json': Is a directory" in said


@pytest.mark.parametrize(("name", "subject"), [("train", "digits"), ("run", "train.py")])
def test_a_range_that_is_none_is_refused_before_anything_starts(command, tmp_path, name, subject):
    (tmp_path / "train.py").write_text(SCRIPT)
    status, _, errors = command(name, "--profile", subject)
    assert status == 2 and f"profile {subject!r} is not a range of steps. Use FIRST:COUNT" in errors
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_script_of_ones_own_is_shown_as_the_command_says_and_not_as_the_script_does(process, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    result = process("run", "--devices", "cpu:2", "--profile", "1:2", "train.py")
    assert result.returncode == 0, result.stderr
    events = json.loads((tmp_path / "runs" / "own" / "timeline.json").read_text())["traceEvents"]
    steps = {(e["pid"], e["args"]["step"]) for e in events if e.get("cat") == "steps"}
    assert steps == {(rank, step) for rank in (0, 1) for step in (1, 2)}
