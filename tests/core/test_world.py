"""A process knows its place from what its launcher says, or refuses."""

import dataclasses
import subprocess
import sys

import pytest

from lockstep.core.world import World, host_name, threads_of_environment
from lockstep.errors import ConfigError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "job",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "42",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}


def test_without_a_launcher_there_is_one_process():
    world = World.from_environment({"PATH": "/bin"})
    assert world == World()
    assert (world.rank, world.world_size, world.launcher, world.rendezvous) == (0, 1, "python", "")
    assert world.is_main and world.is_one_host


def test_torchrun_is_read():
    assert World.from_environment(TORCHRUN) == World(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        node=1,
        nodes=2,
        launcher="torchrun",
        rendezvous="env://",
    )


def test_lockstep_s_own_variables_are_read():
    own = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}
    own |= {"LOCKSTEP_RENDEZVOUS": "file:///x", "LOCKSTEP_RUN_ID": "r1", "LOCKSTEP_RUN_DIRECTORY": "/run"}
    world = World.from_environment(own)
    assert (world.launcher, world.rendezvous) == ("lockstep", "file:///x")
    assert (world.run_id, world.run_directory) == ("r1", "/run")


def test_rank_and_world_size_alone_mean_one_host():
    world = World.from_environment({"RANK": "2", "WORLD_SIZE": "3"})
    assert (world.local_rank, world.local_world_size, world.node, world.nodes) == (2, 3, 0, 1)
    assert world.is_one_host and not world.is_main


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1", "[::1]"])
def test_ranks_that_meet_at_a_loopback_address_are_of_one_host(address):
    ranks = {"RANK": "1", "WORLD_SIZE": "2"}
    assert World.from_environment(ranks | {"MASTER_ADDR": address}).is_one_host
    assert World.from_environment(ranks | {"LOCKSTEP_RENDEZVOUS": f"tcp://{address}:29500"}).is_one_host
    assert World.from_environment(ranks | {"LOCKSTEP_RENDEZVOUS": "file:///x", "MASTER_ADDR": "10.0.0.1"}).is_one_host


def test_plain_python_in_a_pod_of_kubernetes_is_one_rank_on_its_host():
    pod = {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "job-master-0",
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    }
    world = World.from_environment(pod)
    assert (world.rank, world.local_rank, world.local_world_size, world.node, world.nodes) == (2, 0, 1, 2, 3)
    inside = World.from_environment(pod | {"MASTER_ADDR": "127.0.0.1"})
    assert (inside.local_rank, inside.local_world_size, inside.nodes) == (2, 3, 1)


@pytest.mark.parametrize(
    "place", [{"MASTER_ADDR": "10.0.0.1"}, {"LOCKSTEP_RENDEZVOUS": "tcp://fa:29500"}], ids=("env", "tcp")
)
def test_an_unknown_number_of_ranks_on_this_host_is_refused(place):
    with pytest.raises(ConfigError, match=r"LOCAL_WORLD_SIZE is missing.*Set LOCAL_WORLD_SIZE and LOCAL_RANK"):
        World.from_environment({"RANK": "0", "WORLD_SIZE": "2"} | place)
    assert World.from_environment({"RANK": "0", "WORLD_SIZE": "1"} | place).world_size == 1
    known = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert World.from_environment(known | place).node == 1


def test_a_slurm_step_is_read():
    assert World.from_environment(SLURM) == World(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node=1,
        nodes=2,
        launcher="slurm",
        rendezvous="env://",
        run_id="42",
    )


@pytest.mark.parametrize(
    ("written", "node", "expected"), [("4(x2),3", 0, 4), ("4(x2),3", 2, 3), ("1,2(x2)", 2, 2), ("3", 0, 3)]
)
def test_slurm_hosts_may_hold_different_numbers_of_tasks(written, node, expected):
    step = SLURM | {
        "SLURM_NTASKS": "11",
        "SLURM_NNODES": "3",
        "SLURM_NODEID": str(node),
        "SLURM_STEP_TASKS_PER_NODE": written,
    }
    assert World.from_environment(step).local_world_size == expected


def test_slurm_without_readable_tasks_per_node_falls_back_to_an_even_split():
    step = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "many"}
    assert World.from_environment(step).local_world_size == 2


def test_a_batch_script_outside_of_a_slurm_step_is_one_process():
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert World.from_environment(batch) == World()


def test_world_size_that_a_batch_script_exports_does_not_hide_the_slurm_step():
    assert World.from_environment(SLURM | {"WORLD_SIZE": "4"}).launcher == "slurm"


def test_open_mpi_is_read_and_its_node_rank_is_not_the_host_s_number():
    world = World.from_environment(OPEN_MPI)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (3, 4, 1, 2)
    assert (world.node, world.nodes, world.launcher) == (1, 2, "mpi")
    one_host = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    assert World.from_environment(one_host).node == 0


