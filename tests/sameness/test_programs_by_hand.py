"""Programs drawn at random against plain runs, in float64."""

import subprocess
import sys

import pytest

CHANGED = """
import sys
from tests.sameness import programs_by_hand
clip = programs_by_hand.PlainRun.clip_gradients
programs_by_hand.PlainRun.clip_gradients = lambda run, bound: clip(run, 0.9 * bound)
sys.exit(programs_by_hand.main(["--seeds", "104:105"]))
"""


def ended(*command):
    """Exit status and output of a Python process: programs change settings of theirs."""
    process = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=280)
    return process.returncode, process.stdout + process.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seeds", ["104:105", *(pytest.param(f"{n}:{n + 10}", marks=pytest.mark.slow) for n in (300, 310))]
)
def test_programs_have_the_values_of_a_plain_run(seeds):
    status, said = ended("-m", "tests.sameness.programs_by_hand", "--seeds", seeds)
    assert status == 0, said
    assert "equal" in said


@pytest.mark.slow
def test_a_plain_run_that_clips_gradients_otherwise_differs():
    status, said = ended("-c", CHANGED)
    assert (status == 1 and "104: differs: e0s0 norm" in said) or "loss" in said, said
