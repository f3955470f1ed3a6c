"""A host that never comes: what the other one says, in plain PyTorch and with Lockstep, and when."""

import os
import secrets
import socket
import subprocess
import time
from datetime import timedelta

import torch.distributed as dist

begin = time.perf_counter()
limit = timedelta(seconds=3)
try:
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=4, timeout=limit)
except dist.DistError as error:
    print(f"torch, after {time.perf_counter() - begin:.0f} s: {error}")

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    meeting = f"127.0.0.1:{probe.getsockname()[1]}"
words = f"lockstep run --nnodes 2 --node-rank 0 --master {meeting} --start-limit 3 --devices cpu:2".split()
run = subprocess.run(
    [*words, "11/with_lockstep.py"],
    env=os.environ | {"LOCKSTEP_TOKEN": secrets.token_hex(32)},
    stderr=subprocess.PIPE,
    text=True,
    check=False,
)
print(run.stderr.strip().replace(f"({socket.gethostname()})", "(node-a)"))
print("exit code", run.returncode)
