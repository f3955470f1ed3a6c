"""``ps``, ``stacks``, ``stop`` and ``clean`` on real runs: they find exactly the processes of a run."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from tests.launch.command import Command, wait_until

from lockstep.cli import main
from lockstep.doctor import Grade, look_at_host
from lockstep.launch.runs import choose_run, find_runs, run_directory, write_note


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A ``lockstep run`` whose run directory the commands of this process look into."""
    one = Command(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    yield one
    one.clean_up()


def run_of(command):
    (found,) = [run for run in find_runs() if run.directory.is_relative_to(command.folder)]
    return found


def looping(command):
    command.loop()
    command.wait_for_mark("running", 3)
    return run_of(command)


def test_ps_lists_a_run_with_its_ranks_and_their_memory(command, capsys):
    run = looping(command)
    assert main(["ps", "--json"]) == 0
    found = {each["run_id"]: each for each in map(json.loads, capsys.readouterr().out.splitlines())}[run.run_id]
    assert (found["supervisor"], found["supervised"], found["ranks"]) == (command.process.pid, True, 3)
    assert sorted(each["rank"] for each in found["processes"] if each["rank"] is not None) == [0, 1, 2]
    assert all(each["resident"] > 10 << 20 for each in found["processes"])
    listed = {each["pid"] for each in found["processes"]}
    assert listed == {process.pid for process in run.processes()}
    assert len(listed) == 4, "the process that forks, and three ranks"
    assert main(["ps"]) == 0
    shown = capsys.readouterr().out
    assert run.run_id in shown
    assert "rank 2, step" in shown


def test_check_says_whether_every_rank_of_a_run_lives(command, capsys):
    run = looping(command)
    main(["ps", "--check"])
    assert run.run_id not in capsys.readouterr().out
    command.process.kill()
    command.process.wait()
    assert main(["ps", "--check"]) == 1
    assert f"{run.run_id}: its command was killed" in capsys.readouterr().out


def test_stacks_shows_the_line_of_every_rank_and_the_run_goes_on(command, capsys):
    run = looping(command)
    assert main(["stacks", run.run_id]) == 0
    shown = capsys.readouterr().out
    assert [line.split(" (pid")[0] for line in shown.splitlines() if line.startswith("rank")] == [
        "rank 0",
        "rank 1",
        "rank 2",
    ]
    assert shown.count("faulty_loop.py:") >= 3
    assert command.process.poll() is None


def test_stop_asks_the_ranks_to_save_and_leave(command, capsys):
    run = looping(command)
    assert main(["stop", run.run_id]) == 0
    printed = capsys.readouterr()
    assert "has stopped" in printed.out
    assert printed.err.startswith(f"Stopping {run.run_id}: ") and "faulty_loop.py" in printed.err
    assert command.end()[0] == 75
    assert command.left_over() == []


def test_stop_now_ends_every_process_of_the_run_and_no_other(command):
    run = looping(command)
    elsewhere = {**os.environ, "XDG_RUNTIME_DIR": ""}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=elsewhere) as bystander:
        assert main(["stop", "--now", run.run_id[-6:]]) == 0
        command.end()
        command.wait_until_nothing_runs()
        assert bystander.poll() is None
        bystander.communicate(b"\n")


@pytest.mark.fault("M2")
def test_clean_ends_what_a_killed_command_left_behind_and_doctor_names_it(command, capsys):
    """A process that outlived its launcher: it carries the run's id, and nobody holds the directory's lock."""
    (command.folder / "runtime").mkdir()
    with run_directory(command.folder / "runtime") as directory:
        left = directory.with_name("lockstep-run-left")
        shutil.copytree(directory, left)
    write_note(left, "20260101-000000-abcdef", ["lockstep", "run", "x.py"], command.folder, 1)
    environment = {**os.environ, "LOCKSTEP_RUN_ID": "20260101-000000-abcdef"}
    orphan = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment)
    with orphan:
        run = choose_run("20260101-000000-abcdef")
        wait_until(lambda: [p.pid for p in run.processes()] == [orphan.pid], 10, "the process to show")
        assert not run.is_supervised
        (said,) = [each for each in look_at_host({}) if "20260101-000000-abcdef" in each.found]
        assert (said.grade, said.subject) == (Grade.WARNING, "left over")
        assert str(orphan.pid) in said.found
        assert said.advice.endswith("lockstep clean.")
        assert main(["clean", "--dry-run"]) == 0
        assert orphan.poll() is None
        assert main(["clean"]) == 0
        assert orphan.wait(10) == -15
        orphan.stdin.close()
    assert "ended 1 process, removed" in capsys.readouterr().out
    assert not left.exists()


def test_an_unknown_run_is_refused_with_those_that_are_known(command, capsys):
    assert main(["stop", "no-such-run"]) == 2
    assert "no run" in capsys.readouterr().err.lower()  # of those that are under way on this host, or at all
