"""Many processes, far more than this machine has cores: the bits are still those of one."""

from functools import cache

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.run import Run, RunOptions
from lockstep.runtime.lazy_compiler import postpone_compiler

pytestmark = [pytest.mark.slow, pytest.mark.crowd, pytest.mark.timeout(900)]
LAYOUTS = [
    (64, {}),
    (16, {"strategy": "fsdp"}),
    (32, {"strategy": "parameter_server", "parameter_server": {"servers": 8}}),
    (20, {"strategy": "pipeline"}),
    (24, {"strategy": "hybrid", "mesh": "fsdp=4,pipeline=6"}),
    (24, {"strategy": "hybrid", "mesh": "data=4,pipeline=6"}),
]


def correct(output, target):
    return output.argmax(1) == target


def train(world, settings):
    postpone_compiler()
    run = Run(RunOptions.of(global_batch=128, micro_batches=64, seed=0, **settings), world)
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.1)) for _ in range(20)]
    model = nn.Sequential(nn.Linear(64, 32), *blocks, nn.Linear(32, 3))
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
    data = TensorDataset(torch.randn(400, 64), torch.randint(0, 3, (400,)))
    found = []
    for _ in run.epochs(2):
        for batch in run.batches(data):
            found.append(float(run.backward(batch, nn.functional.cross_entropy)))
            optimizer.step()
            optimizer.zero_grad()
        found.append(run.evaluate(data, correct))
    found.append(run.fingerprint())
    run.close()
    return found


@cache
def alone():
    return run_ranks(train, 1, {"strategy": "single"}, timeout=120)[0]


@pytest.mark.parametrize(("processes", "settings"), LAYOUTS, ids=str)
def test_many_processes_have_the_bits_of_one(processes, settings):
    assert run_ranks(train, processes, settings, timeout=800) == [alone()] * processes
