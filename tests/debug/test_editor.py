"""The configurations for VS Code, as ``lockstep debug`` writes them."""

import json
import os
import subprocess
import sys

import pytest

from lockstep.cli import main
from lockstep.debug import DebugPlan, launch_entries, task_entries


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
        ([], "No script or job was named"),
        (["--attach", "20260101"], "No run"),
        (["absent.py"], "is not a file"),
        (["--rank", "2", "train.py"], "has the ranks 0 to 1"),
        (["--port", "0", "train.py"], "must know the port"),
        (["--port", "70000", "train.py"], "from 1 to 65535"),
        (["--folder", "nowhere", "train.py"], "is not one"),
        (["--folder", "inner", "train.py"], "is not in the folder"),
        (["digit"], "Did you mean 'digits'?"),
    ],
)
def test_mistakes_are_refused_and_nothing_is_written(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "inner").mkdir()
    assert main(["debug", *words]) == 2
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inner", "train.py"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--debug-rank", "2"], "has the ranks 0 to 1"),
        (["--debug-rank", "-1"], "has the ranks 0 to 1"),
        (["--debug-rank", "1", "--debug-port", "65536"], "from 1 to 65535"),
    ],
)
def test_a_rank_or_port_that_is_not_there_is_refused_before_anything_starts(tmp_path, capsys, words, said):
    (tmp_path / "train.py").write_text("")
    assert main(["run", "--devices", "cpu:2", *words, str(tmp_path / "train.py")]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_debugpy_is_refused_with_the_line_that_installs_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "train.py").write_text("")
    assert main(["run", "--devices", "cpu:2", "--debug-rank", "1", str(tmp_path / "train.py")]) == 2
    assert "pip install 'lockstep-train[debug]'" in capsys.readouterr().err


def test_in_a_world_that_another_launcher_started_a_rank_that_is_not_there_is_refused(
    tmp_path, capsys, monkeypatch
):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1" if name == "WORLD_SIZE" else "0")
    (tmp_path / "train.py").write_text("")
    assert main(["run", "--debug-rank", "1", str(tmp_path / "train.py")]) == 2
    assert "debugger on rank 1 was asked for, and the run has rank 0 alone" in capsys.readouterr().err


def test_a_job_is_started_with_its_settings():
    plan = DebugPlan(
        target="digits", arguments=("--set", "training.epochs=1"), devices="2", rank=1, port=6000
    )
    (task,) = task_entries(plan)
    words = "-m lockstep train digits --set training.epochs=1 --devices 2 --debug-rank 1 --debug-port 6000"
    assert task["args"] == words.split()
    assert launch_entries(plan)[1]["connect"]["port"] == 6000


@pytest.mark.slow
def test_a_job_of_one_rank_trains_in_the_process_that_the_editor_starts(tmp_path):
    """Its configuration makes it a world of one, so that no launcher stands between."""
    settings = launch_entries(DebugPlan(target="digits", arguments=("--epochs", "1")))[0]
    script = tmp_path / "as_the_editor.py"
    script.write_text(
        "import os, runpy, sys\n"
        "sys.addaudithook(lambda event, given: event == 'os.fork' and print('forked'))\n"
        f"sys.argv = ['lockstep', *{settings['args']!r}]\n"
        f"runpy.run_module({settings['module']!r}, run_name='__main__')\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **settings["env"]},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert "fingerprint" in ended.stdout
    assert "forked" not in ended.stdout
