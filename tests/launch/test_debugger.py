"""Checks before a rank waits for a debugger, and the limits that are lifted meanwhile."""

import os
import socket
from contextlib import nullcontext
from datetime import timedelta

import pytest

from lockstep.core.atomic import identity
from lockstep.core.world import DEBUG_RANK, HostLayout, World
from lockstep.errors import ConfigError
from lockstep.launch import LaunchOptions, parse_devices
from lockstep.launch.debugger import (
    is_debugged,
    lift_default_limit,
    request_debugger,
    take_part_in_debugging,
    with_debugger,
)
from lockstep.launch.runs import RunOnHost
from lockstep.runtime.heartbeat import Heartbeat

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
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}: Address already in use"):
            with_debugger(options, 1, port)


@pytest.mark.parametrize(("layout", "has_rank"), [({"first_rank": 2}, True), ({"first_rank": 0}, False)])
def test_over_hosts_only_the_one_that_has_the_rank_needs_the_port(options, layout, has_rank):
    layout = HostLayout(run_id="", world_size=4, nodes=2, **layout)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match="Cannot bind") if has_rank else nullcontext():
            assert with_debugger(options, 3, port, layout).debug_rank == 3


def test_over_hosts_ranks_are_those_of_all_of_them(options):
    layout = HostLayout(run_id="", world_size=4, nodes=2)
    with pytest.raises(ConfigError, match="rank 4 was asked for, and the run has the ranks 0 to 3"):
        with_debugger(options, 4, 0, layout)


def test_a_rank_of_another_launcher_does_not_wait_where_there_is_no_such_rank(monkeypatch):
    monkeypatch.delenv(DEBUG_RANK, raising=False)
    world = World(rank=1, world_size=2, local_world_size=2, rendezvous="env://", launcher="torchrun")
    with pytest.raises(ConfigError, match="rank 2 was asked for, and the run has the ranks 0 to 1"):
        take_part_in_debugging(world, 2, 0)
    assert DEBUG_RANK not in os.environ


def test_every_launcher_s_ranks_are_told_that_one_is_debugged():
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}
    for variables in ({}, slurm, {"RANK": "0", "WORLD_SIZE": "1"}):
        assert World.from_environment({**variables, DEBUG_RANK: "0"}).is_debugged
        assert not World.from_environment(variables).is_debugged


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
    world = World(rank=1, world_size=2, local_rank=1, local_world_size=2, rendezvous="x", run_directory=str(tmp_path))
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
        identity=identity(),
        is_elsewhere=False,
    )


def test_a_rank_that_has_not_begun_cannot_be_asked(run):
    with pytest.raises(ConfigError, match="has not started"):
        request_debugger(run, 0, 0, within=1.0)


def test_a_process_that_has_the_number_of_a_rank_and_is_none_gets_no_signal(run):
    """The signal would end it; here it would end the tests."""
    with pytest.raises(ConfigError, match="rank 1: it has ended"):
        request_debugger(run, 1, 0, within=1.0)
    assert not is_debugged(run.directory)


def test_a_refusal_of_the_rank_is_passed_on_and_it_may_be_asked_again(run):
    answer = run.directory / "debugger-001.answer"
    answer.write_text('{"refused": "Rank 1 cannot listen."}')
    with pytest.raises(ConfigError, match=r"^Rank 1 cannot listen\.$"):
        request_debugger(run, 1, 0, within=1.0)
    assert not answer.exists()
