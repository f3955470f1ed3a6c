"""The end of a run: nothing may hold on to a process group that the interpreter would then take apart."""

import subprocess
import sys

import pytest

SCRIPT = """\
import os, sys, torch, lockstep
from torch import nn

run = lockstep.init(global_batch=8, micro_batches=2, shared_memory=sys.argv[1] == "shared")
model = nn.Linear(4, 2)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.zeros(16, dtype=torch.int64))
for batch in run.batches(data):
    run.backward(batch, nn.CrossEntropyLoss())
    optimizer.step()
    optimizer.zero_grad()
before = len(os.listdir("/proc/self/task"))
run.close()
run.print(before, len(os.listdir("/proc/self/task")))
"""


@pytest.mark.parametrize("exchange", [pytest.param("shared", marks=pytest.mark.slow), "collectives"])
def test_closing_a_run_ends_the_threads_of_its_groups(exchange, tmp_path):
    """gloo aborted ranks of torchrun at exit, now and then, while a reducer still held its group."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "--devices", "cpu:2", "script.py", exchange],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.splitlines()[-1].split())  # gloo of torch 2.8 writes above it
    assert after < before, f"{exchange}: {after} of {before} threads are left"
