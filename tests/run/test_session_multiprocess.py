"""The end of a run: nothing may hold on to a process group that the interpreter would then take apart."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import ConfigError
from lockstep.run import Run, RunOptions
from lockstep.runtime.events import Callback

SCRIPT = """\
import os, sys, torch, lockstep
from torch import nn

run = lockstep.init(global_batch=8, micro_batches=2, shared_memory=sys.argv[1] == "shared")
import torch.distributed.nn.functional  # its functions have the group that is open as a default, as the compiler's have
model = nn.Linear(4, 2)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.zeros(16, dtype=torch.int64))
for batch in run.batches(data):
    run.backward(batch, nn.CrossEntropyLoss())
    optimizer.step()
    optimizer.zero_grad()
def threads():
    names = [open(f"/proc/self/task/{each}/comm").read() for each in os.listdir("/proc/self/task")]
    return sum("gloo_runloop" in name for name in names)
before = threads()
run.close()
run.print(before, threads())
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
    assert before and not after, f"{exchange}: {after} of {before} threads are left"


class Closed(Callback):
    times = 0

    def on_close(self, run):
        self.times += 1


def two_folds(world, error):
    """The fingerprints of two runs, one after the other, and whether the first was closed at the end of its block."""
    found, runs = [], []
    for fold in range(2):
        with (
            contextlib.suppress(ValueError),
            Run(RunOptions.of(global_batch=8, micro_batches=4), world) as run,
        ):
            runs.append(Closed())
            run.add_callback(runs[-1])
            torch.manual_seed(fold)
            model = nn.Linear(4, 2)
            model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in run.batches(TensorDataset(torch.ones(16, 4), torch.zeros(16, dtype=torch.int64))):
                run.backward(batch, nn.CrossEntropyLoss())
                optimizer.step()
                optimizer.zero_grad()
            found.append(run.fingerprint())
            if error:
                raise ValueError
    return found, [each.times for each in runs]


@pytest.mark.parametrize("error", [False, True])
def test_a_run_is_closed_at_the_end_of_its_block_unless_an_error_leaves_it(error):
    (alone, _), *_ = run_ranks(two_folds, 1, error)
    for found, closed in run_ranks(two_folds, 2, error):
        assert found == alone
        assert closed == ([0, 0] if error else [1, 1])


def begun_with_a_group_alone(world):
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    with pytest.raises(ConfigError) as refused:
        lockstep.init(global_batch=8)
    return str(refused.value)


def test_a_process_group_that_the_environment_knows_nothing_of_is_refused():
    """After ``dist.init_process_group("gloo", rank=rank, world_size=2)`` each process trained by itself."""
    for said in run_ranks(begun_with_a_group_alone, 2):
        assert "torch's process group has 2 processes, and lockstep.init knows of 1" in said
