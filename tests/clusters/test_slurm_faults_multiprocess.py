"""Faults on a two-node SLURM with a supervisor on each node: the report of one host and of two, and what SLURM does."""

import os
import re
import secrets
import signal
import sys
import time
from pathlib import Path

import pytest
from tests.clusters import slurm
from tests.launch.command import LOOP, Command, wait_until
from tests.launch.hosts.host import Host, Hosts, job, on_one_process, said
from tests.launch.hosts.network import TwoHostNetwork, missing
from tests.printed import fingerprint

from lockstep.runtime.heartbeat import read_beat

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or "-"),
]
FAULTS = {"killed": 4, "exception": 4, "exit_zero": 4, "stopped": 5, "deaf": 5}
_LIMIT = ("--stall-limit", "4")
_STEP = ("srun", "-N2", "-n2", "--kill-on-bad-exit=0", "--wait=0")


@pytest.fixture(scope="module")
def cluster():
    with slurm.Cluster() as one:
        yield one


@pytest.fixture(scope="module")
def wired(tmp_path_factory):
    """A cluster whose nodes are two hosts with a cable between them."""
    if reason := missing():
        pytest.skip(reason)
    with TwoHostNetwork(tmp_path_factory.mktemp("network")) as cable, slurm.Cluster(cable) as one:
        yield one
        cable.mend()


class Step(Host):
    """One step of a cluster, with a supervisor on each of its two nodes."""

    def __init__(self, folder, cluster, *srun):
        super().__init__(folder, 0, (*cluster.prefix, *_STEP, *srun))
        self.marks.mkdir(exist_ok=True)
        self.cluster = cluster

    def step(self, command, *words):
        token = {"LOCKSTEP_TOKEN": secrets.token_hex(32)}
        place = ["--nnodes", "slurm", "--devices", "cpu:1"]
        words = [command, *words, *place] if command == "train" else [command, *place, *words]
        self.begin_command(words, {**self.cluster.environment, **token})
        return self


def sentences(lines):
    """A report without what differs from run to run: process ids, folders, seconds, and the host of a rank."""
    shown = [line for line in said(lines) if not line.startswith(("srun: ", "slurmstepd: "))]
    text = re.sub(r"\((?:host [^,)]+, )?pid \d+", "(pid", "\n".join(shown))
    text = re.sub(r"^(Logs|All stacks and collectives): .*$", r"\1", text, flags=re.MULTILINE)
    return re.sub(r"\d+(\.\d)? s\b", "N s", text).splitlines()


def ended(host, marks):
    """Exit code, report, and the seconds from the fault on, which comes right after the mark."""
    code, lines = host.end(90)
    return code, lines, time.time() - (marks / "running-1").stat().st_mtime


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.fault("P1", "P2", "P10")
def test_a_fault_has_the_same_report_on_one_host_two_hosts_and_two_nodes(cluster, tmp_path, fault):
    planted = f"1:20:{fault}"
    for name in ("one", "two", "slurm"):
        (tmp_path / name).mkdir()
    one, two = Command(tmp_path / "one"), Hosts(tmp_path / "two")
    step = Step(tmp_path / "slurm", cluster)
    try:
        one.loop(planted, devices="cpu:2", options=_LIMIT)
        code, lines, seconds = ended(one, one.marks)
        two.loop(planted, more=_LIMIT)
        by_hosts = [ended(host, host.marks) for host in two.hosts]
        step.step("run", *_LIMIT, LOOP, step.marks, 10**9, planted)
        by_slurm = ended(step, step.marks)
    finally:
        for each in (one, two, step):
            each.clean_up()
    assert code == FAULTS[fault], lines
    assert "rank 1" in lines[0], lines
    for found, said_there, seconds_there in (*by_hosts, by_slurm):
        assert found == code, said_there
        assert sentences(said_there) == sentences(lines)
        assert seconds_there < seconds + 4


def train(cluster, folder, *settings):
    """A step that trains the small job, past its first checkpoint."""
    step = Step(folder, cluster)
    step.step("train", *job(folder, "checkpoint.every_steps=5", *settings, epochs=8))
    wait_until(lambda: list(folder.glob("runs/*/step-*/manifest.json")), 60, f"a checkpoint; {step.stderr}")
    return step


