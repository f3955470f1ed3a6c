"""Changes that a loop makes to a data set, or to what that reads: a resumed run has not lost them in silence."""

from collections import Counter

import pytest
import torch
from tests.run.jobs import Left, begin, dataset, leave, train_step
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import lockstep
from lockstep.errors import ConfigError

LOOP = """
import collections

import numpy as np
import torch

{given}


class Data(Samples):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x * self.factor(i), y

    def factor(self, i):
        {factor}


def train(folder, stop=None):
    run, _, optimizer = begin(directory=folder, resume="auto")
    data = Data(*dataset().tensors)
    {made}
    for epoch in run.epochs(4):
        place = 20 + epoch  # none of the samples that are compared at a resume
        for batch in run.batches(data):
            train_step(run, batch, optimizer)
            {within}
            if (epoch, batch.plan.position) == stop:
                leave(run)
        {between}
        if (epoch, None) == stop:
            leave(run)
    weights = run.fingerprint()
    run.close()
    return weights
"""


def trainer(folder, factor, made="pass", between="pass", within="pass", given=""):
    """The function ``train``, in a file of its own, as a loop is known by its code."""
    text = LOOP.format(factor=factor, made=made, between=between, within=within, given=given)
    path = folder / "loop.py"
    path.write_text(text)
    space = {
        "__name__": "__main__",
        "begin": begin,
        "dataset": dataset,
        "train_step": train_step,
        "leave": leave,
        "Samples": TensorDataset,
    }
    exec(compile(text, path, "exec"), space)
    return space["train"]


IN, GET = "return 2.0 if i in {} else 1.0", "return {}.get(i, 1.0)"
RECORD = "class Record:\n    def __init__(self, place):\n        self.place = place"
OTHER = """
class Other(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data = data
    def __len__(self):
        return 53
    def __getitem__(self, i):
        x, y = self.data[i]
        return (x * 2.0 if i == 21 else x), y
"""
CHANGES = {
    "a set of pairs": (
        IN.replace("i in", "(i, 1) in").format("self.hard"),
        "data.hard = {(20, 1)}",
        "data.hard.discard((place, 1)); data.hard.add((place + 1, 1))",
    ),
    "a list of tensors": (
        "return 2.0 if any(int(each) == i for each in self.hard) else 1.0",
        "data.hard = []",
        "data.hard.append(torch.tensor(place))",
    ),
    "a list of functions": (
        "return 2.0 if any(each(i) for each in self.hard) else 1.0",
        "data.hard = []",
        "data.hard.append(lambda i: i == 21)",
    ),
    "a list of objects": (
        "return 2.0 if any(each.place == i for each in self.hard) else 1.0",
        "data.hard = []",
        "data.hard.append(Record(place))",
        "pass",
        RECORD,
    ),
    "a list of None": ("return self.hard[i] or 1.0", "data.hard = [None] * 53", "data.hard[place] = 2.0"),
    "a long list of tensors": (
        "return self.hard[i].sum()",
        "data.hard = [torch.ones(2) for _ in range(75)]",
        "data.hard[place] = torch.zeros(2)",
    ),
    "an array of objects": (
        "return self.hard[i] or 1.0",
        "data.hard = np.array([None] * 153, dtype=object)",
        "data.hard[place] = 2.0",
    ),
    "bytes": ("return 1.0 + self.hard[i]", "data.hard = bytearray(53)", "data.hard[place] = 1"),
    "numbers whose sum stays": (
        "return self.hard[i]",
        "data.hard = torch.arange(53)",
        "data.hard[[place, place + 1]] = data.hard[[place + 1, place]]",
    ),
    "a set that it wraps": ("return 1.0", "pass", "data = Other(data)", "pass", OTHER),
    "a global list": (IN.format("HARD"), "pass", "HARD.append(place)", "pass", "HARD = []"),
    "a global dict, by a helper": (
        GET.format("HARD"),
        "pass",
        "note(place)",
        "pass",
        "HARD = {}\ndef note(place):\n    HARD[place] = 2.0",
    ),
    "a global, within the steps": (IN.format("HARD"), "pass", "pass", "HARD.add(place)", "HARD = set()"),
    "what a helper reads": (
        "return factor(i)",
        "pass",
        "HARD.add(place)",
        "pass",
        "HARD = set()\ndef factor(i):\n    return 2.0 if i in HARD else 1.0",
    ),
    "a variable of a function": (
        "return self.find(i)",
        "hard = {}; data.find = lambda i: hard.get(i, 1.0)",
        "hard[place] = 2.0",
    ),
}


