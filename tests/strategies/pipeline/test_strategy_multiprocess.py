"""The bits on either side of a stage's border are those of one device, whatever crosses it."""

import logging
import pickle
from functools import cache

import pytest
import torch
from tests.ranks import run_ranks
from tests.strategies.pipeline.pipeline_jobs import JOBS
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.core.fingerprint import digest_tensors
from lockstep.run import Run, RunOptions
from lockstep.runtime.lazy_compiler import postpone_compiler

pytestmark = pytest.mark.timeout(300)
LAYOUTS = {
    "1f1b": (3, {"strategy": "pipeline"}),
    "gpipe": (3, {"strategy": "pipeline", "pipeline": {"schedule": "gpipe"}}),
    "interleaved": (3, {"strategy": "pipeline", "pipeline": {"schedule": "interleaved"}}),
    "hybrid": (4, {"strategy": "hybrid", "mesh": "data=2,pipeline=2", "shared_memory": False}),
}
CASES = [
    *[("1f1b", job) for job in JOBS],
    *[("gpipe", job) for job in ("recomputed", "in_place", "few_rows")],
    *[("interleaved", job) for job in ("images", "few_rows")],
    *[("hybrid", job) for job in ("recomputed", "images", "few_rows")],
]


def parameters():
    return [pytest.param(*case, marks=[pytest.mark.slow] * (not is_quick(*case))) for case in CASES]


def is_quick(layout, job):
    """Transfers between stages are the same in gpipe and the hybrid as in 1f1b, and left to ``make test-all``.

    So are images, of the same network as others and with a frozen start, and four jobs that take long.
    """
    long = ("recomputed", "recurrent", "nested", "in_place")
    return layout not in ("gpipe", "hybrid") and job not in ("images", *long)


@pytest.mark.parametrize("layout, job", parameters())
def test_the_bits_are_those_of_one_device(layout, job):
    quick = is_quick(layout, job)
    expected, found = trained("single", quick)[job], trained(layout, quick)[job]
    assert list(found) == list(expected)
    different = [name for name in expected if found[name] != expected[name]]
    assert not different, f"{len(different)} of {len(expected)} differ, first {different[:5]}"


@cache
def trained(layout, quick):
    """The results of a layout's rank 0, by job; of the quick ones alone where those alone are asked for."""
    world_size, settings = LAYOUTS.get(layout, (1, {"strategy": "single"}))
    jobs = [job for each, job in CASES if each == layout] or list(JOBS)
    if quick:
        jobs = [job for job in jobs if is_quick(layout, job)]
    return run_ranks(train_all, world_size, jobs, settings, timeout=200)[0]


def train_all(world, jobs, settings):
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    found = {}
    for job in jobs:
        try:
            torch.manual_seed(1)
            found[job] = pickle.dumps(train(world, JOBS[job](), settings))  # runs look at variables of loops
        except Exception as error:
            error.add_note(f"in the job {job!r}")
            raise
    return {job: pickle.loads(each) for job, each in found.items()}


def train(world, job, settings):
    """Digests of losses, gradient norms, evaluations, model and optimizer state by name."""
    given = {"seed": 3, "threads": 1, **job.options, **settings}
    if "split" in job.options.get("pipeline", {}) and given.get("strategy") == "pipeline":
        given["pipeline"] = {**settings.get("pipeline", {}), **job.options["pipeline"]}
    model = job.model
    run = Run(RunOptions.of(**given), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr)
    model, optimizer = run.prepare(model, optimizer)
    found = {}
    for epoch in run.epochs(2):
        for number, batch in enumerate(run.batches(job.data)):
            found[f"loss {epoch}.{number}"] = run.backward(batch, job.loss)
            found[f"norm {epoch}.{number}"] = run.clip_gradients(1.0)
            optimizer.step()
            optimizer.zero_grad()
        found[f"evaluation {epoch}"] = torch.tensor(run.evaluate(job.data, job.loss), dtype=torch.float64)
    state = run.require_prepared().state.capture(run.fingerprint(), keep=True)
    found |= state.model | state.optimizer
    digests = digest_tensors(found)
    run.close()
    return dict(sorted(digests.items()))


def scaled(world, settings):
    """The fingerprint of a run whose loop scales parameters and gradients, of which one is of two layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    model[3].weight = model[1].weight
    run = Run(RunOptions.of(global_batch=8, micro_batches=4, **settings), world)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in run.epochs(2):
        for batch in run.batches(TensorDataset(torch.randn(16, 4), torch.randn(16, 4))):
            run.backward(batch, nn.functional.mse_loss)
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
                parameter.data.mul_(0.9)
            optimizer.step()
            optimizer.zero_grad()
    found = run.fingerprint()
    run.close()
    return found


def test_a_loop_may_scale_a_weight_of_two_layers_and_its_gradient():
    (expected,) = run_ranks(scaled, 1, {"strategy": "single"})
    assert run_ranks(scaled, 2, LAYOUTS["1f1b"][1]) == [expected] * 2
