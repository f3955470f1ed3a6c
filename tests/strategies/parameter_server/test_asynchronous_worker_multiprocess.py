"""Real processes killed by SIGKILL in an asynchronous run: a worker, every worker, a server."""

import json
from pathlib import Path

import pytest
from tests.launch.command import Command

LOOP, EPOCHS, STEPS = Path(__file__).parent / "asynchronous" / "digits_loop.py", 4, 48
GOOD = 0.85
"""Accuracy that the small network has passed after four epochs, however it is trained; by guessing it would be 0.1."""


@pytest.fixture
def command(tmp_path):
    one = Command(tmp_path)
    yield one
    one.clean_up()


def ended(command, victim, *options):
    command.start(LOOP, command.folder, EPOCHS, victim, options=options)
    code, lines = command.end(timeout=120)
    command.wait_until_nothing_runs()
    path = command.folder / "found.json"
    return code, "\n".join(lines), json.loads(path.read_text()) if path.exists() else {}


def test_a_killed_worker_does_not_stop_the_run_and_the_other_takes_its_samples(command):
    code, lines, found = ended(command, "2:14")
    assert (code, found["step"]) == (0, STEPS)
    assert "The worker on rank 2 ended after update" in lines
    assert "Traceback" not in lines
    assert found["holders"] == [2, 1, 1, 1], "the second epoch ends with one that evaluates all"
    assert found["remarks"]["lost"].startswith("rank 2 after update")
    assert found["restart"] == 0
    assert found["accuracy"] > GOOD


@pytest.mark.slow
def test_a_killed_server_is_recovered_from_its_last_snapshot(command):
    """Snapshots at the steps 5, 10, ... are written in the background; the server dies in its step 14."""
    code, lines, found = ended(command, "0:14", "--restarts", "1")
    assert (code, found["step"]) == (0, STEPS)
    assert lines.startswith("rank 0 killed by SIGKILL, step 14")
    assert "Restart 1 of 1: the same 3 ranks, from the last checkpoint if there is one." in lines
    assert found["restart"] == 1
    assert found["began"] in (5, 10), "the newest that was whole"
    assert found["accuracy"] > GOOD


@pytest.mark.slow
def test_without_restarts_a_killed_server_ends_the_run_and_is_named(command):
    code, lines, found = ended(command, "0:14")
    assert (code, found) == (4, {})
    assert lines.startswith("rank 0 killed by SIGKILL, step 14")
    assert "lost the connection to a rank that was gone" in lines


@pytest.mark.slow
def test_a_run_that_has_lost_all_workers_ends_and_says_so(command):
    command.start(LOOP, command.folder, EPOCHS, "1:14", devices="cpu:2")
    code, lines = command.end(timeout=120)
    assert code == 4
    assert any("All workers of the parameter server have ended (rank 1 after update 14)" in line for line in lines)
