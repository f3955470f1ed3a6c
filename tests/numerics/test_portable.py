"""Portable bits: replaced operators are right, everything that cannot give such bits is refused."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.config.options import RunOptions
from lockstep.core.world import PORTABLE_VARIABLES, World
from lockstep.errors import ConfigError
from lockstep.numerics.portable import make_portable

PROGRAMS = Path(__file__).parents[1] / "portable"
RECORDED = json.loads((PROGRAMS / "fingerprints.json").read_text())

RIGHT = """
import math, sys
import numpy as np
import torch
import lockstep

def native(layer, x):
    torch.backends.mkldnn.enabled = False
    try:
        return layer(x)[0]
    finally:
        torch.backends.mkldnn.enabled = True

torch.manual_seed(0)
lstm, steps = torch.nn.LSTM(3, 4, 2), torch.rand(5, 2, 3)
wanted = native(lstm, steps)
many = torch.rand(100_000)
before = [many.sqrt(), many.asin(), many.atan(), lstm(steps)[0]]
run = lockstep.init(global_batch=1, micro_batches=1, portable=True)
assert run.is_portable
x = torch.rand(7, 6) * 0.98 + 0.01
exact = {"sqrt": np.sqrt, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan}
for name, function in exact.items():
    compute = getattr(torch, name)
    for dtype, close in ((torch.float32, 1.2e-7), (torch.float64, 1e-15)):
        values = x.to(dtype)
        right = torch.from_numpy(function(values.double().numpy()))
        for found in (compute(values), compute(values.t()).t(), getattr(values.clone(), name + "_")()):
            assert found.dtype == dtype and found.shape == values.shape
            assert torch.allclose(found.double(), right, rtol=close, atol=close), name
        out = torch.empty(0, dtype=dtype)
        assert compute(values, out=out) is out and torch.equal(out, compute(values))
        part = torch.zeros(7, 12, dtype=dtype)[:, ::2]
        assert torch.equal(compute(values, out=part), compute(values))
        itself = values.clone()
        assert torch.equal(compute(itself, out=itself), compute(values))
    assert torch.autograd.gradcheck(compute, x.double().requires_grad_())
    assert torch.equal(torch.vmap(compute)(x), compute(x))
    assert compute(torch.tensor([0, 1])).dtype == torch.float32
    assert compute(torch.tensor(True)).dtype == torch.float32
    assert compute(torch.tensor([1 + 1j])).is_complex()
    assert compute(x.half()).dtype == torch.float16
    ends = compute(torch.tensor([-0.0, float("nan"), 2.0, -2.0, float("inf")]))
    assert math.copysign(1, ends[0]) == -1 or name == "acos"
    assert ends[1].isnan() and (ends[2:4].isnan().all() or name in ("sqrt", "atan"))
    try:
        compute(x, out=torch.empty(7, 6, dtype=torch.int32))
    except RuntimeError as error:
        assert "cast" in str(error)
    else:
        raise AssertionError("an integer cannot hold the result")
assert torch.equal(x**0.5, x.sqrt()) and torch.equal(x.clone().pow_(0.5), x.sqrt())
assert torch.equal(torch.pow(x, 0.5, out=torch.empty(0)), x.sqrt())
itself = torch.complex(x, x)
assert abs(float(itself.std()) - itself.numpy().std(ddof=1)) < 1e-6
itself = x.clone()
assert torch.equal(torch.pow(itself, 0.5, out=itself), x.sqrt())
assert torch.equal(x**2, x * x) and torch.equal(torch.tensor([4, 9]) ** 2, torch.tensor([16, 81]))
assert torch.equal(torch.tensor([4, 9]) ** 0.5, torch.tensor([2.0, 3.0]))
assert torch.equal(lstm(steps)[0], wanted) and torch.backends.mkldnn.enabled
lstm(steps)[0].sum().backward()
with torch.inference_mode():
    assert torch.equal(lstm(steps)[0], wanted)
packed = torch.nn.utils.rnn.pack_sequence([steps[:4, 0], steps[:2, 1]])
assert torch.equal(lstm(packed)[0].data[0], wanted[0, 0])
run.close()
assert not lockstep.init(global_batch=1, micro_batches=1).is_portable
for own, again in zip(before, [many.sqrt(), many.asin(), many.atan(), lstm(steps)[0]]):
    assert torch.equal(own, again), "a run after a portable one has torch's own operators"
print("right")
"""

SCRIPT = """
import sys
import torch
import lockstep

