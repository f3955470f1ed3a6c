"""A run that lost a rank goes on by itself, and ends in the same bits."""

import os
import subprocess
import sys

import pytest
from tests.soak.killing import SCRIPT

from lockstep.checkpoint import committed


@pytest.mark.slow
@pytest.mark.fault("P1")
def test_a_run_that_lost_a_rank_goes_on_without_it_to_the_same_fingerprint(soak, undisturbed):
    """The script does not even ask to resume: a restarted run finds its own checkpoint."""
    soak.new_run("restarted")
    options = ["--restarts", "2", "--restart-world", "remaining"]
    soak.start(3, "ddp", "--once", "1:9", "--new", options=options)
    code, output, errors = soak.end()
    assert (code, output.split()) == (0, [undisturbed]), errors
    first, second, third = errors.splitlines()
    logs = soak.place / "logs"
    assert first.startswith("rank 1 killed by SIGKILL, step ")
    assert first.endswith(f". Logs: {logs}")
    assert second == "Restart 1 of 2: 2 ranks of 3, from the last checkpoint if there is one."
    assert third.startswith("Resumed from ")
    assert {path.name for path in logs.iterdir()} >= {"rank-001.log", "rank-002.log", "restart-1"}
    assert {path.name for path in (logs / "restart-1").glob("[!.]*")} == {"rank-001.log"}
    assert [path.name for path in committed(soak.place / "run")] == ["step-00000023", "step-00000024"]
    assert soak.left_over() == []
    soak.wait_until_nothing_runs()


@pytest.mark.slow
def test_torchruns_own_restarts_end_in_the_same_fingerprint(tmp_path, undisturbed):
    """The agent of torchrun starts all ranks anew, and the script asks to resume."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = ["--max-restarts=2", str(SCRIPT), str(tmp_path / "run"), "ddp", "--once", "1:9"]
    done = subprocess.run(
        [*torchrun, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.split()) == (0, [undisturbed]), done.stderr
    assert (tmp_path / "killed").exists()
    assert [path.name for path in (tmp_path / "run").glob(".*")] == []