def test_open_mpi_on_one_host_meets_in_the_folder_of_mpirun_unless_an_address_is_exported():
    folder = {"PMIX_SERVER_TMPDIR": "/tmp/ompi.7"}
    one_host = OPEN_MPI | folder | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    assert World.from_environment(one_host).rendezvous == "file:///tmp/ompi.7/lockstep-rendezvous"
    assert World.from_environment(one_host | {"MASTER_ADDR": "10.0.0.1"}).rendezvous == "env://"
    assert World.from_environment(OPEN_MPI | folder).rendezvous == "env://"


@pytest.mark.parametrize("name", ["TORCHRUN", "SLURM", "OPEN_MPI"])
def test_the_place_that_the_user_names_comes_first(name):
    place = {"LOCKSTEP_RENDEZVOUS": "tcp://10.0.0.1:29500"}
    assert World.from_environment(globals()[name] | place).rendezvous == "tcp://10.0.0.1:29500"


def test_torchrun_inside_of_a_slurm_step_counts_as_torchrun():
    assert World.from_environment(SLURM | TORCHRUN).launcher == "torchrun"


def test_a_variable_that_is_no_number_is_named():
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        for value in ("", "x", "-1", "1.0", " 1", "1\n"):
            with pytest.raises(ConfigError, match=rf"\b{name} should be a number"):
                World.from_environment(TORCHRUN | {name: value})
    for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NNODES"):
        with pytest.raises(ConfigError, match=rf"\b{name} should be a number"):
            World.from_environment(SLURM | {name: "two"})


def test_a_missing_variable_is_named_instead_of_training_alone():
    for environment, missing in (
        ({"RANK": "1"}, "WORLD_SIZE"),
        (SLURM, "SLURM_LOCALID"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"),
    ):
        rest = {name: value for name, value in environment.items() if name != missing}
        with pytest.raises(ConfigError, match=rf"names a rank but not {missing}"):
            World.from_environment(rest)


def test_a_size_of_zero_is_refused_by_name():
    for environment, name in (
        (TORCHRUN, "WORLD_SIZE"),
        (TORCHRUN, "LOCAL_WORLD_SIZE"),
        (SLURM, "SLURM_NTASKS"),
        (SLURM, "SLURM_NNODES"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ):
        with pytest.raises(ConfigError, match=rf"\b{name} should be at least 1 and is 0"):
            World.from_environment(environment | {name: "0"})


def test_a_rank_outside_of_the_world_is_refused():
    for rank, size in ((8, 8), (9, 8), (0, 0), (-1, 2)):
        with pytest.raises(ConfigError, match=f"rank {rank} does not exist in a world of {size}"):
            World(rank=rank, world_size=size, rendezvous="env://")


def test_a_local_rank_outside_of_the_host_is_refused():
    with pytest.raises(ConfigError, match="local rank 4 does not exist on a host with 4"):
        World.from_environment(TORCHRUN | {"LOCAL_RANK": "4"})


def test_several_processes_need_a_place_to_meet():
    with pytest.raises(ConfigError, match="needs a rendezvous"):
        World(world_size=2)


def test_a_world_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        World().rank = 1


def test_the_real_environment_is_read_by_default(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert World.from_environment() == World.from_environment(TORCHRUN)


@pytest.mark.parametrize("launcher", [{}, TORCHRUN, SLURM, OPEN_MPI], ids=["none", "torchrun", "slurm", "mpi"])
def test_a_timeline_can_be_asked_for_whatever_starts_the_process(launcher):
    plain = World.from_environment(launcher)
    asked = World.from_environment(launcher | {"LOCKSTEP_PROFILE": "3:2"})
    assert plain.profile == "" and asked == dataclasses.replace(plain, profile="3:2")


def test_the_host_has_a_name():
    assert host_name()


def test_the_threads_of_openmp_are_those_of_its_first_level():
    """A list, as clusters set it, ended in a ValueError; so did a word."""
    read = [threads_of_environment({"OMP_NUM_THREADS": text}) for text in ("", "3", "4,2", " 8 ")]
    assert [*read, threads_of_environment({})] == [1, 3, 4, 8, 1]
    for text in ("abc", "0", "-1", "1.5", "9" * 20):
        with pytest.raises(ConfigError, match="OMP_NUM_THREADS is"):
            threads_of_environment({"OMP_NUM_THREADS": text})


@pytest.mark.parametrize(("machine", "count"), [("x86_64", 4), ("aarch64", 1)])
def test_variables_of_x86_are_not_given_to_other_cpus(machine, count):
    """torch warns of them there, and they were recorded as if they decided the bits."""
    code = (
        f"import platform; platform.machine = lambda: {machine!r}\n"
        "from lockstep.core.world import PORTABLE_ENVIRONMENT; print(len(PORTABLE_ENVIRONMENT))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"{count}\n", done.stderr
