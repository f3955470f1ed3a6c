"""Runs killed with SIGKILL at a random moment and resumed on a random world end as if nothing had happened."""

import shutil
import subprocess

import pytest
from tests.soak.killing import NAMESPACE, Kill, Soak


def killed_and_resumed(soak, seeds, undisturbed, killed=Soak.kill, **choices):
    """How many kills cut a checkpoint off; the seed of a run that ends otherwise is in the message."""
    cut = 0
    for seed in seeds:
        kill = Kill.draw(seed, **choices)
        soak.new_run(f"seed-{seed}")
        try:
            cut += killed(soak, kill)
            found, left = soak.finish(kill.next_world, kill.next_strategy), soak.left_over()
        except BaseException as error:
            error.add_note(f"seed {seed}: {kill}")
            raise
        assert (found, left) == (undisturbed, []), f"seed {seed}: {kill}"
    return cut


@pytest.mark.slow
@pytest.mark.fault("K1", "P1", "P3")
def test_three_runs_killed_at_a_random_moment_end_in_the_same_fingerprint_and_leave_nothing(soak, undisturbed):
    killed_and_resumed(soak, range(3), undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(100, 200, 25))
@pytest.mark.fault("K1", "P1", "P3")
def test_a_hundred_runs_killed_at_a_random_moment_end_in_the_same_fingerprint_and_leave_nothing(
    soak, undisturbed, first
):
    cut = killed_and_resumed(soak, range(first, first + 25), undisturbed, strategies=("ddp", "fsdp"))
    assert cut > 0, "no kill ever came during a save: the moments test nothing"


def namespaces_are_allowed():
    allowed = shutil.which("unshare") and subprocess.run([*NAMESPACE, "true"], capture_output=True)
    return bool(allowed) and allowed.returncode == 0


@pytest.mark.slow
@pytest.mark.fault("K1", "P3")
@pytest.mark.skipif(not namespaces_are_allowed(), reason="no process namespaces for this user")
def test_runs_whose_whole_namespace_was_killed_end_in_the_same_fingerprint_and_leave_nothing(soak, undisturbed):
    """As when a container is killed: no process of it can clean up, and its process ids mean nothing afterwards."""
    cut = killed_and_resumed(soak, range(300, 306), undisturbed, killed=Soak.kill_namespace)
    assert cut > 0, "no kill ever came during a save: the moments test nothing"
