"""Options of several hosts, and their refusals."""

import argparse
import os

import pytest

from lockstep.cli import main
from lockstep.cli.shared_options import (
    add_host_arguments,
    host_options,
    refuse_hosts,
    take_nodes,
    take_rendezvous,
)
from lockstep.core.world import HostLayout, World
from lockstep.errors import ConfigError
from lockstep.launch import LaunchOptions, parse_devices
from lockstep.launch.hosts import HostOptions
from lockstep.launch.options import rank_environment, world_environment


def parsed(*words):
    parser = argparse.ArgumentParser()
    add_host_arguments(parser)
    return parser.parse_args(words)


def asked(monkeypatch, *words):
    monkeypatch.setenv("LOCKSTEP_TOKEN", "t" * 40)
    return host_options(parsed(*words))


@pytest.mark.parametrize(
    ("master", "host", "port"),
    [
        ("10.0.0.1:29500", "10.0.0.1", 29500),
        ("gpu-7.local:1", "gpu-7.local", 1),
        ("[fd00::1]:80", "fd00::1", 80),
    ],
)
def test_a_master_is_a_host_and_a_port(monkeypatch, master, host, port):
    options = asked(monkeypatch, "--nnodes", "2", "--node-rank", "1", "--master", master)
    assert (options.host, options.port, options.node) == (host, port, 1)


@pytest.mark.parametrize(
    "master", ["10.0.0.1", "host:", ":29500", "host:port", "tcp://host:1", "a:b:1", "x:65535", "x:0"]
)
def test_what_is_no_address_is_refused(monkeypatch, master):
    with pytest.raises(ConfigError, match="--master"):
        asked(monkeypatch, "--nnodes", "2", "--node-rank", "1", "--master", master)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--nnodes", "2"), "without --node-rank and --master"),
        (("--nnodes", "2", "--node-rank", "0"), "without --master"),
        (("--node-rank", "0"), "--node-rank was given without --nnodes"),
        (("--nnodes", "2", "--node-rank", "2", "--master", "a:1"), "2 hosts have the numbers 0 to 1"),
        (("--nnodes", "0", "--node-rank", "0", "--master", "a:1"), "a run on several hosts has at least 2"),
        (("--nnodes", "2", "--node-rank", "0", "--master", "a:1", "--start-limit", "0"), "seconds above 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused(monkeypatch, words, sentence):
    with pytest.raises(ConfigError, match=sentence):
        asked(monkeypatch, *words)


def test_one_host_needs_none_of_them(monkeypatch):
    assert asked(monkeypatch) is None
    assert asked(monkeypatch, "--nnodes", "1") is None


def test_under_another_launcher_they_are_refused():
    refuse_hosts(parsed(), "torchrun")
    with pytest.raises(ConfigError, match="a rank that torchrun started"):
        refuse_hosts(parsed("--nnodes", "2"), "torchrun")
    with pytest.raises(ConfigError, match="give --nnodes slurm to one task on each node"):
        refuse_hosts(parsed("--nnodes", "2"), "slurm")


STEP = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}


def in_step(monkeypatch, *words, **more):
    """The world and the arguments of a command in a task of SLURM."""
    for name, text in {**STEP, **more, "LOCKSTEP_TOKEN": "t" * 40}.items():
        monkeypatch.setenv(name, text)
    arguments = parsed(*words)
    return take_nodes(arguments, World.from_environment()), arguments


def test_the_only_task_of_a_node_becomes_its_supervisor(monkeypatch):
    world, arguments = in_step(monkeypatch, "--nnodes", "slurm")
    assert world.launcher == "python"
    options = host_options(arguments)
    assert (options.nodes, options.node, options.host, options.shares_terminal) == (2, 1, "n1", True)
    _, arguments = in_step(monkeypatch, "--nnodes", "slurm", "--master", "10.0.0.1:29500")
    assert host_options(arguments).master == "10.0.0.1:29500"


def test_the_task_of_a_step_of_one_node_needs_no_other_hosts(monkeypatch):
    one = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    world, arguments = in_step(monkeypatch, "--nnodes", "slurm", SLURM_STEP_TASKS_PER_NODE="1", **one)
    assert (world.launcher, host_options(arguments)) == ("python", None)


def test_without_the_option_a_task_stays_a_rank(monkeypatch):
    world, arguments = in_step(monkeypatch)
    assert (world.launcher, world.rank, arguments.nnodes) == ("slurm", 1, None)


