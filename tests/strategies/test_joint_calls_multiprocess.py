"""A model that no process holds as a whole, called on some ranks only: all ranks are told so, and none waits."""

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep.config.options import RunOptions
from lockstep.errors import ConfigError
from lockstep.run import Run
from lockstep.runtime.lazy_compiler import postpone_compiler


def call(run, model, everyone=False):
    if everyone or run.is_main:
        return model(torch.ones(2, 6))
    return None


def step(run, optimizer, batch):
    run.backward(batch, F.cross_entropy)
    optimizer.step()
    optimizer.zero_grad()


def at_start(run, model, optimizer, data):
    call(run, model)
    return run.batches(data)


def between_steps(run, model, optimizer, data):
    for _ in run.epochs(1):
        for batch in run.batches(data):
            step(run, optimizer, batch)
            call(run, model)


def between_later_steps(run, model, optimizer, data):
    for epoch in run.epochs(5):
        for batch in run.batches(data):
            step(run, optimizer, batch)
            if epoch == 4 and batch.plan.position == 0:
                call(run, model)


def a_layer_alone(run, model, optimizer, data):
    for batch in run.batches(data):
        step(run, optimizer, batch)
        if run.is_main:
            model[2](model[1](model[0](torch.ones(2, 6))))


def before_a_step(run, model, optimizer, data):
    for batch in run.batches(data):
        run.backward(batch, F.cross_entropy)
        call(run, model)
        optimizer.step()
        optimizer.zero_grad()


def before_clipping(run, model, optimizer, data):
    for batch in run.batches(data):
        run.backward(batch, F.cross_entropy)
        call(run, model)
        run.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()


def after_an_epoch(run, model, optimizer, data):
    for _ in run.epochs(2):
        for batch in run.batches(data):
            step(run, optimizer, batch)
        call(run, model)


def then_evaluate(run, model, optimizer, data):
    with torch.no_grad():
        call(run, model)
    run.evaluate(data, F.cross_entropy)


def then_predict(run, model, optimizer, data):
    call(run, model)
    run.predict(data)


def then_save(run, model, optimizer, data):
    call(run, model)
    run.save()


def then_load(run, model, optimizer, data):
    weights = run.state_dict()
    call(run, model)
    run.load_state_dict(weights)


def then_fingerprint(run, model, optimizer, data):
    call(run, model)
    run.fingerprint()


def on_all_ranks(run, model, optimizer, data):
    outputs = [call(run, model, everyone=True).detach()]
    run.evaluate(data, lambda out, pair: F.cross_entropy(out, pair[1]), forward=lambda pair: model(model(pair[0])))
    return torch.stack([*outputs, call(run, model, everyone=True).detach()])


PROGRAMS = (
    *(at_start, between_steps, before_a_step, after_an_epoch),
    *(then_evaluate, then_predict, then_save, then_load, then_fingerprint),
)
UNDER_FSDP = (between_later_steps, before_clipping)
"""Where the ranks exchange nothing else, for speed; under other strategies they wait for each other and are stuck."""


def outcomes(world, options, folder):
    """What each program raised, by its name, and what the call on all ranks gave."""
    postpone_compiler()
    found = {}
    layers = () if "pipeline" in options.get("mesh", options["strategy"]) else (a_layer_alone,)
    further = UNDER_FSDP if options["strategy"] == "fsdp" else ()
    for program in (*PROGRAMS, *layers, *further, on_all_ranks):
        torch.manual_seed(1)
        options = {"global_batch": 12, "micro_batches": 6, "seed": 3, **options}
        run = Run(RunOptions(directory=folder / program.__name__, **options), world)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        data = TensorDataset(torch.randn(18, 6), torch.randint(6, (18,)))
        try:
            found[program.__name__] = program(run, model, optimizer, data)
        except ConfigError as error:
            found[program.__name__] = str(error)
        finally:
            run.close()
    return found


@pytest.mark.fault("C1")
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"strategy": "fsdp"}),
        (2, {"strategy": "pipeline"}),
        pytest.param(2, {"strategy": "tensor"}, marks=pytest.mark.slow),
        pytest.param(4, {"strategy": "hybrid", "mesh": "data=2,pipeline=2"}, marks=pytest.mark.slow),
        pytest.param(4, {"strategy": "hybrid", "mesh": "fsdp=2,pipeline=2"}, marks=pytest.mark.slow),
        pytest.param(4, {"strategy": "hybrid", "mesh": "data=2,tensor=2"}, marks=pytest.mark.slow),
    ],
)
def test_a_call_of_the_model_on_some_ranks_is_refused_on_all_of_them(tmp_path, world, options):
    everywhere = run_ranks(outcomes, world, options, tmp_path, timeout=60)
    others = "rank 1" if world == 2 else "ranks 1-3"
    for rank, found in enumerate(everywhere):
        for name, said in found.items():
            if name != "on_all_ranks":
                outside = f"outside of run.backward on rank 0, while {others} went on to "
                went = ("the next collective call", "run.backward")
                is_told = any(outside + each in said for each in went)
                assert is_told or (rank and "a call of the model on rank 0; run." in said), (name, said)
    for found in everywhere:
        assert torch.equal(found["on_all_ranks"], everywhere[0]["on_all_ranks"])
