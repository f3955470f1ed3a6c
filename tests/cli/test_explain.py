"""``lockstep explain``: what it prints, writes and refuses."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from lockstep.cli.explain import number
from lockstep.errors import ConfigError

SUBJECTS = ("samples", "tree", "traffic", "pipeline")


@pytest.mark.parametrize("subject", SUBJECTS)
def test_each_subject_is_text_of_100_columns_and_svg_and_json(command, tmp_path, subject):
    status, text, errors = command("explain", subject)
    assert (status, errors) == (0, "")
    assert text.isascii()
    assert len(text.splitlines()) > 8 and max(map(len, text.splitlines())) <= 100
    assert command("explain", subject, "--svg", "picture.svg") == (0, "Wrote picture.svg.\n", "")
    assert ElementTree.parse(tmp_path / "picture.svg").getroot().tag.endswith("svg")
    status, output, _ = command("explain", subject, "--json")
    assert status == 0
    assert json.loads(output)


def test_svg_and_json_go_together(command, tmp_path):
    status, output, _ = command("explain", "tree", "--ranks", "3", "--svg", "tree.svg", "--json")
    assert (status, json.loads(output)["ranks"]) == (0, 3)
    assert "rank 2" in (tmp_path / "tree.svg").read_text()


def test_the_numbers_reach_the_picture(command):
    text = command("explain", "samples", "--samples", "7", "--ranks", "3", "--batch", "1")[1]
    assert text.startswith("7 samples on 3 ranks, 1 for each rank in a step (global batch 3)")
    assert "7 of them not empty" in command("explain", "tree", "--micro-batches", "8", "--leaves", "7")[1]
    traffic = command("explain", "traffic", "--parameters", "25M", "--servers", "2", "--ranks", "3")[1]
    assert traffic.startswith("25,000,000 float32 gradients (P = 100 MB) of K = 8 micro-batches, 3 ranks, 2 servers")
    pipeline = command("explain", "pipeline", "--stages", "2", "--schedule", "gpipe")[1]
    assert "rank 1  .. F0 F1 F2 F3 F4 F5 F6 F7 B0" in pipeline
    assert "1f1b" not in pipeline


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((), "The following arguments are required: SUBJECT."),
        (("smaples",), "'smaples' is not a command of 'lockstep explain'. Did you mean 'samples'?"),
        (
            ("tree", "--rank", "2"),
            "--rank is not an argument of 'lockstep explain tree'. Did you mean '--ranks'?",
        ),
        (("tree", "--ranks", "two"), "invalid int value: 'two'"),
        (("tree", "--ranks", "0"), "--ranks should be at least 1 and is 0."),
        (("traffic", "--parameters", "many"), "--parameters many is not a number."),
        (("tree", "--svg", "no/such/folder.svg"), "no/such/folder.svg cannot be written: No such file"),
    ],
)
def test_a_mistake_is_one_sentence(command, arguments, said):
    status, output, errors = command("explain", *arguments)
    assert (status, output) == (2, "")
    assert said in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    "words, count", [("21797672", 21797672), ("25M", 25_000_000), ("1.5G", 1_500_000_000), ("2k", 2000)]
)
def test_numbers_may_have_a_unit(words, count):
    assert number(words) == count


@pytest.mark.parametrize("words", ["", "M", "1e999", "nan", "5T"])
def test_what_is_no_number_is_said(words):
    with pytest.raises(ConfigError, match="is not a number"):
        number(words)


def test_the_tree_is_drawn_without_torch():
    code = "import sys; from lockstep.cli import main; s=main(); assert 'torch' not in sys.modules; exit(s)"
    done = subprocess.run([sys.executable, "-c", code, "explain", "tree"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
