"""Hosts that cannot come together: real commands, which end before a rank is started."""

import contextlib
import signal
import socket

import pytest
from tests.launch.command import wait_until
from tests.launch.hosts.host import LOOPBACK, Host

LIMIT = ("--start-limit", "3")


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("raise SystemExit('a rank was started')\n")
    return path


def begin(hosts, node, script, *more, devices="cpu:1", words=()):
    hosts[node].begin_command(["run", *hosts.options(node, *more, devices=devices), script, *words])


@pytest.mark.fault("S1")
def test_a_host_that_does_not_come_is_named(two_hosts, script):
    begin(two_hosts, 0, script, "--start-limit", "1")
    code, lines = two_hosts[0].end()
    assert code == 4
    assert lines[-1].startswith(
        "lockstep: Not every host connected within 1 s. missing: host 1 (node-rank 1); connected: 0 ("
    )


@pytest.mark.fault("P5")
def test_a_host_that_waits_for_others_ends_when_it_is_preempted(two_hosts, script):
    """Ended by the signal before, and not at all as the first process of a container."""
    begin(two_hosts, 0, script, "--start-limit", "60")
    wait_until(lambda: "waiting for 1 other host" in two_hosts[0].stderr, 30, "the first line")
    two_hosts[0].signal(signal.SIGTERM)
    assert two_hosts[0].end()[0] == 75
    assert two_hosts[0].seconds < 10


@pytest.mark.slow
@pytest.mark.fault("S1", "N5")
def test_every_host_that_came_hears_who_is_missing(tmp_path, two_hosts, script):
    third = Host(tmp_path, 2)
    options = two_hosts.options(0, "--start-limit", "5")
    options[1] = 3
    two_hosts[0].begin_command(["run", *options, script])
    options = two_hosts.options(2)
    options[1] = 3
    third.begin_command(["run", *options, script])
    for host in (two_hosts[0], third):
        code, lines = host.end()
        assert code == 4
        assert "missing: host 1 (node-rank 1); connected: 0 (" in lines[-1]


@pytest.mark.slow
@pytest.mark.fault("S2")
def test_without_host_0_the_others_say_where_they_looked(two_hosts, script):
    begin(two_hosts, 1, script, "--start-limit", "1")
    code, lines = two_hosts[1].end()
    assert code == 4
    assert f"host 0 was not reached at {LOOPBACK}:{two_hosts.port} within 1 s: Connection refused." in lines[-1]


@pytest.mark.fault("S5")
def test_hosts_that_run_something_else_are_refused_on_both_sides(two_hosts, script):
    begin(two_hosts, 0, script, *LIMIT, "--threads", "1", words=("--lr", "0.1"))
    begin(two_hosts, 1, script, *LIMIT, "--threads", "2", words=("--lr", "0.2"))
    for code, lines in two_hosts.end():
        assert code == 2
        assert "the script's arguments is --lr 0.1 on host 0, --lr 0.2 on host 1" in lines[-1]
        assert "threads is 1 on host 0, 2 on host 1" in lines[-1]


@pytest.mark.slow
@pytest.mark.fault("X2")
def test_another_token_is_refused(two_hosts, script):
    begin(two_hosts, 0, script, *LIMIT)
    other = two_hosts.folder / "other-token"
    other.touch(0o600)
    other.write_text("x" * 40)
    begin(two_hosts, 1, script, "--start-limit", "10", "--token-file", other)
    code, lines = two_hosts[1].end()
    assert code == 2
    assert "it uses another token" in lines[-1]
    code, lines = two_hosts[0].end()
    assert code == 4
    assert f"lockstep: refused a connection from {LOOPBACK}: it uses another token." in lines


@pytest.mark.slow
def test_two_hosts_of_one_number_are_told_apart(tmp_path, two_hosts, script):
    options = two_hosts.options(0, *LIMIT)
    options[1] = 3
    two_hosts[0].begin_command(["run", *options, script])
    twins = [Host(tmp_path, name) for name in ("twin", "other-twin")]
    for twin in twins:
        options = two_hosts.options(1, *LIMIT)
        options[1] = 3
        twin.begin_command(["run", *options, script])
    ends = sorted(twin.end() for twin in twins)
    assert [code for code, _ in ends] == [2, 4]
    assert "node-rank 1 is used twice" in ends[0][1][-1]
    assert two_hosts[0].end()[0] == 4


@pytest.mark.fault("S3")
def test_a_port_that_is_taken_is_named(two_hosts, script):
    with socket.socket() as other:
        other.bind((LOOPBACK, two_hosts.port + 1))
        other.listen()
        begin(two_hosts, 0, script, *LIMIT)
        code, lines = two_hosts[0].end()
    assert code == 2
    assert f"cannot listen on {LOOPBACK}:{two_hosts.port + 1}: Address already in use" in lines[-1]


@pytest.mark.fault("X2")
def test_a_stranger_neither_holds_up_the_run_nor_ends_it(two_hosts, script):
    begin(two_hosts, 0, script, "--start-limit", "20")
    strangers = [wait_until(lambda: connected(two_hosts.port), 20, "host 0 to listen") for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    strangers[1].sendall(b"\x80\x04\x95" * 1000)
    begin(two_hosts, 1, script, "--start-limit", "20", "--threads", "2")
    for code, lines in two_hosts.end():
        assert code == 2
        assert "threads is 1 on host 0, 2 on host 1" in lines[-1]  # so both have come
    refusals = [line for line in two_hosts[0].stderr.splitlines() if "refused" in line]
    assert refusals == [f"lockstep: refused a connection from {LOOPBACK}: it does not speak the Lockstep protocol."]
    for connection in strangers:
        connection.close()


def connected(port):
    """A connection; none while nobody listens."""
    with contextlib.suppress(ConnectionRefusedError):
        return socket.create_connection((LOOPBACK, port))


@pytest.mark.slow
def test_ctrl_c_on_host_0_during_the_roll_call_ends_those_that_have_come(two_hosts, script):
    for node in range(2):
        options = two_hosts.options(node)
        options[1] = 3
        two_hosts[node].begin_command(["run", *options, script])
    wait_until(lambda: "(2/3)" in two_hosts[0].stderr, 20, "host 1")
    two_hosts[0].signal(signal.SIGINT)
    assert two_hosts[0].end()[0] == 130
    code, lines = two_hosts[1].end()
    assert (code, lines[-1]) == (4, "lockstep: host 0 ended before the start: it was interrupted.")
