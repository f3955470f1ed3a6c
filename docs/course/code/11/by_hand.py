"""Two hosts with two processes each meet in three ways, and SLURM's variables become those of torch."""

import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Mapping

import torch
import torch.distributed as dist


def process(place: str, node_rank: int, local_rank: int, per_node: int) -> None:
    rank, world_size = node_rank * per_node + local_rank, 2 * per_node
    if place == "env://":  # no address here: it is in MASTER_ADDR and MASTER_PORT, as launchers set it
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        dist.init_process_group("gloo", init_method="env://")
    else:
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world_size)
    total = torch.tensor([rank])
    dist.all_reduce(total)
    if rank == 0:
        method = place.partition("//")[0]
        print(f"{method:5} {world_size} processes on 2 hosts, their ranks add up to {total.item()}")
    dist.destroy_process_group()


def start_host(place: str, node_rank: int) -> list[multiprocessing.Process]:
    """What one command on one host does; here both hosts are this machine."""
    host = [multiprocessing.Process(target=process, args=(place, node_rank, local, 2)) for local in (0, 1)]
    for child in host:
        child.start()
    return host


def from_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of torch, for a step with a task for each process: srun gives each its own numbers."""
    nodes = variables["SLURM_STEP_NODELIST"]
    first = re.sub(r"\[(\w+).*", r"\1", nodes.split(",")[0])  # gpu[07-09,12],cpu1 begins with gpu07
    port = 20000 + int(variables["SLURM_JOB_ID"]) % 10000  # the same in all tasks, another one in each job
    numbers = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    found = {name: variables[its] for name, its in numbers.items()}
    return found | {"MASTER_ADDR": first, "MASTER_PORT": str(port)}


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # asks the system for a port that is free
    address, port = "127.0.0.1", store.port
    del store
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    with tempfile.TemporaryDirectory() as shared:  # a folder that both hosts see
        for place in ("env://", f"tcp://{address}:{port}", f"file://{shared}/meet"):
            for child in start_host(place, 1) + start_host(place, 0):  # either host may be the first
                child.join()
                if child.exitcode:
                    sys.exit(1)
    step = {"SLURM_STEP_NODELIST": "gpu[07-09,12],cpu1", "SLURM_JOB_ID": "4711"}
    print(from_slurm(step | {"SLURM_PROCID": "5", "SLURM_NTASKS": "20", "SLURM_LOCALID": "1"}))
