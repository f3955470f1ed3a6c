"""A script that knows nothing of Lockstep, and in which one rank does not come to a collective."""

import threading

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(10):
    if step == 4 and dist.get_rank() == 1:
        threading.Event().wait()  # never comes
    dist.all_reduce(torch.ones(3))
