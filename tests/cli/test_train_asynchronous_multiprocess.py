"""``lockstep train`` with an asynchronous parameter server, from the command line."""

import json

from tests.cli.test_train_strategies_multiprocess import SHORT

ASYNCHRONOUS = (
    *("--strategy", "parameter_server", "--set", "parameter_server.mode=asynchronous"),
    *("--set", "run.name=run"),
)


def test_a_job_is_trained_and_its_staleness_is_logged(process, tmp_path):
    result = process("train", "digits", *SHORT, *ASYNCHRONOUS, "--devices", "cpu:3")
    assert result.returncode == 0, result.stderr
    assert "staleness max" in result.stderr, "on the console"
    assert "updates on average, at most" in result.stdout, "at the end"
    assert "prove it" not in result.stdout, "no equal fingerprint is promised at level C"
    assert "on every x86-64 CPU" not in result.stdout
    records = [json.loads(line) for line in (tmp_path / "runs" / "run" / "log.jsonl").read_text().splitlines()]
    (epoch,) = [each for each in records if each["kind"] == "epoch"]
    assert 0 <= epoch["staleness"] <= epoch["staleness_max"] <= 2 * 4 + 1
    assert {"loss", "validation_accuracy", "samples_per_second"} <= epoch.keys()
    assert epoch["step"] == 12


def test_a_precision_that_it_cannot_train_in_is_refused_before_anything_starts(process):
    result = process("train", "digits", *SHORT, *ASYNCHRONOUS, "--devices", "cpu:3", "--precision", "fp16")
    assert result.returncode == 2
    assert "asynchronous workers find nothing together. Use bf16 or fp32" in result.stderr