run = lockstep.init(global_batch=8, micro_batches=4, **eval(sys.argv[1]))
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters()))
data = torch.utils.data.TensorDataset(torch.rand(16, 4), torch.arange(16) % 3)
for batch in run.batches(data):
    run.backward(batch, torch.nn.functional.cross_entropy)
    optimizer.step()
    optimizer.zero_grad()
text = run.fingerprint()
run.print(text, run.is_portable)
"""

needs_such_a_cpu = pytest.mark.skipif(
    platform.machine() != "x86_64"
    or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512")
    or not torch.backends.mkl.is_available()
    or not hasattr(torch.library, "get_kernel"),
    reason="portable bits need a CPU with AVX2, and torch with MKL from version 2.9 on",
)


def script_run(folder: Path, options: str, *launcher: str, variables: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs SCRIPT with these options of lockstep.init."""
    path = folder / "script.py"
    path.write_text(SCRIPT)
    environment = {**os.environ, **(PORTABLE_VARIABLES if variables else {})}
    command = [sys.executable, *launcher, str(path), options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
@needs_such_a_cpu
@pytest.mark.timeout(120)
def test_replaced_operators_compute_what_they_replace():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RIGHT],
        env={**os.environ, **PORTABLE_VARIABLES},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "right\n", done.stderr


@pytest.mark.slow
@needs_such_a_cpu
@pytest.mark.timeout(240)
def test_portable_bits_are_the_same_however_they_are_asked_for(tmp_path):
    launched = script_run(tmp_path, "{}", "-m", "lockstep", "run", "--portable", "--devices", "cpu:2")
    by_hand = script_run(tmp_path, "{'portable': True}", variables=True)
    where_possible = script_run(tmp_path, "{'portable': 'auto'}", variables=True)
    assert launched.stdout.split()[1:] == ["True"], launched.stderr
    assert launched.stdout == by_hand.stdout == where_possible.stdout


@needs_such_a_cpu
@pytest.mark.parametrize(
    "names",
    [
        tuple(name for name in RECORDED if name not in ("torch", "resnet18")),
        pytest.param(("resnet18",), marks=pytest.mark.slow),
    ],
    ids=["small", "resnet18"],
)
def test_this_cpu_computes_the_fingerprints_that_others_did(names):
    """They were recorded on an AMD EPYC; an Intel Xeon has the same, resnet18 aside, which it has not run."""
    if torch.__version__.partition("+")[0] != RECORDED["torch"]:
        pytest.skip(f"recorded with torch {RECORDED['torch']}")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAMS / "programs.py", ",".join(names), "12", "--portable"],
        env={**os.environ, **PORTABLE_VARIABLES, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == [RECORDED[name] for name in names], done.stderr


@needs_such_a_cpu
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_without_the_variables_portable_is_refused_with_them_and_auto_is_off(tmp_path):
    refused = script_run(tmp_path, "{'portable': True}")
    assert refused.returncode and "MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=AVX2" in refused.stderr
    assert "lockstep run --portable" in refused.stderr
    assert script_run(tmp_path, "{'portable': 'auto'}").stdout.split()[1:] == ["False"]


@needs_such_a_cpu
def test_variables_that_are_set_after_the_start_do_not_count(monkeypatch):
    for name, value in PORTABLE_VARIABLES.items():
        monkeypatch.setenv(name, value)
    options = RunOptions.of(global_batch=8, portable=True)
    with pytest.raises(ConfigError, match="before torch is imported"):
        make_portable(options, World(), torch.device("cpu"))


def test_a_gpu_has_no_portable_bits():
    options = RunOptions.of(global_batch=8, portable=True)
    with pytest.raises(ConfigError, match="is for CPUs, and this run is on cuda:0"):
        make_portable(options, World(is_portable=True), torch.device("cuda", 0))
    options = RunOptions.of(global_batch=8, portable="auto")
    assert not make_portable(options, World(is_portable=True), torch.device("cuda", 0))


def test_compiled_code_is_not_portable():
    with pytest.raises(ConfigError, match=r"torch\.compile writes code for the CPU"):
        RunOptions.of(global_batch=8, portable=True, compile=True)
    with pytest.raises(ConfigError, match="and compile=True exclude each other"):  # lockstep run --portable
        make_portable(RunOptions.of(global_batch=8, compile=True), World(is_portable=True), torch.device("cpu"))
    options = RunOptions.of(global_batch=8, portable="auto", compile=True)
    assert not make_portable(options, World(is_portable=True), torch.device("cpu"))


def test_another_word_is_refused():
    with pytest.raises(ConfigError, match="'always' is not known"):
        RunOptions.of(global_batch=8, portable="always")
