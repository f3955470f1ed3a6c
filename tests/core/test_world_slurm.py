"""The address at which the ranks of a SLURM step connect."""

import pytest

from lockstep.core.world import first_host, master_of_step, meeting_place, port_of


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("gpu-[003-007,9]", "gpu-003"),
        ("gpu-[12,14-15]-ib,cpu1", "gpu-12-ib"),
        ("rack[1-2]node[03-04]", "rack1node03"),
        ("r[2,5]-n[1,3-4]-ib,r9-n[1-2]", "r2-n1-ib"),
        ("a.example.org,b", "a.example.org"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


def test_all_ranks_of_a_step_meet_at_its_first_host():
    step = {
        "SLURM_STEP_NODELIST": "n[3-4]",
        "SLURM_JOB_NODELIST": "n[1-9]",
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "2",
    }
    assert meeting_place(step) == f"tcp://n3:{port_of('77', '2')}"
    assert meeting_place({**step, "MASTER_ADDR": "10.0.0.1"}) == f"tcp://10.0.0.1:{port_of('77', '2')}"
    assert meeting_place({**step, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"}) == "env://"
    assert meeting_place({"SLURM_JOB_ID": "77"}) == "env://"


def test_jobs_and_steps_near_each_other_have_other_ports():
    ports = [port_of(str(job), str(step)) for job in range(1000, 1200) for step in range(3)]
    assert len(set(ports)) == len(ports)
    assert all(20000 <= port < 32768 for port in ports)


def test_the_supervisors_of_a_step_connect_at_its_first_host_and_leave_the_next_port_to_the_ranks():
    step = {"SLURM_STEP_NODELIST": "n[3-4]", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2"}
    assert master_of_step(step) == f"n3:{port_of('77', '2', ports=2)}"
    assert master_of_step({**step, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"}) == "10.0.0.1:5"
    ports = [port_of(str(job), str(step), ports=2) for job in range(1000, 1200) for step in range(3)]
    assert len({*ports, *(port + 1 for port in ports)}) == 2 * len(ports)
    assert all(20000 <= port < 32767 for port in ports)
