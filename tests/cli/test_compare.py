"""``lockstep compare``: what it prints, writes and refuses."""

import json
from xml.etree import ElementTree

import pytest


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
    assert output.splitlines()[1].split() == ["one", "device", "3", "-", "0.3333"]
    assert ElementTree.parse(tmp_path / "curves.svg").getroot().tag.endswith("svg")
    assert "one device" in (tmp_path / "curves.html").read_text()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("a", "c"), "'c/log.jsonl' cannot be read"),
        (("a", "--svg", "none/x.svg"), "the folder 'none' does not exist"),
        ((), "arguments are required: RUN"),
    ],
)
def test_mistakes_end_with_status_two(command, words, expected):
    status, output, errors = command("compare", *words)
    assert (status, output) == (2, "")
    assert expected in errors
