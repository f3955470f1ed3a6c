"""Two hosts as network namespaces with a cable between them: training across, and the cable cut and mended."""

import os
import signal
import subprocess
import time

import pytest
from tests.launch.command import wait_until
from tests.launch.hosts.host import Hosts, job, on_one_process, said
from tests.printed import fingerprint

from lockstep.runtime.heartbeat import read_beat


def test_training_over_two_hosts_gives_the_fingerprint_of_one_process(wired_hosts, network, tmp_path, alone):
    before = network.bytes_sent()
    wired_hosts.start("train", *job(tmp_path), devices=("cpu:2", "cpu:1"))
    assert [code for code, _ in wired_hosts.end()] == [0, 0], wired_hosts[1].stderr
    assert fingerprint(wired_hosts[0].stdout) == alone
    sent = [now - then for now, then in zip(network.bytes_sent(), before, strict=True)]
    assert min(sent) > 1e6, "gradients go over the cable, not through memory that the two share"
    assert "fa with ranks 0, 1, fb with rank 2; data over va" in wired_hosts[0].stderr
    assert "from 10.77.0.2 (vb); data over vb" in wired_hosts[1].stderr
    wired_hosts.wait_until_nothing_runs()


@pytest.mark.slow
def test_an_asynchronous_parameter_server_trains_over_two_hosts(wired_hosts, network, tmp_path):
    """Refused before: its servers listened on loopback."""
    words = ("--strategy", "parameter_server", "--set", "parameter_server.mode=asynchronous")
    before = network.bytes_sent()
    wired_hosts.start("train", *job(tmp_path), *words, devices=("cpu:1", "cpu:2"))
    assert [code for code, _ in wired_hosts.end()] == [0, 0], wired_hosts[0].stderr + wired_hosts[1].stderr
    sent = [now - then for now, then in zip(network.bytes_sent(), before, strict=True)]
    assert min(sent) > 1e6, "gradients and values go over the cable"
    assert "updates on average" in wired_hosts[0].stdout + wired_hosts[0].stderr
    wired_hosts.wait_until_nothing_runs()


@pytest.mark.slow
def test_a_synchronous_parameter_server_over_two_hosts_gives_the_fingerprint_of_one_process(
    wired_hosts, tmp_path, alone
):
    words = ("--strategy", "parameter_server", "--set", "parameter_server.servers=1")
    wired_hosts.start("train", *job(tmp_path), *words, devices=("cpu:2", "cpu:1"))
    assert [code for code, _ in wired_hosts.end()] == [0, 0], wired_hosts[1].stderr
    assert fingerprint(wired_hosts[0].stdout) == alone
    wired_hosts.wait_until_nothing_runs()


@pytest.mark.slow
def test_a_killed_worker_of_another_host_ends_no_asynchronous_run(wired_hosts, tmp_path):
    words = ("--strategy", "parameter_server", "--set", "parameter_server.mode=asynchronous")
    wired_hosts.start("train", *job(tmp_path, epochs=15), *words, devices=("cpu:2", "cpu:1"))
    directory = wait_until(lambda: next(wired_hosts[1].folder.rglob("heartbeat-002"), None), 30, "a heartbeat")
    beat = wait_until(lambda: (found := read_beat(directory.parent, 2)) and found.step > 5 and found, 60, "a few steps")
    os.kill(beat.pid, signal.SIGKILL)
    assert [code for code, _ in wired_hosts.end(120)] == [0, 0], wired_hosts[0].stderr
    assert "The worker on rank 2 ended after update" in wired_hosts[0].stdout + wired_hosts[0].stderr
    wired_hosts.wait_until_nothing_runs()


@pytest.mark.slow
def test_pods_of_a_kubeflow_train_job_give_the_fingerprint_of_one_process(wired_hosts, tmp_path, alone):
    for node, host in enumerate(wired_hosts.hosts):
        pod = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": str(node)}
        pod |= {"PET_MASTER_ADDR": "fa", "PET_MASTER_PORT": str(wired_hosts.port)}
        token = {"LOCKSTEP_TOKEN": wired_hosts.token.read_text()}
        host.begin_command(["train", *job(tmp_path), "--devices", f"cpu:{2 - node}"], pod | token)
    assert [code for code, _ in wired_hosts.end()] == [0, 0], wired_hosts[1].stderr
    assert fingerprint(wired_hosts[0].stdout) == alone
    assert "fa with ranks 0, 1, fb with rank 2" in wired_hosts[0].stderr


@pytest.mark.slow
def test_pods_of_a_pytorch_job_with_plain_python_give_the_fingerprint_of_one_process(wired_hosts, tmp_path, alone):
    """Refused or stuck before: both ranks were taken for ranks of one host, whose data goes over loopback."""
    for node, host in enumerate(wired_hosts.hosts):
        pod = {
            "RANK": str(node),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "fa",
            "MASTER_PORT": str(wired_hosts.port),
        }
        host.begin_command(["train", *job(tmp_path)], pod | {"KUBERNETES_SERVICE_HOST": "10.96.0.1"})
    assert [code for code, _ in wired_hosts.end()] == [0, 0], wired_hosts[1].stderr
    assert fingerprint(wired_hosts[0].stdout) == alone


