"""Random numbers that the user's own loop draws: the same on every layout, and after a stop."""

import dataclasses

import pytest
from tests.sameness.drawing import SINGLE
from tests.sameness.programs import compare
from tests.sameness.test_research import BEGIN, BOTH, FSDP, PIPELINE, SERVERS
from tests.sameness.trials import Layout, Worlds, run_trial

DDP = Layout("ddp 3", 3, {"strategy": "ddp"})
TWO = Layout("ddp 2", 2, {"strategy": "ddp"})
WORLDS = Worlds()
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


@pytest.fixture(scope="module", autouse=True)
def ranks_end():
    """Kills the ranks of this file, which serve one program after the other."""
    with WORLDS:
        yield


def names_of(phases):
    return ", ".join(f"{each.name} until {each.stop}" if each.stop else each.name for each in phases)


def over_first_epoch(text):
    """The program, which ends after its first epoch, and goes on with the others where it is resumed."""
    text = text.replace("in run.epochs(epochs):", "in run.epochs(epochs if run.position.epoch else 1):")
    return text.replace('    found["fingerprint"]', '        run.save()\n    found["fingerprint"]')


def alone(text):
    ended = run_trial(text, [SINGLE], 40, WORLDS)
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
    verdict = compare(reference, run_trial(text, phases, 60, WORLDS), phases[-1])
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
    ended = run_trial(RANK_DRAWS.replace("DRAW", draw), [DDP], 40, WORLDS)
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


@pytest.mark.parametrize("layout", [SINGLE, pytest.param(DDP, marks=pytest.mark.slow)], ids=["single", "ddp 3"])
def test_a_tensor_that_the_loss_reads_and_the_loop_changes_is_not_resumed_without_its_values(layout):
    text = CENTERED.replace("GIVE_BACK", "pass")
    ended = run_trial(text, [dataclasses.replace(SINGLE, stop=4), layout], 60, WORLDS)
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
def test_a_module_that_the_loss_calls_and_the_loop_changes_is_not_resumed_without_its_values(made, loss, changed):
    """It was named in a warning, and the run went on with other bits."""
    text = TAUGHT.replace("MADE", made).replace("LOSS", loss).replace("CHANGED", changed)
    ended = run_trial(text, [dataclasses.replace(SINGLE, stop=4), SINGLE], 60, WORLDS)
    assert ended.how == "refused", ended
    assert "The loss or the model reads train: teacher, which the loop changes" in ended.sentence


def test_such_a_tensor_goes_on_from_what_the_script_stores_itself():
    stored = CENTERED.replace("GIVE_BACK", 'run.extra["center"] = center.tolist()').replace(
        "    for epoch",
        '    center.copy_(torch.tensor(run.extra.get("center", [0.0] * 4)))\n    for epoch',
        1,
    )
    require_equal(alone(stored), stored, [dataclasses.replace(SINGLE, stop=4), TWO])


COMPUTED = (
    BEGIN
    + """
def train(run, epochs):
    global found
    model, found = layers(), {}
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        center = model(inputs).mean(0)
    GIVE_BACK
    for epoch in run.epochs(epochs):
        for batch in run.batches(data):
            run.backward(batch, lambda y, t: F.mse_loss(y, center.expand_as(y)))
            optimizer.step()
            optimizer.zero_grad()
    found["fingerprint"] = run.fingerprint()
    return found
"""
)


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_tensor_that_is_computed_from_the_model_is_not_resumed_with_other_values(stop):
    """As the center of Deep SVDD: the resumed run computed it from the trained weights, without a word."""
    ended = run_trial(
        COMPUTED.replace("GIVE_BACK", "pass"),
        [dataclasses.replace(SINGLE, stop=stop), SINGLE],
        60,
        WORLDS,
    )
    assert ended.how == "refused", ended
    assert "The loss or the model reads train: center, which the loop changes or computes" in ended.sentence


def test_a_computed_tensor_goes_on_from_what_the_script_stores_itself():
    stored = COMPUTED.replace("GIVE_BACK", 'center = torch.tensor(run.extra.setdefault("center", center.tolist()))')
    require_equal(alone(stored), stored, [dataclasses.replace(SINGLE, stop=4), TWO])


