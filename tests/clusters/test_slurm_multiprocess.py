"""Ranks that are tasks of a real two-node SLURM; ``test_slurm_faults_multiprocess`` has those of a supervisor."""

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


SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=digits --nodes=2 --ntasks-per-node=1 --time=10:00
#SBATCH --output=digits-%j.log --open-mode=append --signal=USR1@120 --requeue
status=0
srun --kill-on-bad-exit=1 lockstep train {job} --set run.name=digits-${{SLURM_JOB_ID}} --resume auto || status=$?
if [ "$status" -eq 75 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt 20 ]; then
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60
fi
exit "$status"
"""
"""As ``lockstep slurm`` wrote it when each rank was a task: such scripts go on working."""


@pytest.mark.slow
@pytest.mark.fault("P5", "P6")
def test_a_preempted_job_with_a_task_for_each_rank_ends_with_the_result_of_one_process(cluster, tmp_path):
    (tmp_path / "job.sh").write_text(SCRIPT.format(job=" ".join(JOB)))
    job = cluster.call("sbatch", "--parsable", "job.sh", cwd=tmp_path)
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


@pytest.mark.slow
def test_the_ranks_of_two_nodes_meet_without_being_told_a_port(cluster, tmp_path):
    words = ["srun", "-N2", "-n4", "--overcommit", str(LOCKSTEP), "train", *JOB[:1], "--epochs", "1"]
    shown = cluster.call(*words, "--set", "data.workers=0", cwd=tmp_path)
    assert "fingerprint" in shown
