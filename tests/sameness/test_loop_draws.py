"""Random numbers that the user's own loop draws: the same on every layout, and after a stop."""

import dataclasses

import pytest
from tests.sameness.drawing import SINGLE
from tests.sameness.programs import compare
from tests.sameness.test_research import BEGIN, BOTH, FSDP, PIPELINE, SERVERS
from tests.sameness.trials import Layout, Worlds, run_trial

DDP = Layout("ddp 3", 3, {"strategy": "ddp"})
DRAWING = (
    BEGIN
    + """
import random
import numpy

def drawn():
    return [torch.rand(1).item(), numpy.random.rand(), random.random()]


def train(run, epochs):
    global found
    model = layers(nn.Dropout(0.3))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    found = {}
    for epoch in run.epochs(epochs):
        found[f"e{epoch} begins"] = drawn()
        for batch in run.batches(data):
            place = f"e{epoch}s{run.position.step}"
            found[place] = drawn()
            smoothing = float(numpy.random.beta(2, 9))
            loss = run.backward(batch, lambda y, t: F.cross_entropy(y, t, label_smoothing=smoothing))
            found[f"{place} loss"] = float(loss).hex()
            optimizer.param_groups[0]["lr"] = 0.05 + 0.1 * random.random()
            found[f"{place} after"] = drawn()
            optimizer.step()
            optimizer.zero_grad()
        found[f"e{epoch} ends"] = drawn()
        found[f"e{epoch} score"] = run.evaluate(data, F.cross_entropy).hex()
        found[f"e{epoch} evaluated"] = drawn()
    found["fingerprint"] = run.fingerprint()
    return found
"""
)
QUICK = [[DDP], [dataclasses.replace(SINGLE, stop=1), DDP], [dataclasses.replace(DDP, stop=3), SINGLE]]
SLOW = [
    *([each] for each in (FSDP, PIPELINE, SERVERS, BOTH)),
    [dataclasses.replace(PIPELINE, stop=2), SINGLE],
    [dataclasses.replace(SINGLE, stop=4), SERVERS],
    [dataclasses.replace(FSDP, stop=5), dataclasses.replace(BOTH, stop=7), DDP],
]


def names_of(phases):
    return ", ".join(f"{each.name} until {each.stop}" if each.stop else each.name for each in phases)


@pytest.fixture(scope="module")
def reference():
    with Worlds() as worlds:
        ended = run_trial(DRAWING, [SINGLE], 40, worlds)
    assert ended.how == "ran", ended
    return ended


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "phases", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)], ids=names_of
)
def test_a_loop_draws_the_same_numbers_on_every_layout_and_after_a_stop(reference, phases):
    with Worlds() as worlds:
        verdict = compare(reference, run_trial(DRAWING, phases, 60, worlds), phases[-1])
    assert verdict.what == "equal", (verdict.said, verdict.traceback)


def test_no_two_places_of_a_loop_draw_the_same_numbers(reference):
    drawn = [each for values in reference.found[0].values() if isinstance(values, list) for each in values]
    assert len(drawn) == 3 * 3 * (3 + 2 * 3)
    assert len(set(drawn)) == len(drawn)


RANK_DRAWS = DRAWING.replace(
    "            smoothing =", "            if run.is_main:\n                DRAW\n            smoothing ="
)


@pytest.mark.parametrize(
    ("draw", "named"),
    [("torch.randperm(5)", "torch"), ("numpy.random.rand()", "NumPy"), ("random.choice([1, 2])", "random")],
)
def test_a_draw_on_one_rank_only_is_refused_before_the_first_step(draw, named):
    with Worlds() as worlds:
        ended = run_trial(RANK_DRAWS.replace("DRAW", draw), [DDP], 40, worlds)
    assert ended.how == "refused", ended
    assert f"drew random numbers from {named} on some ranks only" in ended.sentence
