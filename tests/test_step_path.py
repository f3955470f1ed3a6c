"""Traces one step of ``ddp`` and compares the files it runs through with the list in docs/architecture.md."""

import re
import sys
import threading
from collections import Counter
from pathlib import Path
from traceback import walk_stack

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

ROOT = Path(__file__).parent.parent
PACKAGE = Path(lockstep.__file__).parent
MOST_FILES = 20
"""Reached so far; the aim is 12."""


def one_step(batches, run, optimizer):
    run.backward(next(batches), nn.functional.cross_entropy)
    optimizer.step()
    optimizer.zero_grad()


def traced_step(world):
    """The calls of one step within ``lockstep``, in all threads of a rank: how many of each (file, function).

    It is the first step of the second epoch: the model, the reducer and the loader are warm, and it reads samples.
    ``check_start`` and ``begin_steps``, which look at the loop as the steps of an epoch begin, are not of the step.
    """
    calls, tracing = Counter(), False

    def note(frame, event, _):
        if (
            tracing
            and event == "call"
            and not any(each.f_code.co_name in ("check_start", "begin_steps") for each, _ in walk_stack(frame))
        ):
            calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    threading.setprofile(note)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    samples = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
    run = lockstep.init(global_batch=16, micro_batches=4, strategy="ddp", checks="off")
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in run.batches(samples):
        one_step(iter([batch]), run, optimizer)
    batches = run.batches(samples)
    sys.setprofile(note)
    tracing = True
    one_step(batches, run, optimizer)
    tracing = False
    sys.setprofile(None)
    threading.setprofile(None)
    batches.close()
    run.close()
    own = {(Path(file), function): count for (file, function), count in calls.items()}
    return {
        (str(file.relative_to(PACKAGE)), function): count
        for (file, function), count in own.items()
        if file.is_relative_to(PACKAGE)
    }


def listed_files():
    """The files in the fenced block under the heading "The path of a step"."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"^#+ The path of a step\n.*?^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1]
    return [line.split()[0] for line in block.splitlines() if line.split()[0].endswith(".py")]


@pytest.mark.shared_memory
@pytest.mark.timeout(120)
def test_one_step_runs_through_the_files_that_the_architecture_lists():
    everyones = run_ranks(traced_step, 2)
    for rank, calls in enumerate(everyones):
        print(f"rank {rank}: {len({file for file, _ in calls})} files")
        for file in sorted({file for file, _ in calls}):
            functions = sorted({function for of, function in calls if of == file})
            print(f"  {file}: {', '.join(functions)}")
    found = {file for calls in everyones for file, _ in calls}
    listed = listed_files()
    assert found == set(listed) and len(listed) == len(found)
    assert len(found) <= MOST_FILES