RELABELLED = (
    BEGIN
    + """
import numpy
from torch.utils.data import DataLoader, Dataset, Subset


class Labelled(Dataset):
    def __init__(self):
        self.inputs, self.labels = inputs, KIND([number % 4 for number in range(200)])

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.inputs[index], int(self.labels[index])


class Duck:
    __init__, __len__, __getitem__ = Labelled.__init__, Labelled.__len__, Labelled.__getitem__


class Cached(Labelled):
    def __init__(self):
        super().__init__()
        self.cache, self.has_read = torch.zeros(40, 6), [False] * 100

    def __getitem__(self, index):
        if not self.has_read[index]:
            self.cache[index], self.has_read[index] = 2 * self.inputs[index], True
        return self.cache[index], self.labels[index]


def train(run, epochs):
    global found
    model, found = layers(), {}
    MADE
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    GIVE_BACK
    for epoch in run.epochs(epochs):
        for batch in run.batches(data):
            run.backward(batch, F.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        CHANGE
        STORE
    found["fingerprint"] = run.fingerprint()
    return found
"""
)
KINDS = {
    "list": "list",
    "array": "numpy.array",
    "tensor": "torch.tensor",
    "dict": "(lambda labels: dict(enumerate(labels)))",
    "short list": "(lambda labels: labels[:40])",
}


def relabelled(
    kind="list",
    made="data = Labelled()",
    change="data.labels[7] = (data.labels[7] + 1) % 4",
    give_back="pass",
    store="pass",
):
    text = RELABELLED.replace("KIND", KINDS[kind]).replace("MADE", made).replace("CHANGE", change)
    return text.replace("GIVE_BACK", give_back).replace("STORE", store)


def require_labels_refused(text, stop):
    ended = run_trial(text, [dataclasses.replace(SINGLE, stop=stop), SINGLE], 60, WORLDS)
    assert ended.how == "refused", ended
    assert "in a data set, or what it reads" in ended.sentence


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_labels_that_the_loop_changes_in_its_data_set_are_not_lost_in_silence(kind, stop):
    """Neither of the samples that are compared at a resume was one of those that had changed."""
    require_labels_refused(relabelled(kind), stop)


SET = "TensorDataset(inputs, torch.arange(40) % 4)"


@pytest.mark.parametrize(
    ("made", "change"),
    [
        (
            "labels = torch.arange(40) % 4\n    data = TensorDataset(inputs, labels)",
            "data.tensors[1][7] = epoch",
        ),
        (f"data = Subset({SET}, range(40))", "data.dataset.tensors[1][7] = epoch"),
        (f"data = DataLoader({SET}, batch_size=16)", "data.dataset.tensors[1][7] = epoch"),
        ("data = Duck()", "data.labels[7] = epoch"),
    ],
    ids=["also a variable", "subset", "loader", "no Dataset"],
)
def test_changed_labels_are_found_wherever_the_data_set_is(made, change):
    require_labels_refused(relabelled(made=made, change=change), 4)


def test_labels_go_on_from_what_the_script_stores_itself():
    text = relabelled(
        give_back='data.labels = run.extra.get("labels", data.labels)',
        store='run.extra["labels"] = list(data.labels)',
    )
    require_equal(alone(text), text, [dataclasses.replace(SINGLE, stop=4), TWO])


@pytest.mark.parametrize(
    "change",
    ["pass", 'found[f"e{epoch} score"] = run.evaluate(tested, F.cross_entropy).hex()'],
    ids=["trained", "evaluated"],
)
def test_data_sets_that_keep_what_they_have_read_go_on(change):
    text = relabelled(made="data, tested = Cached(), Cached()", change=change)
    require_equal(alone(text), text, [*(dataclasses.replace(SINGLE, stop=stop) for stop in (3, 4, 6)), TWO])


def test_labels_that_the_start_of_an_epoch_computes_go_on():
    """In another epoch they are again those that the run began with."""
    begins = "    for epoch in run.epochs(epochs):\n"
    computed = begins + "        data.labels = torch.arange(200) % (2 + epoch % 2)\n"
    text = relabelled("tensor", change="pass").replace(begins, computed)
    require_equal(alone(text), text, [*(dataclasses.replace(SINGLE, stop=stop) for stop in (3, 4, 6)), TWO])


