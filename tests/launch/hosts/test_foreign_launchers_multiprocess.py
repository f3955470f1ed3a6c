"""Ranks that Open MPI or torchrun started: real launchers, every way to meet, the fingerprint of one process."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch.command import LOOP, wait_until
from tests.launch.hosts.host import LOCKSTEP, LOOPBACK, Host, free_port, job, on_one_process
from tests.printed import fingerprint

MPIRUN = [
    "mpirun",
    "--oversubscribe",
    "--mca",
    "oob_tcp_if_include",
    "lo",
    "--mca",
    "btl_tcp_if_include",
    "lo",
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PLAIN = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"sum {total.item():g} of {dist.get_world_size()}")
dist.destroy_process_group()
"""

needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="Open MPI is not installed here (apt-get install openmpi-bin)"
)


def mpirun(ranks, *more):
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [*MPIRUN, *as_root, "-n", str(ranks), *more]


def call(words, folder, **environment):
    """Runs a command to its end in a folder of its own."""
    done = subprocess.run(
        list(map(str, words)),
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=150,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done


@needs_mpi
def test_open_mpi_on_one_host_needs_no_address_and_opens_no_port(tmp_path, alone):
    done = call([*mpirun(2), *LOCKSTEP, "train", *job(tmp_path)], tmp_path)
    assert fingerprint(done.stdout) == alone


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["env", "tcp", "file"])
def test_open_mpi_meets_where_it_is_told_to(tmp_path, alone, kind):
    port = free_port()
    place = {"env": "env://", "tcp": f"tcp://{LOOPBACK}:{port}", "file": f"file://{tmp_path}/meeting"}[kind]
    export = ["-x", f"MASTER_ADDR={LOOPBACK}", "-x", f"MASTER_PORT={port}"] if kind == "env" else []
    done = call([*mpirun(3, *export), *LOCKSTEP, "train", *job(tmp_path), "--rendezvous", place], tmp_path)
    assert fingerprint(done.stdout) == alone


@needs_mpi
@pytest.mark.slow
def test_a_rank_that_fails_under_open_mpi_ends_the_job(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, lockstep\n"
        "run = lockstep.init(global_batch=8, micro_batches=4)\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n    raise SystemExit(7)\n"
        "import time; time.sleep(600)\n"
    )
    done = subprocess.run([*mpirun(2), *LOCKSTEP, "run", str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 7


@needs_mpi
@pytest.mark.slow
def test_ranks_end_when_mpirun_is_killed(tmp_path):
    host = Host(tmp_path, 0, tuple(mpirun(2)))
    (tmp_path / "marks").mkdir()
    host.begin_command(["run", LOOP, host.marks, 10**9])
    host.wait_for_mark("running", 2)
    host.process.kill()
    try:
        host.wait_until_nothing_runs()
    finally:
        host.clean_up()


@pytest.mark.slow
def test_torchrun_s_open_store_is_named_once(tmp_path, alone):
    agent = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "--no-python"]
    done = call([*agent, *LOCKSTEP, "train", *job(tmp_path)], tmp_path)
    assert fingerprint(done.stdout) == alone
    assert done.stderr.count("listens on every interface and its agent may unpickle") == 1


@pytest.mark.slow
def test_torchrun_with_a_static_rendezvous_is_joined_on_two_nodes(tmp_path, alone):
    place = [f"--master-addr={LOOPBACK}", f"--master-port={free_port()}"]
    done = on_two_nodes(lambda node: [*place, "--nnodes=2", f"--node-rank={node}"], tmp_path)
    assert fingerprint(done.stdout) == alone


@pytest.mark.slow
def test_torchrun_with_an_elastic_rendezvous_is_joined_on_two_nodes(tmp_path, alone):
    place = ["--rdzv-backend=c10d", f"--rdzv-endpoint={LOOPBACK}:{free_port()}", "--rdzv-id=job"]
    done = on_two_nodes(lambda node: [*place, "--nnodes=1:2", f"--rdzv-conf=is_host={1 - node}"], tmp_path)
    assert fingerprint(done.stdout) == alone


@pytest.mark.slow
def test_torchrun_s_restart_goes_on_from_the_checkpoint_to_the_same_fingerprint(tmp_path):
    host = Host(tmp_path, 0, (*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=2", "--no-python"))
    words = job(tmp_path, "checkpoint.every_steps=5", "run.name=one", epochs=8)
    host.begin_command(["train", *words, "--resume", "auto"], {"OMP_NUM_THREADS": "1"})
    try:
        wait_until(lambda: list(tmp_path.glob("runs/one/step-*/manifest.json")), 60, "a checkpoint")
        rank = next(pid for pid in host.processes() if b"LOCAL_RANK=1" in environment_of(pid))
        os.kill(rank, signal.SIGKILL)
        code, lines = host.end(150)
        assert code == 0, lines
        assert host.stdout.count("fingerprint ") == 1
        assert fingerprint(host.stdout) == on_one_process(tmp_path, epochs=8)
        host.wait_until_nothing_runs()
    finally:
        host.clean_up()


def environment_of(pid):
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_plain_script_meets_where_it_is_told_to(tmp_path, kind):
    """The script's own ``init_process_group()`` takes the place of ``--rendezvous``."""
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    place = f"tcp://{LOOPBACK}:{free_port()}" if kind == "tcp" else f"file://{tmp_path}/meeting"
    agent = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "--no-python"]
    done = call([*agent, *LOCKSTEP, "run", "--rendezvous", place, script], tmp_path, GLOO_SOCKET_IFNAME="lo")
    assert done.stdout.count("sum 2 of 2") == 2


def on_two_nodes(options, folder):
    """Runs the job under one agent for each of two nodes; returns how that of rank 0 ended."""
    agents = []
    for node in range(2):
        (folder / str(node)).mkdir()
        words = [
            *TORCHRUN,
            *options(node),
            "--nproc-per-node=1",
            "--no-python",
            *LOCKSTEP,
            "train",
            *job(folder),
        ]
        agents.append(
            subprocess.Popen(
                words,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=folder / str(node),
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )
        )
    try:
        ends = [subprocess.CompletedProcess(agent.args, 0, *agent.communicate(timeout=150)) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], ends[0].stderr + ends[1].stderr
    return next(end for end in ends if "fingerprint" in end.stdout)
