"""The configurations for VS Code, as ``lockstep debug`` writes them."""

import os
import subprocess
import sys

import pytest

from lockstep.cli import main
from lockstep.debug import DebugPlan, launch_entries, task_entries


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


def test_in_a_world_that_another_launcher_started_a_rank_that_is_not_there_is_refused(tmp_path, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1" if name == "WORLD_SIZE" else "0")
    (tmp_path / "train.py").write_text("")
    assert main(["run", "--debug-rank", "1", str(tmp_path / "train.py")]) == 2
    assert "debugger on rank 1 was asked for, and the run has rank 0 alone" in capsys.readouterr().err


def test_a_job_is_started_with_its_settings():
    plan = DebugPlan(target="digits", arguments=("--set", "training.epochs=1"), devices="2", rank=1, port=6000)
    (task,) = task_entries(plan)
    words = "-m lockstep train digits --set training.epochs=1 --devices 2 --debug-rank 1 --debug-port 6000"
    assert task["args"] == words.split()
    assert launch_entries(plan)[1]["connect"]["port"] == 6000


def test_a_script_of_torchrun_opens_its_group_in_the_process_that_the_editor_starts(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print(os.environ['RANK'], os.environ['LOCAL_RANK'], dist.get_world_size())\n"
        "dist.destroy_process_group()\n"
    )
    settings = launch_entries(DebugPlan(target="train.py"))[0]
    environment = {**os.environ, **settings["env"]}
    ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "0 0 1\n"), ended.stderr


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
