import json
import os

import pytest

from lockstep.loggers import CsvTable, JsonLines, MultiLogger
from lockstep.loggers.metrics_files import read_json_lines


def records(path):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(record.pop("seconds") >= 0 for record in found)
    return found


def run(path, first, last, **options):
    logger = JsonLines(path, first_step=first, **options)
    for step in range(first + 1, last + 1):
        if step % 3 == 1:
            logger.begin(step // 3, epochs=4, start=step - 1, steps=3)
        logger.log(step, {"loss": 1 / step})
        if step % 3 == 0:
            logger.epoch(step // 3 - 1, step, {"accuracy": 0.5})
    return logger


def test_each_record_can_be_read_at_once(tmp_path):
    path = tmp_path / "runs" / "log.jsonl"
    logger = run(path, 0, 3)
    assert records(path) == [
        {"kind": "step", "step": 1, "epoch": 0, "loss": 1.0},
        {"kind": "step", "step": 2, "epoch": 0, "loss": 0.5},
        {"kind": "step", "step": 3, "epoch": 0, "loss": 1 / 3},
        {"kind": "epoch", "step": 3, "epoch": 0, "accuracy": 0.5},
    ]
    logger.close()
    logger.close()


@pytest.mark.parametrize("logger", [JsonLines, CsvTable])
def test_a_log_whose_folder_is_removed_or_moved_goes_on_in_a_new_one(tmp_path, logger):
    """Later records were written to the removed file, where nobody could read them."""
    lines = logger(tmp_path / "run" / "log")
    lines.log(1, {"loss": 0.5})
    before = (tmp_path / "run" / "log").read_text()
    (tmp_path / "run").rename(tmp_path / "moved")
    lines.log(2, {"loss": 0.25})
    lines.log(3, {"loss": 0.125})
    lines.close()
    assert (tmp_path / "moved" / "log").read_text() == before
    assert [record["step"] for record in logger(tmp_path / "run" / "log")._records()] == [2, 3]


@pytest.mark.parametrize("resumed_at", [0, 3, 4, 6, 8])
def test_a_run_that_was_stopped_and_resumed_has_every_record_once(tmp_path, resumed_at):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    run(whole, 0, 12).close()
    run(parts, 0, 8).close()
    logger = run(parts, resumed_at, 12)
    logger.close()
    assert [(r["kind"], r["step"]) for r in records(parts)] == [(r["kind"], r["step"]) for r in records(whole)]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_end_of_an_epoch_that_is_done_again_is_recorded_once(tmp_path):
    """A run was killed after it recorded epoch 1; its newest checkpoint is of that epoch's last step."""
    path = tmp_path / "log.jsonl"
    run(path, 0, 6).close()
    before = records(path)
    logger = JsonLines(path, first_step=6, open_epoch=1)
    logger.begin(1, epochs=4, start=3, steps=3)
    logger.epoch(1, 6, {"accuracy": 0.5})
    logger.close()
    assert records(path) == before


def test_a_torn_line_of_a_killed_run_is_left_out(tmp_path):
    path = tmp_path / "log.jsonl"
    run(path, 0, 2).close()
    with path.open("ab") as file:
        file.write(b'{"kind": "step", "st\xff')
    run(path, 2, 3).close()
    assert [record["step"] for record in records(path)] == [1, 2, 3, 3]


@pytest.mark.parametrize(
    "line",
    [
        *("null", "[]", '{"step": 3}', '{"step": null, "epoch": 0}', '{"step": 3, "epoch": "x"}'),
        '{"kind": "epoch", "step": 3, "epoch": 0, "loss": "y"}',
    ],
)
def test_a_line_of_another_form_is_no_record(tmp_path, line):
    """``compare`` and ``report`` ended with a traceback."""
    (tmp_path / "log.jsonl").write_text(f'{line}\n{{"kind": "step", "step": 1, "epoch": 0, "loss": null}}\n')
    assert [record["step"] for record in read_json_lines(tmp_path / "log.jsonl")] == [1]


def test_values_that_json_does_not_have_are_null(tmp_path):
    path = tmp_path / "log.jsonl"
    logger = JsonLines(path)
    logger.log(1, {"loss": float("nan"), "scale": float("inf"), "rate": 0.1})
    logger.close()
    assert records(path)[0] | {"kind": 0} == {
        "kind": 0,
        "step": 1,
        "epoch": 0,
        "loss": None,
        "scale": None,
        "rate": 0.1,
    }


@pytest.mark.fault("M12")
def test_a_log_on_a_full_disk_warns_once_and_training_goes_on(caplog):
    """/dev/full takes no byte."""
    logger = MultiLogger([JsonLines("/dev/full")])
    for step in range(3):
        logger.log(step, {"loss": 1.0})
    logger.close()
    assert len(caplog.records) == 1
    assert os.strerror(28) in caplog.text


@pytest.mark.fault("M12")
def test_a_log_in_a_place_that_cannot_be_made_warns_once(caplog):
    logger = MultiLogger([JsonLines("/proc/run/log.jsonl")])
    for step in range(3):
        logger.log(step, {"loss": 1.0})
    assert len(caplog.records) == 1
    assert "Logger JsonLines failed and is disabled" in caplog.text


def test_seconds_go_on_where_a_stopped_run_had_them(tmp_path, monkeypatch):
    now = iter([100.0, 101.5, 103.0, 900.0, 902.25])
    monkeypatch.setattr("lockstep.loggers.metrics_files.monotonic", lambda: next(now))
    path = tmp_path / "log.jsonl"
    for first_step, steps in ((0, (1, 2)), (1, (2,))):
        logger = JsonLines(path, first_step=first_step)
        logger.begin(0, epochs=1, start=0, steps=2)
        for step in steps:
            logger.log(step, {"loss": 1.0})
        logger.close()
    assert [record["seconds"] for record in map(json.loads, path.read_text().splitlines())] == [1.5, 3.75]
