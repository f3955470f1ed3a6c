"""The compiler is imported by none that does not compile, and works for those that do. One process each."""

import subprocess
import sys

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.run import Run, RunOptions

TRAIN = """
import sys, torch
from lockstep.runtime.lazy_compiler import postpone_compiler
step = torch.optim.SGD.step  # the first optimizer wraps it once more
original = step.__code__
assert postpone_compiler()
model = torch.nn.Linear(3, 3)
for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
    optimizer = kind(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    before = model.weight.detach().clone()
    model(torch.ones(2, 3)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(); schedule.step(); optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not torch.equal(before, model.weight), "the step was taken"
    assert torch.is_grad_enabled()
"""


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_training_does_not_import_the_compiler():
    done = run(TRAIN + "print('torch._dynamo' in sys.modules, 'sympy' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False False\n", "")


@pytest.mark.slow
def test_an_import_of_the_compiler_restores_torch_first():
    done = run(
        TRAIN
        + "import torch._dynamo\n"
        + "print(step.__code__ is original, hasattr(torch.optim.Optimizer.zero_grad.__wrapped__, "
        + "'__dynamo_disable'), any('Restore' in type(finder).__name__ for finder in sys.meta_path))\n"
        + "optimizer.step(); optimizer.zero_grad(); print(postpone_compiler())\n"
    )
    assert (done.stdout, done.stderr) == ("True False False\nFalse\n", "")


@pytest.mark.slow
def test_a_step_that_fails_puts_the_grad_mode_back():
    done = run(
        TRAIN
        + "class Bad(torch.optim.SGD):\n"
        + "    pass\n"
        + "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        + "def closure():\n    raise ValueError('closure')\n"
        + "try:\n    optimizer.step(closure)\nexcept ValueError as error:\n    print(error, torch.is_grad_enabled())\n"
    )
    assert done.stdout == "closure True\n"


SCRIPT = """
import sys, torch, lockstep
run = lockstep.init(global_batch=4, micro_batches=2)
net = torch.nn.Linear(3, 3)
net, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters()))
data = torch.utils.data.TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.long))
for batch in run.batches(data):
    run.backward(batch, torch.nn.functional.cross_entropy)
    optimizer.step()
run.evaluate(data, torch.nn.functional.cross_entropy)
print('torch._dynamo' in sys.modules, 'sympy' in sys.modules)
"""


@pytest.mark.parametrize("launcher", [(), ("-m", "lockstep", "run", "--devices", "cpu:1")], ids=["python", "lockstep"])
def test_a_script_does_not_import_the_compiler(launcher, tmp_path):
    """The launcher imports less of Lockstep before it keeps the compiler away."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, *launcher, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("False False\n", "")


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "ddp"},
        {"strategy": "fsdp"},
        {"strategy": "pipeline"},
        {"strategy": "parameter_server", "parameter_server": {"servers": 1}},
    ],
    ids=lambda options: options["strategy"],
)
def test_no_rank_imports_the_compiler_or_sympy(options):
    assert run_ranks(imported_by_training, 2, options) == [[], []]


def imported_by_training(world, options):
    run = Run(RunOptions.of(global_batch=4, micro_batches=2, **options), world)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters()))
    for batch in run.batches(TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.long))):
        run.backward(batch, nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return [name for name in ("torch._dynamo", "sympy") if name in sys.modules]
