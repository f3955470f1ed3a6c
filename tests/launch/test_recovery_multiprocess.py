"""A killed rank under the real launcher: the run goes on by itself, and ends in the same bits."""

import pytest
from tests.ranks import run_ranks
from tests.soak.killing import SCRIPT
from tests.soak.perceptron import train


def train_undisturbed(world):
    return train()


@pytest.fixture(scope="module")
def undisturbed():
    """The fingerprint of the run that nothing happened to, on one process."""
    return run_ranks(train_undisturbed, 1)[0]


def start(command, *words, options):
    command.start(SCRIPT, command.folder / "run", "ddp", *words, options=options)
    return command.end(120)


@pytest.mark.fault("P1")
def test_a_run_that_lost_a_rank_goes_on_without_it_to_the_same_fingerprint(command, undisturbed):
    """The script does not even ask to resume: a restarted run finds its own checkpoint."""
    code, lines = start(
        command,
        *("--once", "1:9", "--new"),
        options=["--restarts", "2", "--restart-world", "left", "--logs", command.folder / "logs"],
    )
    assert code == 0, lines
    assert lines[0].startswith("rank 1 killed by SIGKILL, step ")
    assert lines[1] == "Restart 1 of 2: 2 ranks of 3 go on from the last checkpoint."
    assert command.stdout.split() == [undisturbed]
    assert len([line for line in lines if line]) == 2
    assert {path.name for path in (command.folder / "logs").iterdir()} >= {"rank-001.log", "restart-1"}
    assert command.left_over() == []
    command.wait_until_nothing_runs()


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
