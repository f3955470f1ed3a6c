"""One checkpoint for all strategies: a run that changes strategy and world size at each ends as one that never did."""

import logging

import pytest
import torch
from tests.ranks import run_ranks
from tests.strategies.contract_jobs import JOBS
from tests.strategies.test_strategy import LAYOUTS

from lockstep.core.fingerprint import digest_tensors
from lockstep.run import Run, RunOptions
from lockstep.runtime.lazy_compiler import postpone_compiler

pytestmark = pytest.mark.timeout(900)
JOB = {"fp32": "resnet", "fp16": "attention_untied"}
BITWISE = [layout for layout in LAYOUTS if not layout.bound]
SOME = ("parameter_server-4-2", "hybrid-4-fsdp=2,pipeline=2")
STEPS_EACH = 2


@pytest.mark.parametrize(
    ("layouts", "precisions"),
    [
        ([each for each in BITWISE if each.name in SOME], ["fp16"]),
        pytest.param(BITWISE, list(JOB), marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
@pytest.mark.fault("K5")
def test_a_run_that_changes_its_layout_at_every_checkpoint_ends_as_one_that_never_did(layouts, precisions, tmp_path):
    """Two steps under each layout, of each job; stops fall inside of epochs and on their ends."""
    last = STEPS_EACH * len(layouts)
    alone = (str(tmp_path / "whole"), {"strategy": "single"}, precisions, last, last)
    whole = run_ranks(go_on, 1, *alone, timeout=300)[0]
    for number, layout in enumerate(layouts, 1):
        stop = number * STEPS_EACH
        task = (str(tmp_path / "changing"), layout.settings, precisions, stop, last)
        found = run_ranks(go_on, layout.world, *task, timeout=300)
        assert found[0] if number == len(layouts) else not found[0], f"{layout.name} did not stop at {stop}"
    for precision, digests in whole.items():
        assert set(found[0][precision]) == set(digests)
        different = [name for name in digests if found[0][precision][name] != digests[name]]
        assert not different, f"{precision}: {len(different)} of {len(digests)} tensors differ: {different[:5]}"


def go_on(world, directory, options, precisions, stop, last):
    """Trains each precision's job from its newest checkpoint up to step ``stop``; digests all state at the very end."""
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    found = {}
    for precision in precisions:
        torch.manual_seed(0)
        settings = {
            "precision": precision,
            "directory": f"{directory}-{precision}",
            "resume": "auto",
            **options,
        }
        state = train(world, JOBS[JOB[precision]](), settings, stop)
        if stop == last and world.is_main:
            found[precision] = digest_tensors(state)
    return found


def train(world, job, options, stop):
    run = Run(RunOptions.of(**{"seed": 3, "threads": 1, **job.options, **options}), world)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(job.optimizer, 40)
    _, optimizer, schedule = run.prepare(job.model, job.optimizer, schedule)
    state = {}
    for _ in run.epochs(1000):
        for batch in run.batches(job.data):
            run.backward(batch, job.loss)
            run.clip_gradients(job.clip)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if batch.plan.step + 1 == stop:
                run.save()
                captured = run.require_prepared().state.capture(run.fingerprint(), keep=world.is_main)
                state = {name: t.clone() for name, t in {**captured.model, **captured.optimizer}.items()}
                break
        if run.position.step >= stop:
            break
    run.close()
    return state
