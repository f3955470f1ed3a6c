"""A rank that is killed under the real command, with and without restarts."""

import os
import signal

import pytest
from tests.launch.command import wait_until
from tests.soak.killing import SCRIPT

from lockstep.cli import main
from lockstep.launch.runs import find_runs


def start(command, *words, options):
    command.start(SCRIPT, command.folder / "run", "ddp", *words, options=options)
    return command.end(120)


@pytest.mark.slow
def test_a_rank_that_dies_in_the_same_step_again_ends_the_run(command):
    code, lines = start(command, "--always", "1:9", options=["--restarts", "5"])
    assert code == 4
    assert lines[1] == "Restart 1 of 5: the same 3 ranks, from the last checkpoint if there is one."
    assert sum(line.startswith("rank 1 killed by SIGKILL") for line in lines) == 2
    assert lines[-1].startswith("Not restarted: restart 1 got no further than step ")
    command.wait_until_nothing_runs()


@pytest.mark.slow
def test_without_restarts_a_killed_rank_ends_the_run_with_one_report(command):
    code, lines = start(command, "--always", "1:9", options=[])
    assert code == 4
    assert not any(line.startswith(("Restart", "Not restarted")) for line in lines)


@pytest.mark.slow
def test_an_exception_of_the_script_is_not_tried_again(command):
    script = command.folder / "wrong.py"
    script.write_text("raise ValueError('the script is wrong')\n")
    code, lines = command.start(script, options=["--restarts", "5"]).end(120)
    assert code == 4
    assert sum("ValueError: the script is wrong" in line for line in lines) == 1
    assert not any(line.startswith(("Restart", "Not restarted")) for line in lines)


@pytest.mark.slow
def test_a_run_that_is_ended_on_purpose_is_not_started_again(command, monkeypatch):
    """``stop --now`` kills ranks and their fork server, which alone would look like a loss."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(command.folder / "runtime"))
    command.loop(options=["--restarts", "5"])
    command.wait_for_mark("running", 3)
    (run,) = [run for run in find_runs() if run.directory.is_relative_to(command.folder)]
    assert main(["stop", "--now", run.run_id]) == 0
    code, lines = command.end()
    assert code == 75
    assert not any(line.startswith("Restart") for line in lines)
    command.wait_until_nothing_runs()


@pytest.mark.slow
def test_a_lost_fork_server_is_a_loss_too(command):
    command.loop(options=["--restarts", "1"])
    command.wait_for_mark("running", 3)
    server = next(each for each in command.processes() if command.parent_of(each) == command.process.pid)
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: "Restart 1 of 1" in command.stderr, 60, "a restart")
    command.wait_for_phase("forward")
    command.signal(signal.SIGINT)
    code, lines = command.end()
    assert code == 130
    assert lines[:2] == [
        "The process that forks the ranks was killed, and the ranks with it.",
        "Restart 1 of 1: the same 3 ranks, from the last checkpoint if there is one.",
    ]
    command.wait_until_nothing_runs()
