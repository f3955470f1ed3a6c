"""A run that stands still, and a watch thread in each rank that says where. Rank 1 hangs in step 3."""

import os
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT = 3.0  # seconds without a step, after which a rank says where it stands and ends


class Watch(threading.Thread):
    def __init__(self, rank: int) -> None:
        super().__init__(daemon=True)
        self.rank, self.step, self.beat = rank, 0, threading.Event()

    def run(self) -> None:
        while self.beat.wait(LIMIT):  # a step came in time
            self.beat.clear()
        frame = sys._current_frames()[threading.main_thread().ident or 0]  # the stack of another thread
        here = [line for line in traceback.extract_stack(frame) if line.filename == __file__][-1]
        time.sleep(0.2 * self.rank)  # so that the lines stand in order
        place = f"{here.name}, {here.line}"
        print(f"rank {self.rank} has stood in step {self.step} for {LIMIT:.0f} s: {place}", flush=True)
        os._exit(1)  # a thread cannot interrupt a collective; it can end the process


def read(rank: int, step: int) -> torch.Tensor:
    if rank == 1 and step == 3:
        threading.Event().wait()  # a disk that never answers
    return torch.full((4,), float(step))


def train(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    watch = Watch(rank)
    watch.start()
    for step in range(10):
        watch.step = step
        batch = read(rank, step)
        dist.all_reduce(batch)
        watch.beat.set()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # asks the system for a port that is free
    port = store.port
    del store
    context = mp.spawn(train, (port,), nprocs=2, join=False)
    for process in context.processes:
        process.join()
    print("exit codes:", [process.exitcode for process in context.processes])
