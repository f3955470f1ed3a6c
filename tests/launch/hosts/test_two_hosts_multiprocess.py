"""Two supervisors of one run, on loopback: real commands, real ranks, real signals."""

import os
import signal

import pytest
from tests.launch.command import LOOP, wait_until
from tests.launch.hosts.host import Host, Hosts, job, on_one_process, said
from tests.printed import fingerprint

from lockstep.runtime.heartbeat import read_beat


@pytest.mark.slow
def test_ranks_of_both_hosts_make_one_world(two_hosts):
    two_hosts.loop(steps=20, devices=("cpu:2", "cpu:1"))
    assert [code for code, _ in two_hosts.end()] == [0, 0]
    assert two_hosts[0].stdout == "rank 0 done\n"
    assert "2 hosts: " in two_hosts[0].stderr
    assert "with ranks 0, 1" in two_hosts[0].stderr
    assert "with rank 2;" in two_hosts[0].stderr
    assert sorted(two_hosts[0].wait_for_mark("running", 3)) == [0, 1, 2]
    two_hosts.wait_until_nothing_runs()
    assert [host.left_over() for host in two_hosts.hosts] == [[], []]


def test_a_failure_on_one_host_is_the_same_report_on_both(two_hosts):
    two_hosts.loop("1:20:exception", devices=("cpu:1", "cpu:1"))
    (first, lines), (second, other_lines) = two_hosts.end()
    assert (first, second) == (4, 4)
    assert said(lines) == said(other_lines)
    assert said(lines)[0].startswith("rank 1 failed first, step 20, forward, samples 201 (host ")
    assert "ValueError: the loss does not like this batch" in lines
    assert "  rank 0: lost the connection to a rank that was gone" in lines
    two_hosts.wait_until_nothing_runs()


def begin_tasks(hosts, words):
    """Starts ``words(node)`` as the only task of each of two nodes, as srun does."""
    for node, host in enumerate(hosts.hosts):
        task = {"SLURM_PROCID": node, "SLURM_NODEID": node, "SLURM_LOCALID": 0, "SLURM_STEP_ID": 0}
        step = {"SLURM_NTASKS": 2, "SLURM_NNODES": 2, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
        place = {
            "MASTER_ADDR": hosts.master,
            "MASTER_PORT": hosts.port,
            "LOCKSTEP_TOKEN": hosts.token.read_text(),
        }
        environment = {name: str(value) for name, value in {**task, **step, **place}.items()}
        host.begin_command(["run", "--nnodes", "slurm", "--devices", "cpu:1", *words(node)], environment)


@pytest.mark.fault("P1")
def test_tasks_of_slurm_report_once_on_their_common_terminal(two_hosts):
    begin_tasks(two_hosts, lambda node: [LOOP, two_hosts[0].marks, 10**9, "1:20:killed"])
    (first, lines), (second, others) = two_hosts.end()
    assert (first, second) == (4, 4)
    assert said(lines)[0].startswith("rank 1 killed by SIGKILL, step 20, forward, samples 201 (host ")
    assert others == []
    two_hosts.wait_until_nothing_runs()


def test_tasks_of_slurm_that_differ_are_refused_once(two_hosts):
    begin_tasks(two_hosts, lambda node: ["--threads", node + 1, LOOP, two_hosts[0].marks, 1])
    (first, lines), (second, others) = two_hosts.end()
    assert (first, second) == (2, 2)
    assert "threads is 1 on host 0, 2 on host 1" in lines[-1]
    assert others == []


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.fault("P1", "N3")
def test_a_killed_rank_ends_both_hosts_within_ten_seconds(two_hosts, node):
    two_hosts.loop(devices=("cpu:2", "cpu:2"))
    processes = two_hosts[0].wait_for_mark("running", 4)
    rank = 2 * node + 1
    for host in two_hosts.hosts:
        host.start_clock()
    os.kill(int(processes[rank]), signal.SIGKILL)
    ends = two_hosts.end()
    assert two_hosts[0].seconds < 10
    for code, lines in ends:
        assert code == 4
        assert said(lines)[0].startswith(f"rank {rank} killed by SIGKILL")
    two_hosts.wait_until_nothing_runs()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)])
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.fault("P5")
def test_a_stop_signal_to_one_host_stops_all_ranks_at_the_same_step(two_hosts, number, code, node):
    two_hosts.loop(devices=("cpu:1", "cpu:2"))
    two_hosts[0].wait_for_mark("running", 3)
    two_hosts[node].signal(number)
    ends = two_hosts.end()
    assert two_hosts[node].seconds < 10
    steps = two_hosts[0].wait_for_mark("saved", 3)
    assert len(set(steps.values())) == 1
    word = "Interrupted" if code == 130 else "Preempted"
    for found, lines in ends:
        assert found == code
        assert said(lines) == [f"{word}: 3 ranks stopped at step {steps[0]}. Exit code {code}."]
    two_hosts.wait_until_nothing_runs()


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.fault("N4")
def test_a_killed_supervisor_leaves_nothing_on_either_host(two_hosts, node):
    two_hosts.loop(devices=("cpu:2", "cpu:1"))
    two_hosts[0].wait_for_mark("running", 3)
    other = two_hosts[1 - node]
    other.start_clock()
    two_hosts[node].process.kill()
    code, lines = other.end()
    assert other.seconds < 10
    assert code == 4
    assert said(lines)[0].startswith(f"host {node} (")
    assert "closed the connection and did not reconnect: its command has ended." in said(lines)[0]
    two_hosts.wait_until_nothing_runs()


