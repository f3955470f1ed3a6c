"""``lockstep compare``: what it prints, writes and refuses."""

import dataclasses
import json
from xml.etree import ElementTree

import pytest

from lockstep.config.job_file import load_job
from lockstep.job.run_folder import Start, with_start


@pytest.fixture
def runs(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        records = [{"kind": "epoch", "step": 5 * n, "epoch": n - 1, "loss": 1 / n} for n in (1, 2, 3)]
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.usefixtures("runs")
def test_it_prints_a_table_and_writes_what_was_asked_for(command, tmp_path):
    pytest.importorskip("PIL")
    files = [word for kind in ("html", "svg", "png") for word in (f"--{kind}", f"curves.{kind}")]
    status, output, errors = command("compare", "a", "b", "--labels", "one device, two", *files)
    assert (status, errors) == (0, "")
    head, *rows = (line.split() for line in output.splitlines())
    assert head == ["run", "one", "device", "two"]
    assert [row[:2] for row in rows[:3]] == [["epochs", "3"], ["time", "-"], ["loss", "0.3333"]]
    assert ElementTree.parse(tmp_path / "curves.svg").getroot().tag.endswith("svg")
    assert "one device" in (tmp_path / "curves.html").read_text()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("a", "c"), "There is no run folder 'c'."),
        (("a", "--svg", "none/x.svg"), "the folder 'none' does not exist"),
        ((), "arguments are required: RUN"),
    ],
)
def test_mistakes_end_with_status_two(command, words, expected):
    status, output, errors = command("compare", *words)
    assert (status, output) == (2, "")
    assert expected in errors


@pytest.mark.usefixtures("runs")
def test_what_differs_is_below_the_table_with_what_decides_the_bits_first(command, tmp_path):
    job = load_job("digits", [])
    for name, rate, devices in (("a", 0.1, "cpu:1"), ("b", 0.05, "cpu:2")):
        start = Start(
            step=0,
            strategy="ddp",
            shares=[],
            level="A",
            device="cpu",
            context={"torch": "2.13.0" if name == "a" else "2.8.0", "seed": 0},
            job=dataclasses.replace(
                job,
                optimizer=dataclasses.replace(job.optimizer, args={**job.optimizer.args, "lr": rate}),
                run=dataclasses.replace(job.run, devices=devices),
            ),
        )
        (tmp_path / name / "job.json").write_text(with_start([], start))
    (tmp_path / "a" / "outcome.json").write_text(json.dumps({"fingerprint": "0123456789abcdef" * 4}))
    status, output, _ = command("compare", "a", "b", "--html", "curves.html")
    assert status == 0
    table, _, below = output.partition("\n\n")
    assert table.splitlines()[-1].split() == ["fingerprint", "0123456789abcdef", "-"]
    differences = below.splitlines()
    assert [line.split() for line in differences if line and not line.endswith(":")] == [
        ["setting", "a", "b"],
        ["optimizer.lr", "0.1", "0.05"],
        ["condition", "a", "b"],
        ["torch", '"2.13.0"', '"2.8.0"'],
        ["setting", "a", "b"],
        ["run.devices", '"cpu:1"', '"cpu:2"'],
    ]
    written = (tmp_path / "curves.html").read_text()
    assert "<td>optimizer.lr</td><td>0.1</td><td>0.05</td>" in written
    assert "0123456789abcdef" in written
    assert command("compare", "a", "a", "--labels", "x,y")[1].endswith("No setting differs.\n")


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    "words", [("compare", "a", "--html"), ("scale", "digits", "--json"), ("verify", "digits", "--json")]
)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(command, words, tmp_path, monkeypatch):
    """It ended in a traceback, after the runs of scale and verify."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    status, output, errors = command(*words, "x")
    assert (status, output) == (2, "")
    assert f"{words[-1]} x cannot be written. Choose a file in a folder that you can write to." in errors
