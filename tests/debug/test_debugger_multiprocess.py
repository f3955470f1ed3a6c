"""A debugger on one rank: it stops there and reads, and the others wait for as long as it takes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.debug.adapter_client import DebugClient
from tests.debug.held_training import LIMIT
from tests.launch.command import COMMAND, LOOP, Command, wait_until
from tests.launch.hosts.host import Hosts

from lockstep.runtime.heartbeat import read_beat

pytest.importorskip("debugpy", reason="debugpy is not installed: pip install 'lockstep-train[debug]'")

SCRIPT = Path(__file__).with_name("held_training.py")
LINE = 1 + SCRIPT.read_text().splitlines().index("            run.backward(batch, nn.functional.mse_loss)  # stop here")
LOOP_LINE = 1 + LOOP.read_text().splitlines().index(
    "            self.heartbeat.samples(np.array([10 * step + self.world.rank]))"
)
OPTIONS = ("--debug-rank", "1", "--debug-port", "0", "--stall-limit", str(LIMIT))


@pytest.fixture
def command(tmp_path):
    one = Command(tmp_path)
    yield one
    one.clean_up()


@pytest.fixture
def two_hosts(tmp_path):
    hosts = Hosts(tmp_path)
    yield hosts
    hosts.clean_up()


def port_of(command):
    pattern = re.compile(r"^lockstep: rank 1 waits for a debugger at 127\.0\.0\.1:(\d+)\.$", re.MULTILINE)
    return int(wait_until(lambda: pattern.search(command.stderr), 60, f"an address; {command.stderr}")[1])


@pytest.mark.fault("X4")
def test_a_debugger_stops_on_rank_1_of_2_and_the_other_waits_without_a_limit(command):
    command.start(SCRIPT, devices="cpu:2", options=OPTIONS)
    with DebugClient(port_of(command)) as client:
        client.attach({SCRIPT: [LINE]})
        thread, frame = client.stopped_at()
        assert (frame["line"], Path(frame["source"]["path"])) == (LINE, SCRIPT)
        assert client.value("run.world.rank", frame) == "1"
        assert client.locals_of(frame)["weight_of_rank"] == "1"
        client.request("continue", threadId=thread)
        thread, frame = client.stopped_at()
        assert client.locals_of(frame)["weight_of_rank"] == "11"
        _wait_until_rank_0_has_waited(command, 3 * LIMIT)
        client.request("setBreakpoints", source={"path": str(SCRIPT)}, breakpoints=[])
        client.request("continue", threadId=thread)
        code, lines = command.end()
    assert code == 0, lines
    assert lines == [line for line in lines if "waits for a debugger" in line]
    assert sorted(command.stdout.splitlines()) == [f"rank {rank} trained 2 steps, {10 + rank}" for rank in (0, 1)]
    command.wait_until_nothing_runs()


@pytest.mark.fault("X4")
@pytest.mark.slow
def test_a_rank_of_another_host_is_debugged_by_the_same_option_on_every_host(two_hosts):
    for node in (0, 1):
        options = two_hosts.options(node, *OPTIONS)
        two_hosts[node].begin_command(["run", *options, SCRIPT])
    with DebugClient(port_of(two_hosts[1])) as client:
        client.attach({SCRIPT: [LINE]})
        thread, frame = client.stopped_at()
        assert client.value("run.world.rank", frame) == "1"
        _wait_until_rank_0_has_waited(two_hosts[0], 3 * LIMIT)
        client.request("setBreakpoints", source={"path": str(SCRIPT)}, breakpoints=[])
        client.request("continue", threadId=thread)
        assert [host.end()[0] for host in two_hosts.hosts] == [0, 0]
    assert "waits for a debugger" not in two_hosts[0].stderr
    assert [host.stdout for host in two_hosts.hosts] == [
        f"rank {rank} trained 2 steps, {10 + rank}\n" for rank in (0, 1)
    ]


@pytest.mark.slow
def test_hosts_that_do_not_ask_for_the_same_rank_or_for_none_that_is_there_are_refused(two_hosts):
    for asked, said in (((1, 0), "debug-rank is 1 on host 0, 0 on host 1"), ((2, 2), "the ranks 0 to 1")):
        for node, rank in enumerate(asked):
            options = two_hosts.options(node, "--debug-rank", rank, "--debug-port", 0)
            two_hosts[node].begin_command(["run", *options, SCRIPT])
        assert [host.end()[0] for host in two_hosts.hosts] == [2, 2]
        assert all(said in host.stderr for host in two_hosts.hosts)


@pytest.mark.slow
def test_a_rank_that_torchrun_started_is_debugged_too(command):
    (command.folder / "runtime").mkdir()
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--no-python",
    ]
    words = [*torchrun, *COMMAND, "--debug-rank", "1", "--debug-port", "0", SCRIPT]
    with (command.folder / "stdout").open("w") as stdout, (command.folder / "stderr").open("w") as stderr:
        command.process = subprocess.Popen(
            list(map(str, words)),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    with DebugClient(port_of(command)) as client:
        client.attach({SCRIPT: [LINE]})
        thread, frame = client.stopped_at()
        assert client.value("run.world.rank", frame) == "1"
        assert client.value("run.options.timeout, run.world.patience(0.5)", frame) == "(0.5, 2592000.0)"
        client.request("setBreakpoints", source={"path": str(SCRIPT)}, breakpoints=[])
        client.request("continue", threadId=thread)
        assert command.end()[0] == 0, command.stderr
    assert sorted(command.stdout.splitlines()) == [f"rank {rank} trained 2 steps, {10 + rank}" for rank in (0, 1)]


@pytest.mark.slow
def test_ctrl_c_ends_a_run_that_waits_for_a_debugger(command):
    command.start(SCRIPT, devices="cpu:2", options=OPTIONS)
    port = port_of(command)
    command.signal(signal.SIGINT)
    assert command.end()[0] == 130
    assert command.seconds < 6
    command.wait_until_nothing_runs()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)


@pytest.mark.slow
def test_a_debugger_attaches_to_a_rank_that_runs_already_leaves_and_comes_back(command):
    command.loop(devices="cpu:2", options=["--stall-limit", str(LIMIT)])
    command.wait_for_mark("running", 2)
    for _ in range(2):
        port = asked_port(command)
        with DebugClient(port) as client:
            client.attach({LOOP: [LOOP_LINE]})
            _, frame = client.stopped_at()
            assert client.value("self.world.rank", frame) == "1"
            _wait_until_rank_0_has_waited(command, 3 * LIMIT)
            client.request("disconnect")
    command.signal(signal.SIGINT)
    assert command.end() == (
        130,
        [line for line in command.stderr.splitlines() if "Interrupted: 2 ranks" in line],
    )
    command.wait_until_nothing_runs()


def asked_port(command):
    """As ``lockstep debug --attach`` says it."""
    run_id = json.loads((run_directory(command) / "run.json").read_text())["run_id"]
    places = {"XDG_RUNTIME_DIR": str(command.folder / "runtime"), "TMPDIR": str(command.folder / "tmp")}
    said = subprocess.run(
        [*COMMAND[:-1], "debug", "--attach", run_id, "--rank", "1", "--port", "0"],
        env={**os.environ, **places},
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr
    return int(re.search(r"rank 1 of run \S+ serves a debugger at 127\.0\.0\.1:(\d+)", said.stdout)[1])


def run_directory(command):
    (directory,) = (path for path in (command.folder / "runtime").iterdir() if path.is_dir())
    return directory


def _wait_until_rank_0_has_waited(command, seconds):
    directory = run_directory(command)
    wait_until(lambda: time.monotonic() - read_beat(directory, 0).time > seconds, 60, "rank 0 to wait for rank 1")