@pytest.mark.slow
@pytest.mark.fault("N1")
def test_a_stopped_supervisor_is_named_after_its_limit(two_hosts):
    two_hosts.loop()
    two_hosts[0].wait_for_mark("running", 2)
    two_hosts[0].start_clock()
    two_hosts[1].signal(signal.SIGSTOP)
    code, lines = two_hosts[0].end()
    assert two_hosts[0].seconds < 25
    assert code == 4
    assert said(lines)[0].startswith("host 1 (")
    assert "has sent nothing for 13 s." in said(lines)[0]
    two_hosts[1].signal(signal.SIGCONT)
    assert two_hosts[1].end()[0] == 4
    two_hosts.wait_until_nothing_runs()


@pytest.mark.slow
@pytest.mark.fault("P10")
def test_a_stall_that_spans_hosts_names_the_rank_that_is_missing(two_hosts):
    two_hosts.loop("1:30:deaf", devices=("cpu:1", "cpu:1"), more=("--stall-limit", "5"))
    ends = two_hosts.end(90)
    for code, lines in ends:
        assert code == 5
        assert "the others wait for rank 1, which is in step 30, forward at" in said(lines)[0]
        assert "faulty_loop.py" in said(lines)[0]
    two_hosts.wait_until_nothing_runs(5.0)


@pytest.mark.slow
@pytest.mark.fault("P15")
def test_a_rank_that_leaves_early_ends_the_run_on_both_hosts(two_hosts):
    two_hosts.loop("1:30:exit_zero")
    for code, lines in two_hosts.end():
        assert code == 4
        assert said(lines)[0].startswith("rank 1 left at step 30 while the others continued (host ")
    two_hosts.wait_until_nothing_runs()


def train_to_a_checkpoint(hosts, folder):
    """Starts the small job on all hosts and comes back when it can be gone on with."""
    hosts.start("train", *job(folder, "checkpoint.every_steps=5", epochs=8))
    wait_until(lambda: list(folder.glob("runs/*/step-*/manifest.json")), 60, "a checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
def test_a_run_that_lost_a_rank_goes_on_on_both_hosts_to_the_same_fingerprint(two_hosts, tmp_path, node):
    train_to_a_checkpoint(two_hosts, tmp_path)
    (directory,) = (two_hosts[node].folder / "runtime").iterdir()
    os.kill(read_beat(directory, node).pid, signal.SIGKILL)
    for host, (code, lines) in zip(two_hosts.hosts, two_hosts.end(120), strict=True):
        assert code == 0, lines
        assert "Restart 1 of 3: the same 1 rank, from the last checkpoint if there is one." in host.stderr
    assert fingerprint(two_hosts[0].stdout) == on_one_process(tmp_path, epochs=8)
    two_hosts.wait_until_nothing_runs()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "layout"),
    [
        (("cpu:4", "cpu:2"), ()),
        (("cpu:3", "cpu:3"), ("--strategy", "hybrid", "--mesh", "data=3,pipeline=2")),
        (("cpu:4", "cpu:2"), ("--strategy", "hybrid", "--mesh", "data=3,pipeline=2")),
    ],
)
def test_hosts_of_unlike_size_end_in_the_fingerprint_of_one_process(two_hosts, tmp_path, devices, layout):
    recipe = ("training.micro_batches=6", "training.global_batch=96")
    two_hosts.start("train", *job(tmp_path, *recipe), *layout, devices=devices)
    for code, lines in two_hosts.end(120):
        assert code == 0, lines
    alone = Host(tmp_path, "alone")
    alone.begin_command(["train", *job(tmp_path / "alone", *recipe), "--devices", "cpu:1"])
    assert alone.end(120)[0] == 0
    assert fingerprint(two_hosts[0].stdout) == fingerprint(alone.stdout)


