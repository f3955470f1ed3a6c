"""A job on a real two-node SLURM: preempted, requeued, resumed, and in the end the result of one process."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.clusters import slurm
from tests.printed import fingerprint

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or "-"),
]
LOCKSTEP = Path(sys.executable).with_name("lockstep")
JOB = ["digits", "--epochs", "6", "--set", "data.workers=0"]


@pytest.fixture(scope="module")
def cluster():
    with slurm.Cluster() as one:
        one.environment["PATH"] = f"{LOCKSTEP.parent}:{one.environment['PATH']}"
        yield one


def submit(cluster, folder):
    words = [str(LOCKSTEP), "slurm", *JOB, "--nodes", "2", "--time", "10:00", "--submit"]
    return cluster.call(*words, cwd=folder).split()[-1]


@pytest.mark.fault("P5", "P6")
def test_a_preempted_job_is_requeued_and_ends_with_the_result_of_one_process(cluster, tmp_path):
    job = submit(cluster, tmp_path)
    run = tmp_path / "runs" / f"digits-{job}"
    slurm.wait_until(lambda: list(run.glob("step-*")), 60, "the first checkpoint")
    cluster.call("scancel", "--signal=USR1", job)
    log = tmp_path / f"digits-{job}.log"
    slurm.wait_until(lambda: cluster.state(job) in ("COMPLETED", "FAILED"), 120, "the job to end")
    text = log.read_text()
    assert cluster.state(job) == "COMPLETED", text
    assert "Resumed from" in text, "the job ran through before it was preempted"
    alone = subprocess.run(
        [str(LOCKSTEP), "train", *JOB, "--devices", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert fingerprint(text) == fingerprint(alone.stdout)


def test_the_ranks_of_two_nodes_meet_without_being_told_a_port(cluster, tmp_path):
    words = ["srun", "-N2", "-n4", "--overcommit", str(LOCKSTEP), "train", *JOB[:1], "--epochs", "1"]
    shown = cluster.call(*words, "--set", "data.workers=0", cwd=tmp_path)
    assert "fingerprint" in shown
