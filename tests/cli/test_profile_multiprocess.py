"""``lockstep train --profile``: one file of all ranks, or one sentence why not."""

import json

SHORT = ("--epochs", "1", "--set", "log.tensorboard=false", "--set", "checkpoint.every_epochs=0")


def test_all_ranks_write_the_steps_that_were_asked_for_into_one_file(process, command, tmp_path):
    result = process("train", "digits", *SHORT, "--devices", "cpu:2", "--profile", "1:2")
    assert result.returncode == 0, result.stderr
    path = tmp_path / "runs" / "digits-001" / "timeline.json"
    assert "The timeline is in runs/digits-001/timeline.json" in result.stderr
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
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert (
        "The timeline that profile asks for cannot be written to 'runs/mine/timeline.json'" in result.stderr
    )


def test_a_range_that_is_none_is_refused_before_anything_starts(command, tmp_path):
    status, _, errors = command("train", "--profile", "digits")
    assert status == 2 and "profile 'digits' is no range of steps. Write FIRST:COUNT" in errors
    assert not (tmp_path / "runs").exists()
