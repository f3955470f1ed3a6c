"""What is checked before a rank waits for a debugger, and which limits are lifted meanwhile."""

import socket
from datetime import timedelta

import pytest

from lockstep.errors import ConfigError
from lockstep.launch import LaunchOptions, parse_devices
from lockstep.launch.attaching import ask_to_listen, is_debugged
from lockstep.launch.debugger import lift_default_limit, with_debugger
from lockstep.launch.heartbeat import Heartbeat
from lockstep.launch.runs import RunOnHost
from lockstep.world import World

MONTH = 30 * 86400.0


@pytest.fixture
def options(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # whether or not debugpy is installed
    return LaunchOptions(devices=parse_devices("cpu:2"), restarts=3)


def test_a_run_with_a_debugger_is_neither_hurried_nor_started_again(options):
    found = with_debugger(options, 1, 0)
    assert (found.debug_rank, found.stall_limit, found.restarts) == (1, 0.0, 0)


def test_a_port_that_is_taken_is_refused(options):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} cannot be had: Address already in use"):
            with_debugger(options, 1, port)


def test_every_rank_of_a_run_with_a_debugger_waits_for_a_month():
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert World.from_environment(variables).patience(60.0) == 60.0
    assert World.from_environment({**variables, "LOCKSTEP_DEBUG_RANK": "1"}).patience(60.0) == MONTH


def test_a_script_s_own_process_group_waits_for_a_month_too(monkeypatch):
    from torch.distributed import distributed_c10d

    before = distributed_c10d.default_pg_timeout
    monkeypatch.setattr(distributed_c10d, "default_pg_timeout", before)
    lift_default_limit(World())
    assert distributed_c10d._get_default_timeout("gloo") == before
    lift_default_limit(World(is_debugged=True))
    assert distributed_c10d._get_default_timeout("gloo") == timedelta(seconds=MONTH)


@pytest.fixture
def run(tmp_path):
    """A run of two ranks, of which rank 1 has begun; its process id is that of this very process."""
    world = World(
        rank=1, world_size=2, local_rank=1, local_world_size=2, rendezvous="x", run_directory=str(tmp_path)
    )
    Heartbeat.open(world).mark("forward")
    return RunOnHost(
        run_id="20260101-000000-abcdef",
        directory=tmp_path,
        supervisor=1,
        started=0.0,
        command="",
        logs="",
        ranks=2,
        is_supervised=True,
    )


def test_a_rank_that_has_not_begun_cannot_be_asked(run):
    with pytest.raises(ConfigError, match="has not begun"):
        ask_to_listen(run, 0, 0, within=1.0)


def test_a_process_that_has_the_number_of_a_rank_and_is_none_gets_no_signal(run):
    """The signal would end it; here it would end the tests."""
    with pytest.raises(ConfigError, match="Rank 1 has ended"):
        ask_to_listen(run, 1, 0, within=1.0)
    assert not is_debugged(run.directory)


def test_a_refusal_of_the_rank_is_passed_on_and_it_may_be_asked_again(run):
    answer = run.directory / "debugger-001.answer"
    answer.write_text('{"refused": "Rank 1 cannot listen."}')
    with pytest.raises(ConfigError, match=r"^Rank 1 cannot listen\.$"):
        ask_to_listen(run, 1, 0, within=1.0)
    assert not answer.exists()
