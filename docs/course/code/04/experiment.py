"""What a launcher tells each process. Each line is written at once, and rank 0 sorts them."""

import os

import torch.distributed as dist

dist.init_process_group("gloo")
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
lines: list[str] = [""] * dist.get_world_size()
dist.all_gather_object(lines, "  ".join(f"{name}={os.environ[name]}" for name in names))
if dist.get_rank() == 0:
    print("\n".join(lines))
dist.destroy_process_group()
