"""A rank that is killed under the real command, with and without restarts."""

import pytest
from tests.soak.killing import SCRIPT


def start(command, *words, options):
    command.start(SCRIPT, command.folder / "run", "ddp", *words, options=options)
    return command.end(120)


@pytest.mark.slow
def test_a_rank_that_dies_in_the_same_step_again_ends_the_run(command):
    code, lines = start(command, "--always", "1:9", options=["--restarts", "5"])
    assert code == 4
    assert lines[1] == "Restart 1 of 5: the same 3 ranks go on from the last checkpoint."
    assert sum(line.startswith("rank 1 killed by SIGKILL") for line in lines) == 2
    assert lines[-1].startswith("Not restarted: restart 1 came no further than step ")
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