@pytest.mark.parametrize(
    ("words", "more", "sentence"),
    [
        (("slurm",), {"SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "has 4 tasks on 2 nodes"),
        (("slurm", "--node-rank", "1"), {}, "--node-rank 1 was given; leave it out"),
        (("slurm",), {"RANK": "0", "WORLD_SIZE": "1"}, "not a task of a SLURM step"),
    ],
)
def test_a_task_that_cannot_be_a_supervisor_is_refused(monkeypatch, words, more, sentence):
    with pytest.raises(ConfigError, match=sentence):
        in_step(monkeypatch, "--nnodes", *words, **more)


POD = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "127.0.0.1",
    "PET_MASTER_PORT": "29400",
    "LOCKSTEP_TOKEN": "t" * 40,
}


def in_pod(monkeypatch, *words, **more):
    """The arguments of a command in a pod of Kubeflow's Trainer."""
    for name, text in {**POD, **more}.items():
        monkeypatch.setenv(name, text)
    arguments = parsed(*words)
    arguments.devices = "auto"
    take_nodes(arguments, World())
    return arguments


def test_torchrun_s_variables_are_the_defaults_of_the_host_options(monkeypatch):
    arguments = in_pod(monkeypatch)
    options = host_options(arguments)
    assert (options.nodes, options.node, options.master) == (2, 1, "127.0.0.1:29400")
    assert arguments.devices == "4"
    assert in_pod(monkeypatch, PET_NPROC_PER_NODE="auto").devices == "auto"
    assert host_options(in_pod(monkeypatch, PET_NNODES="1")) is None
    given = in_pod(monkeypatch, "--nnodes", "3", "--node-rank", "2", "--master", "10.0.0.1:29500")
    assert host_options(given).nodes == 3 and host_options(given).master == "10.0.0.1:29500"


def test_ranks_of_torchrun_are_no_supervisors(monkeypatch):
    for name, text in POD.items():
        monkeypatch.setenv(name, text)
    arguments = parsed()
    take_nodes(arguments, World(launcher="torchrun"))
    assert arguments.nnodes is None


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            {"PET_NNODES": "1:4"},
            "PET_NNODES is '1:4', and a run of Lockstep starts on a fixed number of hosts",
        ),
        ({"PET_NODE_RANK": ""}, "PET_NODE_RANK should be set to a value too"),
        (
            {"PET_NODE_RANK": "", "PET_MASTER_ADDR": ""},
            "PET_NODE_RANK and PET_MASTER_ADDR should be set to values",
        ),
        ({"PET_NODE_RANK": "x"}, "PET_NODE_RANK should be set to a value"),
        ({"PET_MASTER_ADDR": "nowhere.invalid"}, "'nowhere.invalid', a name that is not known after 0.1 s"),
    ],
)
def test_torchrun_s_variables_that_do_not_fit_are_named(monkeypatch, more, sentence):
    with pytest.raises(ConfigError, match=sentence):
        in_pod(monkeypatch, "--start-limit", "0.1", **more)


def test_doctor_shows_what_is_well_on_the_first_node_alone(monkeypatch, capsys):
    in_step(monkeypatch)
    main(["doctor", "--nnodes", "slurm", "--no-exchange"])
    assert not [line for line in capsys.readouterr().out.splitlines() if line.startswith("ok ")]
    monkeypatch.setenv("SLURM_NODEID", "0")
    main(["doctor", "--nnodes", "slurm", "--no-exchange"])
    assert "ok       torch " in capsys.readouterr().out


def test_a_number_of_hosts_is_a_number():
    with pytest.raises(SystemExit):
        parsed("--nnodes", "two")


def test_ranks_of_one_of_two_hosts_are_told_their_place_and_not_the_token(tmp_path):
    layout = HostLayout(
        run_id="r",
        world_size=5,
        node=1,
        nodes=2,
        first_rank=2,
        rendezvous="tcp://10.0.0.1:2",
        interface="ib0",
    )
    options = LaunchOptions(devices=parse_devices("cpu:3"))
    found = world_environment(options, layout, tmp_path, {"LOCKSTEP_TOKEN": "t" * 40, "HOME": "/home/me"})
    assert "LOCKSTEP_TOKEN" not in found
    assert found["HOME"] == "/home/me"
    world = World.from_environment({**found, **rank_environment(2, layout)})
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (4, 5, 2, 3)
    assert (world.node, world.nodes, world.rendezvous, world.run_id) == (1, 2, "tcp://10.0.0.1:2", "r")
    assert not world.is_one_host
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("ib0", "=ib0")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "2")


def test_the_token_is_not_shown():
    options = HostOptions(nodes=2, node=0, master="a:1", token=b"secret")
    assert "secret" not in repr(options)


@pytest.mark.parametrize("place", ["env://", "tcp://10.0.0.1:29500", "tcp://[fd00::1]:1", "file:///tmp/meeting"])
def test_ranks_of_another_launcher_meet_where_they_are_told_to(place):
    world = World(rank=1, world_size=2, local_rank=1, local_world_size=2, launcher="mpi", rendezvous="env://")
    assert take_rendezvous(argparse.Namespace(rendezvous=place), world).rendezvous == place
    assert os.environ["LOCKSTEP_RENDEZVOUS"] == place  # for the script, which reads its world itself
    assert take_rendezvous(argparse.Namespace(rendezvous=""), world) is world


@pytest.mark.parametrize("place", ["10.0.0.1:29500", "tcp://10.0.0.1", "file://meeting", "udp://a:1", "env"])
def test_a_place_that_is_none_is_refused(place):
    world = World(rank=1, world_size=2, local_rank=1, local_world_size=2, launcher="mpi", rendezvous="env://")
    with pytest.raises(ConfigError, match=r"is not valid\. Use env://, tcp://HOST:PORT or file:///ABSOLUTE/PATH"):
        take_rendezvous(argparse.Namespace(rendezvous=place), world)


def test_a_place_for_ranks_that_nobody_started_is_refused():
    with pytest.raises(ConfigError, match="this process was not started as a rank"):
        take_rendezvous(argparse.Namespace(rendezvous="env://"), World())
