"""Where the time of a step goes when one rank is slow: each rank's own work, and its waiting for the others."""

import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

STEPS = 30
WORK = (0.01, 0.01, 0.03)  # seconds that each rank works in a step; rank 2 is slow


def train(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    dist.barrier()
    worked = waited = 0.0
    for _ in range(STEPS):
        begin = time.perf_counter()
        time.sleep(WORK[rank])  # reading, forward and backward
        ready = time.perf_counter()
        dist.all_reduce(torch.zeros(1000))
        worked += ready - begin
        waited += time.perf_counter() - ready
    lines = [""] * 3
    dist.all_gather_object(
        lines, f"rank {rank}: works {1000 * worked / STEPS:.0f} ms, waits {1000 * waited / STEPS:.0f} ms"
    )
    if rank == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # asks the system for a port that is free
    port = store.port
    del store
    mp.spawn(train, (port,), nprocs=3)