@pytest.mark.parametrize(
    "stop",
    [
        pytest.param((1, 0), id="within an epoch"),
        pytest.param((2, None), id="between two", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_loop_changes_where_a_data_set_reads_it_is_refused(name, stop, tmp_path):
    with pytest.raises(Left):
        trainer(tmp_path, *CHANGES[name])(tmp_path / "run", stop)
    with pytest.raises(ConfigError, match="The loop had changed"):
        trainer(tmp_path, *CHANGES[name])(tmp_path / "run")


TASK = """
class Task:
    def __init__(self):
        self.level = 1.0
    def find(self, i):
        return self.level if i == 21 else 1.0
"""
CHANGES |= {
    "a number of a configuration": (
        "return config.level if i == 21 else 1.0",
        "pass",
        "config.level *= 0.5",
        "pass",
        "from types import SimpleNamespace\nconfig = SimpleNamespace(level=1.0)",
    ),
    "a number of one of two objects that hold each other": (
        "return one.other.level if i == 21 else 1.0",
        "pass",
        "two.level *= 0.5",
        "pass",
        "from types import SimpleNamespace\none = SimpleNamespace(); two = SimpleNamespace(other=one, level=1.0)\n"
        "one.other = two",
    ),
    "an entry whose name has a colon": (
        "return self.levels['level: '] if i == 21 else 1.0",
        "data.levels = {'level: ': 1.0}",
        "data.levels['level: '] *= 0.5",
    ),
    "a number of the object of a method": (
        "return self.find(i)",
        "task = Task(); data.find = task.find",
        "task.level *= 0.5",
        "pass",
        TASK,
    ),
}


FILL = "if i not in {0}: {0}[i] = 2.0\n        return {0}[i]"
STORE = """
class Store:
    def __init__(self):
        self.held = {}
    def get(self, i):
        return self.held.setdefault(i, 2.0)
"""
CACHES = {
    "global": (FILL.format("CACHE"), "pass", "CACHE = {}"),
    "of a helper": (
        "return fetch(i)",
        "pass",
        "CACHE = {}\ndef fetch(i):\n    return CACHE.setdefault(i, 2.0)",
    ),
    "handed on": (
        "return fetch(CACHE, i)",
        "pass",
        "CACHE = {}\ndef fetch(cache, i):\n    return cache.setdefault(i, 2.0)",
    ),
    "of an object": ("return self.store.get(i)", "data.store = Store()", STORE),
    "of a function": ("return self.find(i)", "held = {}; data.find = lambda i: held.setdefault(i, 2.0)", ""),
    "a list": (
        "if self.held[i] is None: self.held[i] = torch.tensor(2.0)\n        return self.held[i]",
        "data.held = [None] * 530",
        "",
    ),
    "a count of reads": ("READS[i] += 1\n        return 1.0", "pass", "READS = collections.Counter()"),
}
QUICK_CACHES = ("global", "of an object", "a list")


@pytest.mark.parametrize(
    "between",
    [
        pytest.param("pass", id="within the steps"),
        pytest.param("[data[i] for i in range(5, 30)]", id="between epochs", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each not in QUICK_CACHES)) for each in CACHES]
)
def test_what_reading_fills_is_not_taken_for_a_change_of_the_loop(name, between, tmp_path, caplog):
    factor, made, given = CACHES[name]
    parts = tmp_path, factor, made, between, "pass", given
    whole = trainer(*parts)(tmp_path / "whole")
    for stop in ((1, 0), (2, None)):
        folder = tmp_path / f"{stop}"
        with pytest.raises(Left):
            trainer(*parts)(folder, stop)
        assert trainer(*parts)(folder) == whole
    assert "variables that are not what they were" not in caplog.text


class Counted(Dataset):
    """Counts what is read, as scripts do that report broken files, and hands a transform of its own on."""

    def __init__(self):
        self.samples, self.transform, self.drawn = dataset(), Twice(), 0
        self.broken, self.kinds, self.sizes, self.opened = 0, Counter(), [], None

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        self.opened = "file"
        self.broken += number % 7 == 0
        x, y = self.samples[number]
        self.note(x, y)
        return self.transform(x), y

    def note(self, x, y):
        self.kinds[int(y)] += 1
        self.sizes.append(len(x))

    def draw(self):
        self.drawn += 1


class Twice:
    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x * 2


class Joined:
    def __init__(self):
        self.rows = 0

    def __call__(self, items):
        self.rows += len(items)
        return default_collate(items)


def joined(items):
    global ROWS
    ROWS += len(items)
    return default_collate(items)


ROWS = 0
COUNTS = {
    "number": ("data.broken", "the attribute 'broken' of Counted"),
    "counter": ("data.kinds", "the attribute 'kinds' of Counted"),
    "list": ("len(data.sizes)", "the attribute 'sizes' of Counted"),
    "transform": ("data.transform.calls", "the attribute 'calls' of Twice"),
    "collate object": ("loader.collate_fn.rows", "the attribute 'rows' of Joined"),
    "collate function": ("ROWS", "the variable 'ROWS' of joined"),
    "set anew": ("data.opened", ""),
    "by the loop": ("data.draw(); data.drawn", ""),
}
REPORT = """
def report(collate):
    run, _, optimizer = begin()
    data = Counted()
    loader = DataLoader(data, batch_size=4, collate_fn=collate)
    for epoch in run.epochs(2):
        for batch in run.batches(loader):
            train_step(run, batch, optimizer)
        {report}
    run.close()
"""


@pytest.mark.parametrize("case", COUNTS)
def test_a_count_that_reading_samples_makes_and_the_loop_reads_is_told(case, caplog):
    """Each process printed that of its own samples, and of those that are read twice, without a word."""
    report, told = COUNTS[case]
    space = {**globals(), "__name__": __name__, "DataLoader": DataLoader}
    exec(compile(REPORT.format(report=report), __file__, "exec"), space)
    space["report"](joined if case == "collate function" else Joined())
    said = [each.getMessage() for each in caplog.records if "Reading samples changes" in each.getMessage()]
    assert [f"changes {told}, which" in each for each in said] == [True] * bool(told)


@pytest.mark.parametrize("seeds", [(0, 1, 2), (0, 0, 2)])
def test_samples_that_every_epoch_has_anew_are_not_told_in_a_resumed_run(seeds, tmp_path, caplog):
    """As those of a rollout or a replay buffer: each resumed run was told of a change of its data set."""
    for parts in (seeds[:2], seeds[2:]):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        run = lockstep.init(global_batch=8, micro_batches=2, directory=tmp_path, resume="auto")
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for seed in parts:
            inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
            (batch,) = run.batches(TensorDataset(inputs, inputs[:, :1]), shuffle=False)
            run.backward(batch, torch.nn.MSELoss())
            optimizer.step()
        run.save(wait=True)
        run.close()
    assert ("the epoch before the checkpoint had" in caplog.text) == (seeds[0] == seeds[1])