@pytest.mark.slow
@pytest.mark.fault("M6")
def test_of_three_hosts_the_two_that_are_left_go_on_to_the_same_fingerprint(tmp_path):
    hosts = Hosts(tmp_path, prefixes=((), (), ()))
    try:
        train_to_a_checkpoint(hosts, tmp_path)
        hosts[1].process.kill()
        assert [code for code, _ in hosts.end(120)] == [0, -signal.SIGKILL, 0], hosts[2].stderr
        for node in (0, 2):
            assert "Restart 1 of 3" in hosts[node].stderr
        assert fingerprint(hosts[0].stdout) == on_one_process(tmp_path, epochs=8)
        hosts.wait_until_nothing_runs()
    finally:
        hosts.clean_up()


@pytest.mark.slow
@pytest.mark.fault("N5")
def test_a_rank_that_never_joins_the_group_is_not_waited_for_on_the_other_host(two_hosts, tmp_path):
    script = tmp_path / "early.py"
    script.write_text(
        "from lockstep.distributed.process_group import open_process_group\n"
        "from lockstep.core.world import World\n"
        "world = World.from_environment()\n"
        "if world.rank == 1:\n    raise ValueError('no')\n"
        "with open_process_group(world):\n    pass\n"
    )
    two_hosts.start("run", script)
    ends = two_hosts.end(40)  # the roll-call of ranks alone would wait for 60 s
    for code, lines in ends:
        assert code == 4
        assert said(lines)[0].startswith("rank 1 failed first, start (host ")
        assert "  rank 0: stopped after it" in lines
    two_hosts.wait_until_nothing_runs()


@pytest.mark.slow
@pytest.mark.fault("P15")
def test_a_rank_that_leaves_the_loop_early_on_another_host_is_named(two_hosts):
    two_hosts.loop("2:30:leave_loop", devices=("cpu:2", "cpu:1"))
    for code, lines in two_hosts.end():
        assert code == 4
        assert said(lines)[0].startswith("rank 2 left at step 30 while the others continued (host ")
    two_hosts.wait_until_nothing_runs()


@pytest.mark.slow
@pytest.mark.fault("P10")
def test_a_plain_script_that_stalls_over_hosts_is_explained(two_hosts, tmp_path):
    """Without heartbeats, the same line and the same collective for so long are what is seen."""
    script = tmp_path / "plain.py"
    script.write_text(
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if dist.get_rank() == 1:\n    time.sleep(600)\n"
        "dist.all_reduce(torch.ones(7))\n"
    )
    two_hosts.start("run", script, more=("--stall-limit", "4"))
    for code, lines in two_hosts.end(90):
        assert code == 5
        assert "the others wait for rank 1, which is in start at" in said(lines)[0]
        assert "time.sleep(600)" in said(lines)[0]
    two_hosts.wait_until_nothing_runs(5.0)


@pytest.mark.slow
@pytest.mark.fault("P4")
def test_ctrl_c_waits_for_a_checkpoint_that_is_written_on_the_other_host(two_hosts, tmp_path):
    script = tmp_path / "saver.py"
    script.write_text(SAVER)
    two_hosts.start("run", script, two_hosts[0].marks)
    two_hosts[0].wait_for_mark("running", 2)
    two_hosts[1].signal(signal.SIGINT)
    assert [code for code, _ in two_hosts.end()] == [130, 130]
    assert 5 <= two_hosts[1].seconds < 10
    assert sorted(two_hosts[0].wait_for_mark("saved", 2)) == [0, 1]


SAVER = """\
import sys, time, torch, torch.distributed as dist
from pathlib import Path
from lockstep.launch import Heartbeat, Stopped, StopReason
from lockstep.distributed.process_group import open_process_group
from lockstep.core.world import World

world = World.from_environment()
heartbeat = Heartbeat.open(world)
heartbeat.will_poll()
with open_process_group(world):
    for step in range(10**9):
        heartbeat.mark("reduce", epoch=0, step=step)
        reason = torch.tensor([int(heartbeat.stop_reason)])
        dist.all_reduce(reason, dist.ReduceOp.MAX)
        if step == 3:
            Path(sys.argv[1], f"running-{world.rank}").touch()
        if reason:
            heartbeat.mark("save" if world.is_main else "wait", epoch=0, step=step)
            if world.is_main:
                time.sleep(5)
            dist.barrier()
            Path(sys.argv[1], f"saved-{world.rank}").touch()
            raise Stopped(StopReason(int(reason)))
"""