@pytest.mark.slow
@pytest.mark.fault("X1")
def test_nothing_listens_on_another_address_than_the_named_one(wired_hosts, network):
    wired_hosts.loop()
    wired_hosts[0].wait_for_mark("running", 2)
    for host, address in zip(wired_hosts.hosts, network.addresses, strict=True):
        listening = subprocess.run(
            [*host.prefix, "ss", "--tcp", "--listening", "--numeric", "--no-header"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        places = {line.split()[3].rpartition(":")[0] for line in listening.splitlines()}
        assert places == {address}, listening
    wired_hosts[0].process.terminate()
    assert [code for code, _ in wired_hosts.end()] == [75, 75]


@pytest.mark.slow
@pytest.mark.fault("N1")
def test_a_cut_cable_ends_the_run_on_both_sides_and_names_the_other_host(wired_hosts, network):
    wired_hosts.loop()
    wired_hosts[0].wait_for_mark("running", 2)
    for host in wired_hosts.hosts:
        host.start_clock()
    network.cut()
    for node, other in ((0, "host 1 (fb)"), (1, "host 0 (fa)")):
        wait_for_line(wired_hosts[node], f"lockstep: {other} has sent nothing for 13 s.", 15)
    for node, (code, lines) in enumerate(wired_hosts.end()):
        assert code == 4
        other = ("host 1 (fb)", "host 0 (fa)")[node]
        assert said(lines)[0] == f"{other} has sent nothing for 13 s."
        assert wired_hosts[node].seconds < 25
    wired_hosts.wait_until_nothing_runs()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [5, 10])
@pytest.mark.fault("N2")
def test_a_cable_that_is_put_back_within_ten_seconds_costs_nothing_but_the_time(wired_hosts, network, seconds):
    wired_hosts.loop()
    wired_hosts[0].wait_for_mark("running", 2)
    network.cut()
    time.sleep(seconds)  # the fault itself lasts this long
    network.mend()
    for node, other in ((0, "host 1 (fb)"), (1, "host 0 (fa)")):
        wait_for_line(wired_hosts[node], f"lockstep: {other} is back after ", 5)
    wired_hosts[1].process.terminate()
    ends = wired_hosts.end(90)
    assert [code for code, _ in ends] == [75, 75]
    steps = wired_hosts[0].wait_for_mark("saved", 2)
    assert said(ends[0][1]) == [f"Preempted: 2 ranks stopped at step {steps[0]}. Exit code 75."]
    wired_hosts.wait_until_nothing_runs()


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.fault("N4")
def test_a_killed_supervisor_leaves_nothing_on_either_host(wired_hosts, node):
    wired_hosts.loop(devices=("cpu:2", "cpu:2"))
    wired_hosts[0].wait_for_mark("running", 4)
    other = wired_hosts[1 - node]
    other.start_clock()
    wired_hosts[node].process.kill()
    assert other.end()[0] == 4
    assert other.seconds < 10
    wired_hosts.wait_until_nothing_runs()


@pytest.mark.slow
@pytest.mark.fault("M6")
def test_a_lost_host_is_left_out_and_the_run_ends_in_the_same_fingerprint(wired_hosts, network, tmp_path):
    words = job(tmp_path, "checkpoint.every_steps=5", epochs=8)
    wired_hosts.start("train", *words)
    wait_until(lambda: list(tmp_path.glob("runs/*/step-*/manifest.json")), 60, "a checkpoint")
    network.cut()
    assert wired_hosts[0].end(120)[0] == 0, wired_hosts[0].stderr
    assert wired_hosts[1].end()[0] == 4
    assert "Restart 1 of 3" in wired_hosts[0].stderr
    assert fingerprint(wired_hosts[0].stdout) == on_one_process(tmp_path, epochs=8)
    wired_hosts.wait_until_nothing_runs()


@pytest.mark.slow
@pytest.mark.fault("M6")
def test_a_lost_host_is_left_out_of_an_asynchronous_run(wired_hosts, network, tmp_path):
    words = ("--strategy", "parameter_server", "--set", "parameter_server.mode=asynchronous")
    more = job(tmp_path, "parameter_server.snapshot_every=5", epochs=15)
    wired_hosts.start("train", *more, *words, devices=("cpu:2", "cpu:1"))
    wait_until(lambda: list(tmp_path.glob("runs/*/step-*/manifest.json")), 60, "a checkpoint")
    network.cut()
    assert wired_hosts[0].end(120)[0] == 0, wired_hosts[0].stderr
    assert wired_hosts[1].end()[0] == 4
    assert "Restart 1 of 3" in wired_hosts[0].stderr
    wired_hosts.wait_until_nothing_runs()


@pytest.mark.slow
@pytest.mark.fault("M5")
def test_a_slow_cable_that_loses_packets_changes_no_bit_and_is_named(network, tmp_path):
    with network.slow_cable(delay=0.03, megabits=20, loss=0.005) as addresses:
        hosts = Hosts(tmp_path, addresses[0], network.prefixes)
        try:
            hosts.start("train", *job(tmp_path, epochs=5))
            assert [code for code, _ in hosts.end(150)] == [0, 0], hosts[0].stderr
            assert fingerprint(hosts[0].stdout) == on_one_process(tmp_path, epochs=5)
            assert "data over wire" in hosts[1].stderr
            assert "lockstep: the exchange between the hosts limits this run" in hosts[0].stderr
        finally:
            hosts.clean_up()


def wait_for_line(host, start, timeout):
    def is_there():
        return any(line.startswith(start) for line in host.stderr.splitlines())

    wait_until(is_there, timeout, f"{start!r}; {host.stderr}")
