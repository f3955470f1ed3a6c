"""The tables of ``lockstep scale``."""

import json

from lockstep.scale.measured import Round, Row, row
from lockstep.scale.report import ScaleReport, as_json, text


def a_report():
    one = Round(0.1, 128.0, ({"data": 0.01, "forward": 0.09},), 12, 1536, 4000, 8, 16)
    ranks = {"forward": 0.045, "exchange": 0.015}, {"forward": 0.055, "exchange": 0.005}
    two = Round(0.0625, 128.0, ranks, 12, 1536, 4000, 8, 16)
    rows = (
        row("single on 1", "single", 1, [one], [one]),
        row("ddp on 2", "ddp", 2, [two], [one]),
        Row("tensor on 2", "tensor", 2, refused="it has no plan."),
    )
    return ScaleReport("digits", 20, 1, rows, "What limits it is the test.")


def test_the_table_shows_time_speed_up_efficiency_and_the_slowest_rank():
    lines = text(a_report()).splitlines()
    assert lines[0].split() == [
        "layout",
        "s/epoch",
        "samples/s",
        "speed-up",
        "in",
        "a",
        "round",
        "efficiency",
        "(spread)",
    ]
    assert lines[2].split() == ["ddp", "on", "2", "0.75", "2048", "1.60", "80", "%", "(80–80)"]
    assert "tensor on 2 did not run: it has no plan." in lines
    assert [line.split()[-5:] for line in lines if "slowest" in line] == [["slowest", "0.00", "55.00", "5.00", "60.00"]]
    assert lines[-1] == "What limits it is the test."


def test_json_holds_every_number_and_every_rank():
    found = json.loads(as_json(a_report()))
    assert found["rows"][1]["ranks"][1] == {"forward": 0.055, "exchange": 0.005}
    assert found["rows"][1]["slowest"] == 1
    assert found["rows"][2]["refused"] == "it has no plan."
