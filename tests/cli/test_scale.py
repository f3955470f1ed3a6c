"""``lockstep scale``: what it refuses before anything is started, and one real measurement."""

import json

import pytest

SHORT = ("--set", "data.workers=0", "--steps", "3", "--warm-up", "1", "--rounds", "1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--steps", "0"), "--steps is 0, and must be at least 1"),
        (("--warm-up", "-1"), "--warm-up is -1, and must be at least 0"),
        (("--devices", "two"), "--devices 'two' is not a list of numbers"),
        (("--devices", "2,16"), "--devices 16 was asked for, and the job has micro_batches=8"),
        (("--strategies", "fsdpp"), "strategy 'fsdpp' is not known. Did you mean 'fsdp'?"),
        (
            ("--predict", "--interconnect", "nvlnk"),
            "interconnect 'nvlnk' is not known. Did you mean 'nvlink'?",
        ),
        (("--predict", "--set", "training.reduce=powersgd"), "--predict has no formula for training.reduce"),
        (("--interconnect", "nvlink"), "--interconnect was given without --predict"),
        (("--json", "."), "--json . is a folder"),
        (("--html", "nowhere/scale.html"), "the folder 'nowhere' does not exist"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_started(command, arguments, said):
    status, output, errors = command("scale", "digits", *arguments)
    assert status == 2
    assert said in errors
    assert not output
    assert "round 1" not in errors


@pytest.mark.parametrize("words", [("scale", "digits"), ("verify", "digits"), ("predict", "runs/digits-001")])
def test_a_command_that_starts_processes_is_refused_in_each_process_of_torchrun(command, monkeypatch, words):
    """Each process measured, at the same time, and printed times that were several times too long."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    status, output, errors = command(*words)
    assert (status, output) == (2, "")
    assert "The command starts processes, and torchrun started this one. Run it by itself." in errors


@pytest.mark.slow
def test_one_measurement_gives_tables_files_and_a_prediction(process, tmp_path):
    files = [word for kind in ("json", "html", "svg", "png") for word in (f"--{kind}", f"found.{kind}")]
    chosen = ("--devices", "2", "--strategies", "ddp")
    result = process("scale", "digits", *chosen, *SHORT, "--predict", *files)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {row["label"]: row for row in found["rows"]}
    one, two = rows["single on 1"], rows["ddp on 2"]
    assert one["speed_up"]["median"] == 1.0
    assert len(two["ranks"]) == 2
    for row in (one, two):
        step = max(sum(rank.values()) for rank in row["ranks"])
        assert step == pytest.approx(row["step"]["median"], rel=0.05), "phases add up to the step"
    assert set(found["forecast"]["messages"]) == {"2"}
    assert found["forecast"]["here"][0]["measured"] == two["epoch"]["median"]
    assert found["machine"]["micro_batches"] == 8
    assert len(found["forecast"]["worlds"]) == 12 * 7
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "found.svg").read_text()
    assert "Prediction" in (tmp_path / "found.html").read_text()
    assert found["limit"] in result.stdout
    assert not (tmp_path / "runs").exists()
