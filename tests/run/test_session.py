"""Memory that a process frees stays with it, and none of its results change; ``init`` seeds what nobody has seeded."""

import contextlib
import io
import pickle
import random
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.ranks import answers_of, forked

import lockstep
from lockstep.run.session import _explain

_BEGIN = """
import resource, threading, torch
from lockstep.run.session import keep_freed_memory
torch.set_num_threads(1)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(megabytes * 262144) for megabytes in (100, 40, 3, 3)]
    total = sum(block.sum(dtype=torch.float64).item() for block in blocks)
    assert total == 146 * 262144, total
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""


def _printed(code):
    done = subprocess.run([sys.executable, "-c", _BEGIN + code], capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.slow
def test_memory_of_one_step_serves_the_next():
    code = "assert keep_freed_memory()\nprint(*[faults() for _ in range(8)])"
    first, *others = _printed(code)
    assert first > 10_000, "the first step asks the system for its pages"
    assert sum(others[3:]) < first / 100, "one of those before may still fill a gap that the first had left"


@pytest.mark.slow
def test_without_it_every_step_asks_the_system_again():
    """The reason for all this; when it fails, glibc has learnt to keep large blocks and the module can go."""
    first, second, third = _printed("print(faults(), faults(), faults())")
    assert min(second, third) > first / 4


@pytest.mark.slow
def test_a_thread_gets_blocks_larger_than_its_own_heap():
    code = """
assert keep_freed_memory()
found = []
thread = threading.Thread(target=lambda: found.extend([faults(), faults()]))
thread.start(); thread.join()
print(*found)
"""
    assert len(_printed(code)) == 2


_SCRIPT = """
import random, sys
import numpy as np
import torch
import lockstep

def built():
    return torch.nn.Linear(4, 2)

def begun():
    return lockstep.init(global_batch=8, micro_batches=2, seed=5)

{body}
model = run.prepare(model)
print(run.fingerprint(), random.random(), np.random.rand())
"""


def _run(lines, sender):
    """Runs a script, whose generators are as those of a new process, and sends what it printed and complained of."""
    torch.seed(), np.random.seed(), random.seed()
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        exec(_SCRIPT.format(body="\n".join(lines)), {"__name__": "__main__"})
    sender.send_bytes(pickle.dumps((0.0, True, (output.getvalue().split(), errors.getvalue()))))


def _ended(*scripts):
    """The words that each script printed, and what it complained of; they run at the same time."""
    with forked(_run, [(lines,) for lines in scripts]) as (processes, pipes):
        found, *_ = answers_of(processes, pipes, 60, 1.0, lambda *ended: (0.0, ended))
    return [found[number] for number in range(len(scripts))]


_WARNING = "no seed decided its random numbers"


def test_a_model_built_after_init_has_the_weights_of_the_seed_in_every_run():
    after = "run = begun()", "model = built()"
    (first, complaint), (second, _), (seeded, _) = _ended(
        after, after, ("torch.manual_seed(5)", "model = built()", "run = begun()")
    )
    assert first == second, "torch, NumPy and random are seeded"
    assert first[0] == seeded[0], "with the seed itself"
    assert not complaint


def test_a_model_built_before_init_without_a_seed_is_warned_about():
    before = "model = built()", "run = begun()"
    (first, complaint), (second, _) = _ended(before, before)
    assert first[0] != second[0]
    assert _WARNING in complaint and "lockstep.init(seed=...)" in complaint


def test_a_model_built_after_an_earlier_run_has_its_weights_from_the_seed_of_that():
    """As in a cross-validation. The script was told that no seed had decided them, though it had set one."""
    steps = (
        "data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, 2))",
        "(batch,) = run.batches(data)",
        "run.backward(batch, torch.nn.functional.mse_loss)",
    )
    begin = "model = built()", "run = begun()"
    script = ("torch.manual_seed(5)", *begin, "run.prepare(model)", *steps, "run.close()", *begin)
    (first, complaint), (second, _) = _ended(script, script)
    assert first == second
    assert not complaint


def test_what_was_drawn_and_thrown_away_before_init_is_no_reason_to_warn():
    ((_, complaint),) = _ended(("torch.rand(3), built()", "run = begun()", "model = built()"))
    assert not complaint


def test_a_seed_of_the_scripts_own_stays():
    seeds, begun, built = (
        "random.seed(1), np.random.seed(1), torch.manual_seed(7)",
        "run = begun()",
        "model = built()",
    )
    ((weights, drawn, other), _), ((before, *_), _) = _ended((seeds, begun, built), (seeds, built, begun))
    assert weights == before
    assert float(drawn) == random.Random(1).random()
    assert float(other) == np.random.RandomState(1).rand()


_SCRIPTED = """
@torch.jit.script
def f(x):
    n = x.norm(p=2, dim=-1, keepdim=True).clamp_min(1e-6)
    return x * torch.tanh(torch.nn.functional.softplus(x)) / n * torch.atan(n) + torch.sigmoid(1.702 * x) * x
"""


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_gradient_through_a_scripted_function_has_the_same_bits_in_every_call(tmp_path):
    def gradients():
        # torch reads the source from its file
        (tmp_path / "scripted.py").write_text("import torch\n" + _SCRIPTED)
        f = runpy.run_path(str(tmp_path / "scripted.py"))["f"]
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        return [torch.autograd.grad(f(x).square().sum(), x)[0] for _ in range(4)]

    before = torch._C._jit_set_fusion_strategy([("STATIC", 2), ("DYNAMIC", 10)])
    try:
        first, *others = gradients()
        assert not all(torch.equal(first, other) for other in others), "torch compiles it at its second call"
        with lockstep.init(global_batch=2, micro_batches=2):
            first, *others = gradients()
            assert all(torch.equal(first, other) for other in others)
    finally:
        torch._C._jit_set_fusion_strategy(before)


def test_a_lost_connection_is_a_line_and_another_error_is_printed(caplog):
    printed = []
    lost, own = RuntimeError("pair.cc:553] Connection closed by peer [127.0.0.1]:4471"), ValueError("own")
    for error in (lost, own):
        _explain(3, lambda *given: printed.append(given), type(error), error, None)
    assert caplog.messages == [
        "Rank 3 lost the connection to a rank that was gone. The error of that rank is the cause."
    ]
    assert printed == [(ValueError, own, None)]
