"""``lockstep debug``: the files that it writes, and what it refuses."""

import json

import pytest

from lockstep.cli import main


def test_a_script_gets_one_configuration_for_each_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert main(["debug", "--devices", "cpu:3", "--rank", "2", "train.py", "--lr", "0.1"]) == 0
    launch = json.loads((tmp_path / ".vscode" / "launch.json").read_text())["configurations"]
    (task,) = json.loads((tmp_path / ".vscode" / "tasks.json").read_text())["tasks"]
    alone, several, running = launch
    assert (alone["request"], alone["program"]) == ("launch", "${workspaceFolder}/train.py")
    assert alone["args"] == ["--lr", "0.1"]
    assert several["connect"] == {"host": "127.0.0.1", "port": 5678}
    assert several["preLaunchTask"] == task["label"]
    words = "-m lockstep run --devices cpu:3 --debug-rank 2 --debug-port 5678 train.py --lr 0.1"
    assert task["args"] == words.split()
    assert running["connect"] == several["connect"]


def test_the_path_is_the_one_from_the_editors_folder(tmp_path, monkeypatch):
    (tmp_path / "code" / "deep").mkdir(parents=True)
    (tmp_path / "code" / "deep" / "train.py").write_text("")
    monkeypatch.chdir(tmp_path / "code" / "deep")
    assert main(["debug", "--folder", "..", "train.py"]) == 0
    found = json.loads((tmp_path / "code" / ".vscode" / "launch.json").read_text())["configurations"]
    assert found[0]["program"] == "${workspaceFolder}/deep/train.py"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "No script or job was given"),
        (["--attach", "20260101"], "no run"),
        (["absent.py"], "is not a file"),
        (["--rank", "2", "train.py"], "has the ranks 0 to 1"),
        (["--port", "0", "train.py"], "must know the port"),
        (["--port", "70000", "train.py"], "from 1 to 65535"),
        (["--folder", "nowhere", "train.py"], "is not a folder"),
        (["--folder", "inner", "train.py"], "is not in the folder"),
        (["digit"], "Did you mean 'digits'?"),
    ],
)
def test_mistakes_are_refused_and_nothing_is_written(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "inner").mkdir()
    assert main(["debug", *words]) == 2
    # Other runs may be under way on this host, or none
    assert said.lower() in capsys.readouterr().err.lower()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inner", "train.py"]