@pytest.mark.fault("P1")
def test_a_killed_rank_is_restarted_in_the_job_to_the_fingerprint_of_one_process(cluster, tmp_path):
    step = train(cluster, tmp_path)
    beats = [read_beat(run, 1) for run in (step.folder / "runtime").iterdir()]
    os.kill(next(beat.pid for beat in beats if beat), signal.SIGKILL)
    code, lines = step.end(120)
    assert code == 0, lines
    assert step.stderr.count("rank 1 killed by SIGKILL") == 1
    assert step.stderr.count("Restart 1 of 3: the same 1 rank, from the last checkpoint if there is one.") == 1
    assert fingerprint(step.stdout) == on_one_process(tmp_path, epochs=8)
    step.wait_until_nothing_runs()


@pytest.mark.fault("N1")
def test_a_cut_node_is_named_as_a_cut_host(wired, tmp_path):
    step = Step(tmp_path, wired)
    step.step("run", LOOP, step.marks, 10**9)
    step.wait_for_mark("running", 2)
    step.start_clock()
    wired.network.cut()
    report = ["host 1 (fb) has sent nothing for 13 s.", "The 1 rank of the other hosts ended after it."]
    try:
        wait_until(lambda: report[1] in step.stderr, 30, "the report")
        assert 13 <= step.seconds < 20
    finally:
        wired.network.mend()
    code, lines = step.end(90)
    assert code == 4, lines
    shown = [line for line in said(lines) if not line.startswith("srun: ")]
    assert shown[:2] == report
    step.wait_until_nothing_runs()


def submit(cluster, folder, *more, epochs=6):
    """Submits the script of a job on both nodes; returns its number, its run folder and its log."""
    cluster.environment["PATH"] = f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"
    words = ["digits", "--epochs", str(epochs), "--set", "checkpoint.every_steps=5", "--nodes", "2", *more]
    number = cluster.call("lockstep", "slurm", *words, "--time", "10:00", "--submit", cwd=folder).split()[-1]
    return number, folder / "runs" / f"digits-{number}", folder / f"digits-{number}.log"


def completed(cluster, number, log):
    """Waits for the end of a job; returns its log."""
    wait_until(lambda: cluster.state(number) in ("COMPLETED", "FAILED"), 300, "the job to end")
    text = log.read_text()
    assert cluster.state(number) == "COMPLETED", text
    return text


@pytest.mark.fault("P5", "P6")
@pytest.mark.parametrize("by", ["USR1", "requeue", "urgent job"])
def test_a_preempted_job_resumes_to_the_fingerprint_of_one_process(cluster, tmp_path, by):
    number, run, log = submit(cluster, tmp_path, "--set", "data.workers=1")
    wait_until(lambda: list(run.glob("step-*/manifest.json")), 90, "a checkpoint")
    if by == "USR1":
        cluster.call("scancel", "--signal=USR1", number)
    elif by == "requeue":
        cluster.call("scontrol", "requeue", number)
    else:
        cluster.call("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true", cwd=tmp_path)
    text = completed(cluster, number, log)
    assert "Preempted: 2 ranks stopped at step" in text
    assert "Resumed from" in text
    assert fingerprint(text) == on_one_process(tmp_path, epochs=6)


def test_a_job_that_is_suspended_for_longer_than_hosts_are_waited_for_continues(cluster, tmp_path):
    number, run, log = submit(cluster, tmp_path)
    wait_until(lambda: list(run.glob("step-*/manifest.json")), 90, "a checkpoint")
    cluster.call("scontrol", "suspend", number)
    time.sleep(20)  # the suspension itself lasts this long
    cluster.call("scontrol", "resume", number)
    text = completed(cluster, number, log)
    assert "has sent nothing" not in text
    assert "Restart" not in text


@pytest.mark.fault("M6")
def test_the_node_that_is_left_continues_until_slurm_requeues_the_job(wired, tmp_path):
    number, run, log = submit(wired, tmp_path, "--set", "run.timeout=20", epochs=60)
    wait_until(lambda: list(run.glob("step-*/manifest.json")), 90, "a checkpoint")
    wired.network.cut()
    try:
        wait_until(lambda: "Restart 1 of 3: " in log.read_text(), 40, "the other node to continue")
        wait_until(lambda: "CANCELLED" in log.read_text(), 90, "SLURM to end the job")
    finally:
        wired.network.mend()
    text = completed(wired, number, log)
    assert "host 1 (fb) has sent nothing for 13 s." in text
    assert fingerprint(text) == on_one_process(tmp_path, epochs=60)
