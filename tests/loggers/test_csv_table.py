"""The table has every record once, over stops too, and a column for each metric."""

import csv

import pytest

from lockstep.core.world import World
from lockstep.loggers import CsvTable, open_loggers


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def run(path, first, last):
    logger = CsvTable(path, first_step=first)
    for step in range(first + 1, last + 1):
        if step % 3 == 1:
            logger.begin(step // 3, epochs=4, start=step - 1, steps=3)
        logger.log(step, {"loss": 1 / step, "learning_rate": 0.1})
        if step % 3 == 0:
            logger.epoch(step // 3 - 1, step, {"validation_accuracy": 0.5})
    logger.close()


def test_a_metric_that_comes_later_gets_a_column_and_earlier_rows_stay(tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.loggers.metrics_files.monotonic", lambda: 5.0)
    run(tmp_path / "log.csv", 0, 4)
    assert (tmp_path / "log.csv").read_text() == (
        "kind,step,epoch,seconds,loss,learning_rate,validation_accuracy\n"
        "step,1,0,0.0,1.0,0.1,\n"
        "step,2,0,0.0,0.5,0.1,\n"
        "step,3,0,0.0,0.3333333333333333,0.1,\n"
        "epoch,3,0,0.0,,,0.5\n"
        "step,4,1,0.0,0.25,0.1,\n"
    )


@pytest.mark.parametrize("resumed_at", [0, 3, 6, 8])
def test_a_run_that_was_stopped_and_resumed_has_the_table_of_one_that_was_not(tmp_path, resumed_at):
    whole, parts = tmp_path / "whole.csv", tmp_path / "parts.csv"
    run(whole, 0, 12)
    run(parts, 0, 8)
    run(parts, resumed_at, 12)
    assert [(row["kind"], row["step"], row["loss"]) for row in rows(parts)] == [
        (row["kind"], row["step"], row["loss"]) for row in rows(whole)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts.csv", "whole.csv"]


def test_a_torn_line_of_a_killed_run_is_left_out(tmp_path):
    path = tmp_path / "log.csv"
    run(path, 0, 2)
    with path.open("a") as file:
        file.write("step,3")
    run(path, 2, 3)
    assert [row["step"] for row in rows(path)] == ["1", "2", "3", "3"]


def test_a_name_with_separators_stays_one_column(tmp_path):
    """At some characters, which CSV does not know as ends of lines, the head of a resumed run's table was cut."""
    name = 'a,"b\u2028c\x85\nd'
    for first in (0, 1):
        logger = CsvTable(tmp_path / "log.csv", first_step=first)
        logger.log(first + 1, {name: 0.5})
        logger.close()
    assert [list(row)[4:] for row in rows(tmp_path / "log.csv")] == [[name]] * 2
    assert [row[name] for row in rows(tmp_path / "log.csv")] == ["0.5"] * 2


def test_it_is_opened_by_name(tmp_path):
    logger = open_loggers(World(), tmp_path, ["csv"])
    logger.log(1, {"loss": float("nan")})
    logger.close()
    assert (tmp_path / "log.csv").read_text() == "kind,step,epoch,seconds,loss\nstep,1,0,0.0,nan\n"