@pytest.mark.parametrize("kind", KINDS)
def test_labels_that_the_loop_changes_after_its_first_epoch_are_not_lost_in_silence(kind):
    ended = run_trial(over_first_epoch(relabelled(kind)), [SINGLE, SINGLE], 60, WORLDS)
    assert ended.how == "refused", ended
    assert "The loop had changed train: data.labels in a data set" in ended.sentence


LEVEL = """data = Labelled()
    data.level = 1.0
    Labelled.__getitem__ = lambda self, index: (self.level * self.inputs[index], int(self.labels[index]))
"""


def test_a_number_that_the_loop_changes_in_a_data_set_is_not_lost_in_silence():
    text = over_first_epoch(relabelled(made=LEVEL, change="data.level += 0.5"))
    ended = run_trial(text, [SINGLE, SINGLE], 60, WORLDS)
    assert ended.how == "refused", ended
    assert "The loop had changed train: data.level in a data set" in ended.sentence


def test_labels_in_a_table_of_pandas_are_not_lost_in_silence():
    pytest.importorskip("pandas")
    made = "import pandas\n    data = Labelled()\n    data.labels = pandas.Series(data.labels)"
    require_labels_refused(relabelled(made=made), 4)


def test_labels_beside_tensors_in_a_long_list_are_not_lost_in_silence():
    made = "data = Labelled()\n    data.labels = [(number % 4, inputs[number % 40]) for number in range(200)]"
    made += "\n    Labelled.__getitem__ = lambda self, index: (self.inputs[index], self.labels[index][0])"
    change = "data.labels[7] = (epoch, inputs[7])"
    require_labels_refused(relabelled(made=made, change=change), 4)


OWN_PASS = """for inputs_, _ in DataLoader(tested, batch_size=4 + 4 * epoch):
            found[f"e{epoch}"] = inputs_.sum().item()
            break"""


def test_data_sets_that_keep_what_a_loop_of_the_scripts_own_reads_go_on():
    """They were refused: reading them changed them between two epochs."""
    text = relabelled(made="data, tested = Cached(), Cached()", change=OWN_PASS)
    require_equal(alone(text), text, [*(dataclasses.replace(SINGLE, stop=stop) for stop in (3, 4, 6)), TWO])
    require_equal(alone(text), over_first_epoch(text), [SINGLE, SINGLE])


def test_an_array_that_each_epoch_sets_in_place_goes_on():
    begins = "    for epoch in run.epochs(epochs):\n"
    text = relabelled("array", change="data.labels[:] = epoch % 4").replace(
        begins, begins + "        data.labels[:] = numpy.arange(200) % 4\n"
    )
    require_equal(alone(text), over_first_epoch(text), [SINGLE, SINGLE])


WEIGHTED = (
    BEGIN
    + """
import argparse
import types


class Task:
    beta = 0.0

    def __init__(self):
        self.beta = 0.1


class Node:
    __module__ = "omegaconf.nodes"

    def __init__(self, value):
        self._val = value


class Config:
    # As omegaconf's DictConfig, which looks like a data set: it has a length and entries.

    __module__ = "omegaconf.dictconfig"

    def __init__(self, **values):
        vars(self)["_content"] = {name: Node(value) for name, value in values.items()}

    def __len__(self):
        return len(self._content)

    def __getitem__(self, name):
        return self._content[name]._val

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __setattr__(self, name, value):
        self._content[name]._val = value


def train(run, epochs):
    global found, weight
    model, found, task, weight = layers(), {}, Task(), 0.1
    beta, beside = 0.1, {"beta": 0.1}
    config, space, arguments = Config(beta=0.1), types.SimpleNamespace(beta=0.1), argparse.Namespace(beta=0.1)

    def loss(y, t):
        return F.cross_entropy(y, t) + READ * y.square().mean()

    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs(epochs):
        AT_EPOCH
        for batch in run.batches(data):
            IN_STEP
            run.backward(batch, loss)
            optimizer.step()
            optimizer.zero_grad()
            AFTER_STEP
    found["fingerprint"] = run.fingerprint()
    return found
"""
)
PLACES = {
    "beta": "train: beta",
    "task.beta": "train: task.beta",
    "beside['beta']": "train: beside['beta']",
    "weight": "weight",
    "space.beta": "train: space.beta",
    "arguments.beta": "train: arguments.beta",
    "config.beta": "train: config._content['beta']._val",
}
QUICK_PLACES = ("beta", "task.beta")
"""Those that are set in more ways than one in ``make test``."""
of_places = pytest.mark.parametrize(
    "read",
    [pytest.param(each, marks=[pytest.mark.slow] * (each not in QUICK_PLACES)) for each in PLACES],
)


