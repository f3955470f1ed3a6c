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
OWN = (
    DRAWING.replace(
        """
def drawn():
    return [torch.rand(1).item(), numpy.random.rand(), random.random()]
""",
        """
generator = torch.Generator().manual_seed(4)

class Numbers:
    def __init__(self):
        self.rngs = [numpy.random.default_rng(2)]
""",
    )
    .replace(
        "    global found\n",
        """    global found
    numbers, own = Numbers(), random.Random(7)

    def drawn():
        return [torch.rand(1, generator=generator).item(), numbers.rngs[0].random(), own.random()]

""",
    )
    .replace("numpy.random.beta(", "numbers.rngs[0].beta(")
    .replace("* random.random()", "* own.random()")
)
QUICK = [[dataclasses.replace(DDP, stop=3), SINGLE]]
SLOW = [
    [DDP],
    [dataclasses.replace(SINGLE, stop=1), DDP],
    *([each] for each in (FSDP, PIPELINE, SERVERS, BOTH)),
    [dataclasses.replace(PIPELINE, stop=2), SINGLE],
    [dataclasses.replace(SINGLE, stop=4), SERVERS],
    [dataclasses.replace(FSDP, stop=5), dataclasses.replace(BOTH, stop=7), DDP],
]


def names_of(phases):
    return ", ".join(f"{each.name} until {each.stop}" if each.stop else each.name for each in phases)


def alone(text):
    with Worlds() as worlds:
        ended = run_trial(text, [SINGLE], 40, worlds)
    assert ended.how == "ran", ended
    return ended


@pytest.fixture(scope="module")
def reference():
    return alone(DRAWING)


@pytest.fixture(scope="module")
def reference_of_own():
    return alone(OWN)


on_layouts = pytest.mark.parametrize(
    "phases", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)], ids=names_of
)


def require_equal(reference, text, phases):
    with Worlds() as worlds:
        verdict = compare(reference, run_trial(text, phases, 60, worlds), phases[-1])
    assert verdict.what == "equal", (verdict.said, verdict.traceback)


@pytest.mark.timeout(120)
@on_layouts
def test_a_loop_draws_the_same_numbers_on_every_layout_and_after_a_stop(reference, phases):
    require_equal(reference, DRAWING, phases)


@pytest.mark.timeout(120)
@on_layouts
def test_generators_of_the_loop_go_on_after_a_stop(reference_of_own, phases):
    require_equal(reference_of_own, OWN, phases)


def test_no_two_places_of_a_loop_draw_the_same_numbers(reference):
    drawn = [each for values in reference.found[0].values() if isinstance(values, list) for each in values]
    assert len(drawn) == 3 * 3 * (3 + 2 * 3)
    assert len(set(drawn)) == len(drawn)


RANK_DRAWS = DRAWING.replace(
    "            smoothing =", "            if run.is_main:\n                DRAW\n            smoothing ="
)


@pytest.mark.parametrize(
    ("draw", "named"),
    [
        ("torch.randperm(5)", "torch"),
        pytest.param("numpy.random.rand()", "NumPy", marks=pytest.mark.slow),
        pytest.param("random.choice([1, 2])", "random", marks=pytest.mark.slow),
    ],
)
def test_a_draw_on_one_rank_only_is_refused_before_the_first_step(draw, named):
    with Worlds() as worlds:
        ended = run_trial(RANK_DRAWS.replace("DRAW", draw), [DDP], 40, worlds)
    assert ended.how == "refused", ended
    assert f"drew random numbers from {named} on some ranks only" in ended.sentence


CENTERED = (
    BEGIN
    + """
def train(run, epochs):
    global found
    model, center, found = layers(), torch.zeros(4), {}
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs(epochs):
        for batch in run.batches(data):
            loss = run.backward(batch, lambda y, t: F.cross_entropy(y - center, t))
            center.mul_(0.9).add_(0.1 * float(loss))
            optimizer.step()
            optimizer.zero_grad()
            GIVE_BACK
    found["fingerprint"] = run.fingerprint()
    return found
"""
)


@pytest.mark.parametrize(
    "layout", [SINGLE, pytest.param(DDP, marks=pytest.mark.slow)], ids=["single", "ddp 3"]
)
def test_a_tensor_that_the_loss_reads_and_the_loop_changes_is_not_resumed_without_its_values(layout):
    text = CENTERED.replace("GIVE_BACK", "pass")
    with Worlds() as worlds:
        ended = run_trial(text, [dataclasses.replace(SINGLE, stop=4), layout], 60, worlds)
    assert ended.how == "refused", ended
    assert "The loss or the model reads train: center, which the loop changes" in ended.sentence


TAUGHT = """
import copy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

RECIPE = {"global_batch": 16, "micro_batches": 4, "seed": 3, "threads": 1}
EPOCHS = 3
data = TensorDataset(torch.randn(40, 6, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 4)


def train(run, epochs):
    global found
    found = {}
    base = nn.Sequential(nn.Linear(6, 4))
    MADE
    model, optimizer = run.prepare(base, torch.optim.SGD(base.parameters(), lr=0.1))
    for epoch in run.epochs(epochs):
        for batch in run.batches(data):
            run.backward(batch, lambda output, data: LOSS, forward=lambda data: model(data[0]))
            optimizer.step()
            optimizer.zero_grad()
            CHANGED
    return found
"""


@pytest.mark.parametrize(
    ("made", "loss", "changed"),
    [
        (
            "teacher = copy.deepcopy(base).requires_grad_(False)",
            "F.cross_entropy(output, data[1]) + F.mse_loss(output, teacher(data[0]))",
            "teacher[0].weight.data.mul_(0.9)",
        ),
        (
            "teacher = nn.CrossEntropyLoss(weight=torch.ones(4))",
            "teacher(output, data[1])",
            "teacher.weight[0] *= 1.1",
        ),
    ],
    ids=["a copy of the model", "class weights"],
)
def test_a_module_that_the_loss_calls_and_the_loop_changes_is_not_resumed_without_its_values(
    made, loss, changed
):
    """It was named in a warning, and the run went on with other bits."""
    text = TAUGHT.replace("MADE", made).replace("LOSS", loss).replace("CHANGED", changed)
    with Worlds() as worlds:
        ended = run_trial(text, [dataclasses.replace(SINGLE, stop=4), SINGLE], 60, worlds)
    assert ended.how == "refused", ended
    assert "The loss or the model reads train: teacher, which the loop changes" in ended.sentence


def test_such_a_tensor_goes_on_from_what_the_script_stores_itself():
    stored = CENTERED.replace("GIVE_BACK", 'run.extra["center"] = center.tolist()').replace(
        "    for epoch",
        '    center.copy_(torch.tensor(run.extra.get("center", [0.0] * 4)))\n    for epoch',
        1,
    )
    require_equal(alone(stored), stored, [dataclasses.replace(SINGLE, stop=4), DDP])
