"""``lockstep lint``: what it prints, and how it ends."""

import json

import pytest

from lockstep.lint import RULES

WRONG = 'import os\nos.environ["CUDA_VISIBLE_DEVICES"] == "0"\nos.environ["MASTER_PORT"] = "29500"\n'


@pytest.fixture
def wrong(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(WRONG)
    return path.name


def test_a_clean_script_ends_with_status_zero(command, tmp_path):
    (tmp_path / "train.py").write_text("import torch\n")
    assert command("lint", "train.py") == (0, "No finding.\n", "")


def test_findings_end_with_status_one(command, wrong):
    status, output, errors = command("lint", wrong)
    assert (status, errors) == (1, "")
    lines = output.splitlines()
    assert lines[0].startswith("train.py:2:1: LS010 visible-devices-compared: ")
    assert lines[1] == "    fix: os.environ['CUDA_VISIBLE_DEVICES'] = '0'"
    assert lines[2].startswith("train.py:3:1: LS015 hard-coded-port: ")
    assert lines[-1] == "2 findings."


def test_json_holds_the_same(command, wrong):
    status, output, _ = command("lint", "--json", wrong)
    report = json.loads(output)
    assert status == 1
    assert [(f["path"], f["line"], f["column"], f["rule"]) for f in report["findings"]] == [
        ("train.py", 2, 1, "LS010"),
        ("train.py", 3, 1, "LS015"),
    ]
    assert report["mistakes"] == []


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        (("--select", "LS010"), ["LS010"]),
        (("--select", "hard-coded-port"), ["LS015"]),
        (("--select", "LS01"), ["LS010", "LS015"]),
        (("--ignore", "LS010"), ["LS015"]),
        (("--select", "LS01", "--ignore", "ls015"), ["LS010"]),
        (("--ignore", "LS010,LS015"), []),
    ],
)
def test_rules_are_chosen(command, wrong, options, numbers):
    status, output, _ = command("lint", "--json", *options, wrong)
    assert [finding["rule"] for finding in json.loads(output)["findings"]] == numbers
    assert status == (1 if numbers else 0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "No script was given."),
        (("none.py",), "none.py does not exist"),
        (("--select", "LS999", "x.py"), "--select LS999: no rule has this number or name."),
        (("--ignore", "hard-coded-prot", "x.py"), "Did you mean 'hard-coded-port'?"),
        (("--selekt", "LS010", "x.py"), "Did you mean '--select'?"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_two(command, arguments, expected):
    status, output, errors = command("lint", *arguments)
    assert (status, output) == (2, "")
    assert errors.startswith("lockstep: ")
    assert errors.count("\n") == 1
    assert expected in errors


def test_one_broken_file_does_not_hide_the_findings_of_another(command, wrong, tmp_path):
    (tmp_path / "broken.py").write_text("def f(:\n")
    status, output, errors = command("lint", "broken.py", wrong)
    assert status == 2
    assert output.endswith("2 findings.\n")
    assert errors.startswith("lockstep: broken.py:1 is not valid Python 3")


def test_json_names_the_broken_files_too(command, tmp_path):
    (tmp_path / "broken.ipynb").write_text("{}")
    status, output, _ = command("lint", "--json", "broken.ipynb")
    assert status == 2
    assert "is a notebook" in json.loads(output)["mistakes"][0]


def test_a_file_named_twice_is_checked_once(command, wrong):
    assert command("lint", wrong, wrong)[1].endswith("2 findings.\n")


def test_a_folder_stands_for_the_python_files_below_it(command, wrong, tmp_path):
    for name in ("src/a/one.py", "src/two.py", "src/.venv/hidden.py", "src/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(WRONG)
    report = json.loads(command("lint", "--json", "src")[1])
    assert [f["path"] for f in report["findings"]] == ["src/a/one.py"] * 2 + ["src/two.py"] * 2
    (tmp_path / "empty").mkdir()
    assert "empty is a folder without Python files" in command("lint", "empty")[2]


def test_the_rules_are_printed_as_a_table(command):
    status, output, _ = command("lint", "--rules")
    assert status == 0
    assert output.count("\n| LS") == len(RULES)


def test_a_real_process_reports_without_torch_in_less_than_a_second(process, wrong):
    result = process("lint", wrong)
    assert (result.returncode, result.stderr) == (1, "")
    assert "LS010" in result.stdout


def test_output_that_the_terminal_cannot_show_is_escaped(process, tmp_path):
    (tmp_path / "trän.py").write_text(WRONG, encoding="utf-8")
    environment = {"PYTHONIOENCODING": "ascii", "PATH": "", "PYTHONUTF8": "1"}
    result = process("lint", "trän.py", env=environment)
    assert result.returncode == 1
    assert "tr\\xe4n.py:2:1: LS010" in result.stdout
