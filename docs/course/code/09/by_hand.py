"""Reading beside computing: a thread that reads ahead into a queue, and the time that it saves."""

import queue
import threading
import time
from collections.abc import Iterator

import torch

STEPS = 20
READ = COMPUTE = 0.02  # seconds that the disk and the device take for one batch


def read(step: int) -> torch.Tensor:
    time.sleep(READ)  # a disk: the processor is free while it works
    return torch.full((4,), float(step))


def compute(batch: torch.Tensor) -> float:
    time.sleep(COMPUTE)  # a GPU: the processor is free while it works
    return batch.sum().item()


def one_after_the_other() -> Iterator[torch.Tensor]:
    for step in range(STEPS):
        yield read(step)


def read_ahead() -> Iterator[torch.Tensor]:
    ahead: queue.Queue[torch.Tensor | None] = queue.Queue(maxsize=2)  # at most two batches wait in memory

    def fill() -> None:
        for step in range(STEPS):
            ahead.put(read(step))  # waits while two are there
        ahead.put(None)

    threading.Thread(target=fill).start()
    while (batch := ahead.get()) is not None:
        yield batch


for batches in (one_after_the_other, read_ahead):
    begin = time.perf_counter()
    total = sum(compute(batch) for batch in batches())
    seconds = time.perf_counter() - begin
    print(f"{batches.__name__}: total {total:.0f}, {1000 * seconds / STEPS:.0f} ms per step")