def weighted(read, epoch="pass", step="pass", after="pass"):
    text = (
        WEIGHTED.replace("READ", read).replace("AT_EPOCH", epoch).replace("IN_STEP", step).replace("AFTER_STEP", after)
    )
    return text.replace("global found, weight", "global found, weight" if read == "weight" else "global found")


@pytest.mark.parametrize("read", PLACES)
@pytest.mark.parametrize("stop", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_number_that_the_loss_reads_and_the_loop_changes_is_not_resumed_without_its_value(read, stop):
    """It was named in a warning, and the run went on with other bits."""
    text = weighted(read, after=f"{read} += 0.1")
    ended = run_trial(text, [dataclasses.replace(SINGLE, stop=stop), SINGLE], 60, WORLDS)
    assert ended.how == "refused", ended
    assert f"The loss or the model reads {PLACES[read]}, which the loop changes" in ended.sentence


@of_places
def test_such_a_number_is_not_resumed_after_the_first_epoch_either(read):
    """An attribute that is the same at each start of an epoch was taken for one that is set there."""
    text = over_first_epoch(weighted(read, after=f"{read} += 0.1"))
    ended = run_trial(text, [SINGLE, SINGLE], 60, WORLDS)
    assert ended.how == "refused", ended
    assert f"The loss or the model reads {PLACES[read]}, which the loop changes" in ended.sentence


@of_places
def test_a_number_that_is_set_after_each_step_is_not_resumed_without_its_value(read):
    """A variable that only the loss reads was taken for one that nothing reads."""
    text = weighted(read, after=f"{read} = 0.1 + 0.1 * run.position.step")
    ended = run_trial(text, [dataclasses.replace(SINGLE, stop=4), SINGLE], 60, WORLDS)
    assert ended.how == "refused", ended
    assert f"The loss or the model reads {PLACES[read]}, which the loop changes" in ended.sentence


@of_places
def test_a_number_that_each_epoch_sets_goes_on_after_the_first_one(read):
    text = weighted(read, epoch=f"{read} = 0.1 * (epoch + 1)")
    require_equal(alone(text), over_first_epoch(text), [SINGLE, SINGLE])


@pytest.mark.parametrize(
    ("where", "read"),
    [
        pytest.param(where, read, marks=[pytest.mark.slow] * (number != 2 or read not in QUICK_PLACES))
        for number, where in enumerate(
            [
                {"step": "SET = 0.1 * (run.position.step % 2)"},
                {"step": "SET = 0.1 if run.position.step % 2 else 0.2"},
                {"epoch": "SET = 0.1 * (epoch % 2 + 1)"},
            ]
        )
        for read in PLACES
    ],
)
def test_a_number_that_the_loop_sets_anew_goes_on(read, where):
    """Also one that has the value of the beginning again."""
    text = weighted(read, **{key: value.replace("SET", read) for key, value in where.items()})
    require_equal(alone(text), text, [*(dataclasses.replace(SINGLE, stop=stop) for stop in (3, 4, 6)), TWO])


def test_a_number_that_the_loss_sets_and_does_not_read_goes_on():
    """As the last value of a loss, kept for a log. The resumed run was refused: its loss would read it."""
    text = weighted("task.beta").replace(
        "    return F.cross_entropy", "    task.beta = y.mean().item()\n        return F.cross_entropy"
    )
    text = text.replace(" + task.beta * y.square().mean()", "")
    require_equal(alone(text), text, [dataclasses.replace(SINGLE, stop=4), SINGLE])


@pytest.mark.parametrize(
    "place", ["        for batch in run.batches(data):\n", "    for epoch in run.epochs(epochs):\n"]
)
def test_a_tensor_that_each_step_or_epoch_sets_in_place_goes_on(place):
    """It was refused: the loss reads it, and it was not what it was."""
    indent = " " * (12 if "batches" in place else 8)
    text = CENTERED.replace("center.mul_(0.9).add_(0.1 * float(loss))", "pass").replace("GIVE_BACK", "pass")
    text = text.replace(place, f"{place}{indent}center[0] = 3\n{indent}center.fill_(epoch)\n")
    require_equal(alone(text), text, [*(dataclasses.replace(SINGLE, stop=stop) for stop in (2, 4)), TWO])
    require_equal(alone(text), over_first_epoch(text), [SINGLE, SINGLE])


CONSOLIDATED = (
    BEGIN
    + """
def train(run, epochs):
    global found
    model, found = layers(), {}
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    importance, memory = {}, []

    def loss(y, t):
        value = F.cross_entropy(y, t)
        for name, parameter in model.named_parameters():
            if name in importance:
                value = value + (importance[name] * parameter.square()).sum()
        return value + 0.1 * len(memory) * y.square().mean()

    for epoch in run.epochs(epochs):
        AT_EPOCH
        for batch in run.batches(data):
            run.backward(batch, loss)
            optimizer.step()
            optimizer.zero_grad()
        AFTER_EPOCH
    found["fingerprint"] = run.fingerprint()
    return found
"""
)
SQUARES = "{name: each.detach() ** 2 for name, each in model.named_parameters()}"


def test_what_the_start_of_an_epoch_computes_for_the_loss_is_not_computed_from_other_weights():
    """Fisher information, of which only the loss reads the variable: it was computed anew within the epoch."""
    text = CONSOLIDATED.replace("AT_EPOCH", f"importance = {SQUARES} if epoch else {{}}").replace("AFTER_EPOCH", "pass")
    ended = run_trial(text, [dataclasses.replace(SINGLE, stop=4), SINGLE], 60, WORLDS)
    assert ended.how == "refused", ended
    assert "The loss or the model reads train: importance['0.weight']" in ended.sentence
    require_equal(alone(text), over_first_epoch(text), [SINGLE, SINGLE])


@pytest.mark.parametrize(
    ("change", "name"), [(f"importance.update({SQUARES})", "importance"), ("memory.append(1)", "memory")]
)
@pytest.mark.parametrize("is_within", [True, False])
def test_a_dict_or_list_that_the_loss_reads_is_not_resumed_empty(change, name, is_within):
    """It was named in a warning, and the run went on with other bits."""
    text = CONSOLIDATED.replace("AT_EPOCH", "pass").replace("AFTER_EPOCH", change)
    phases = [dataclasses.replace(SINGLE, stop=4) if is_within else SINGLE, SINGLE]
    ended = run_trial(text if is_within else over_first_epoch(text), phases, 60, WORLDS)
    assert ended.how == "refused", ended
    assert f"The loss or the model reads train: {name}, which the loop changes" in ended.sentence


TRAINER = (
    BEGIN
    + """
class Trainer:
    def __init__(self, run):
        self.run, self.model = run, layers()
        self.model, self.optimizer = run.prepare(self.model, torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.smoothing, self.best, self.history, self.counts = 0.1, 0.0, [], torch.zeros(4)

    def loss(self, y, t):
        return F.cross_entropy(y, t, label_smoothing=self.smoothing)

    def train(self, epoch):
        for batch in self.run.batches(data):
            self.run.backward(batch, self.loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.best = max(self.best, 1.0 + epoch)
        self.history.append(epoch)
        self.counts[epoch] += 1


def train(run, epochs):
    global found
    found, trainer = {}, Trainer(run)
    for epoch in run.epochs(epochs):
        trainer.train(epoch)
    found["fingerprint"] = run.fingerprint()
    return found
"""
)


def test_what_an_object_keeps_beside_its_method_that_is_the_loss_does_not_stop_a_resume():
    """Its best score was refused as a number that the loss reads."""
    require_equal(alone(TRAINER), TRAINER, [dataclasses.replace(SINGLE, stop=4), TWO])
    require_equal(alone(TRAINER), over_first_epoch(TRAINER), [SINGLE, SINGLE])


@pytest.mark.parametrize("stop", [1, 4])
def test_a_number_that_the_script_computes_from_the_model_before_its_loop_is_named(stop):
    """The resumed run computes it from the weights of the checkpoint. It ended in other bits, without a word."""
    first = "    beta = float(model[0].weight.detach().abs().mean())\n    for epoch"
    text = weighted("beta").replace("    for epoch", first, 1)
    found = run_trial(text, [dataclasses.replace(SINGLE, stop=stop), SINGLE], 40)
    assert found.how == "ran" and any("train: beta (0." in each for each in found.warnings), found


SETTERS = """def walk(epoch):
        nonlocal beta
        for batch in run.batches(data):
            beta = 0.1 / (1 + run.position.step % 2)
            run.backward(batch, loss)
            optimizer.step()
            optimizer.zero_grad()

    def loss(y, t):
        kept["entropy"] = F.cross_entropy(y, t)
        return kept["entropy"] + beta * y.square().mean()

"""


def test_what_an_inner_function_or_the_loss_itself_sets_in_each_step_goes_on():
    """The first was refused where it was set to what it had been; the second is empty in a resumed run."""
    inner = "    kept = {}\n\n    " + SETTERS + "    def other(y, t):"
    text = WEIGHTED[: WEIGHTED.index("        AT_EPOCH")].replace("    def loss(y, t):", inner)
    text = text.replace("READ", "beta").replace("global found, weight", "global found")
    text += '        walk(epoch)\n    found["fingerprint"] = run.fingerprint()\n    return found\n'
    require_equal(alone(text), text, [*(dataclasses.replace(SINGLE, stop=stop) for stop in (3, 4)), TWO])
    require_equal(alone(text), over_first_epoch(text), [SINGLE, SINGLE])


CARRIED = (
    BEGIN
    + """

class Carried(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(16, 4))


def train(run, epochs):
    global found
    found = {}
    model, columns = nn.Linear(10, 4), TensorDataset(torch.arange(48) % 16, inputs.repeat(2, 1)[:48])
    model, optimizer, carried = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), Carried())
    for epoch in run.epochs(epochs):
        for batch in run.batches(columns, shuffle=False):
            if batch.plan.position == 0:
                carried.state.zero_()
            kept = {}

            def loss(output, _):
                kept["state"] = output.detach()
                return output.square().mean()

            def forward(data):
                return model(torch.cat([data[1], carried.state[data[0]]], 1))

            run.backward(batch, loss, forward=forward, whole_batch=True)
            optimizer.step()
            optimizer.zero_grad()
            carried.state.copy_(kept["state"])
    found["fingerprint"] = run.fingerprint()
    return found
"""
)


def test_a_state_that_is_carried_from_batch_to_batch_goes_on_on_several_processes_and_after_a_stop():
    """As in docs/moving.md. The state that each epoch begins with was said to be that of the start of the run."""
    reference, in_parts = alone(CARRIED), over_first_epoch(CARRIED)
    for text, phases in ((CARRIED, [dataclasses.replace(SINGLE, stop=4), TWO]), (in_parts, [SINGLE, SINGLE])):
        ended = run_trial(text, phases, 60, WORLDS)
        verdict = compare(reference, ended, phases[-1])
        assert verdict.what == "equal", (verdict.said, verdict.traceback)
        assert not any("at the start of the run" in each for each in ended.warnings)


MERGED = (
    BEGIN
    + """

class Merged(nn.Linear):
    # As loralib's Linear: the weights are merged in evaluation mode.

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, sizes[0])), nn.Parameter(torch.randn(sizes[1], 2))
        self.is_merged = False

    def train(self, mode=True):
        if self.is_merged == mode:
            self.weight.data += (self.b @ self.a) * (-1 if mode else 1)
            self.is_merged = not mode
        return super().train(mode)

    def forward(self, x):
        return super().forward(x) if self.is_merged else super().forward(x) + x @ self.a.T @ self.b.T


def train(run, epochs):
    global found
    found = {}
    torch.manual_seed(0)
    model = nn.Sequential(Merged(6, 8), nn.ReLU(), Merged(8, 4))
    model, optimizer = run.prepare(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    for epoch in run.epochs(epochs):
        for batch in run.batches(data):
            found["loss"] = run.backward(batch, F.cross_entropy).item()
            found["is trained"] = model[0].a.grad is not None
            optimizer.step()
            optimizer.zero_grad()
        found["test"] = run.evaluate(data, F.cross_entropy)
    found["fingerprint"] = run.fingerprint()
    return found
"""
)


def test_layers_that_merge_weights_in_evaluation_mode_are_trained_after_an_evaluation():
    """They stayed merged, and were trained no more; on two processes the run ended, since rank 0 alone had looked."""
    reference = alone(MERGED)
    assert all(each["is trained"] for each in reference.found)
    require_equal(reference, MERGED, [dataclasses.replace(SINGLE, stop=4), TWO])
