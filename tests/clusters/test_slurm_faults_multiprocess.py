"""Faults on a two-node SLURM with a supervisor on each node: the report of one host and of two, and what SLURM does."""

import os
import re
import secrets
import signal
import time

import pytest
from tests.clusters import slurm
from tests.launch.command import LOOP, Command, wait_until
from tests.launch.hosts.host import Host, Hosts, job, on_one_process, said
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
    assert step.stderr.count("Restart 1 of 3: the same 1 rank resumes from the last checkpoint.") == 1
    assert fingerprint(step.stdout) == on_one_process(tmp_path, epochs=8)
    step.wait_until_nothing_runs()
