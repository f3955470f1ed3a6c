"""A data set that the loop changes between epochs is read as it is now, by any number of workers."""

import multiprocessing
import os
import re
import sys
from array import array
from collections import UserList, deque
from ctypes import c_int
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from tests.data import levels
from tests.run.jobs import begin, correct, dataset, train_step
from torch.utils.data import (
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from lockstep.data.changes import Notes

X, Y = dataset(48).tensors
EPOCHS = 3


class Curriculum(Dataset):
    """Its length, the scale of its samples and a transform are the loop's to change."""

    def __init__(self, samples=30, scale=1.0, transform=torch.Tensor.clone):
        self.samples, self.scale, self.transform = samples, scale, transform

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return self.transform(X[index] * self.scale), Y[index]


class Kept(Dataset):
    """Keeps its labels where no note is taken of every one."""

    def __init__(self, labels):
        self.labels = labels

    def __len__(self):
        return 48

    def __getitem__(self, index):
        label = self.labels[str(index) if isinstance(self.labels, dict) else index]
        return X[index], int(label[0] if isinstance(label, list | np.ndarray) else label) % 2


class Table:
    """Answers like an extension type, whose contents are unknown."""

    __slots__ = ("rows",)

    def __init__(self):
        self.rows = [0] * 48

    def __getitem__(self, index):
        return self.rows[index]

    def __setitem__(self, index, value):
        self.rows[index] = value


LEVEL, SETTINGS = 0, SimpleNamespace(level=0)


def leveled(x):
    return x * (1 + LEVEL) + SETTINGS.level


def raised(data, epoch):
    global LEVEL
    LEVEL = SETTINGS.level = epoch


def closed_over():
    level = [0]
    data = Curriculum(transform=lambda x: x + level[0])
    data.set_level = lambda epoch: level.__setitem__(0, epoch)
    return data


class Settings:
    level = 0


class Slotted:
    __slots__ = ("level",)

    def __init__(self):
        self.level = 0


def around(make, read, put):
    """A data set whose transform reads an object of the function around it."""

    def made():
        held = make()
        data = Curriculum(transform=lambda x: x * (1 + read(held)))
        data.set_level = lambda epoch: put(held, epoch)
        return data

    return made


def of_attribute(make):
    return around(make, lambda held: held.level, lambda held, epoch: setattr(held, "level", epoch))


def of_entry(make):
    return around(make, lambda held: held[0], lambda held, epoch: held.__setitem__(0, epoch))


LEVELS = {
    "an object": of_attribute(Settings),
    "an object with slots": of_attribute(Slotted),
    "a class": of_attribute(lambda: Settings),
    "a deque": of_entry(lambda: deque([0])),
    "a UserList": of_entry(lambda: UserList([0])),
    "an array": of_entry(lambda: array("d", [0])),
    "a bytearray": of_entry(lambda: bytearray(1)),
    "a set": around(set, len, lambda held, epoch: held.add(epoch)),
    "a shared value": around(
        lambda: multiprocessing.Value("i", 0),
        lambda held: held.value,
        lambda held, epoch: setattr(held, "value", epoch),
    ),
}
QUICK_LEVELS = ("a shared value",)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each not in QUICK_LEVELS)) for each in LEVELS]
)
def test_workers_read_the_level_that_an_object_around_a_transform_has(name):
    """They had the one with which they had been started, so that the bits depended on the number of workers."""

    def losses(workers):
        Settings.level = 0
        return trained(LEVELS[name], lambda data, epoch: data.set_level(epoch), anew=False, workers=workers)

    assert losses(1) == losses(0)


def flipped(data, epoch):
    for index, each in enumerate(data.labels):
        data.labels[each if isinstance(each, str) else index] = (index + epoch) % 2


def flipped_within(data, epoch):
    for index, each in enumerate(data.labels):
        each[0] = (index + epoch) % 2


QUICK_UNSEEN = ("lists",)
UNSEEN = {
    "a large array": (lambda: Kept(np.zeros((48, 1 << 18), np.uint8)), flipped_within),
    "a dict": (lambda: Kept({str(index): 0 for index in range(100)}), flipped),
    "lists": (lambda: Kept([[0] for _ in range(100)]), flipped_within),
    "arrays": (lambda: Kept([np.zeros(1) for _ in range(100)]), flipped_within),
    "another type": (lambda: Kept(Table()), lambda data, epoch: data.labels.__setitem__(3, epoch)),
    "a variable of the module": (lambda: Curriculum(transform=leveled), raised),
    "a variable around": (closed_over, lambda data, epoch: data.set_level(epoch)),
}


def longer(data, epoch):
    data.samples = 18 + 10 * epoch


def shorter(data, epoch):
    data.samples = 48 - 10 * epoch


def steeper(data, epoch):
    data.scale = 1.0 + epoch


def transformed(data, epoch):
    data.transform = (torch.sin, torch.cos, torch.tanh)[epoch]


def chosen(data, epoch):
    data.indices = list(range(epoch, 30 + 5 * epoch))


def exchanged(data, epoch):
    data.indices[:] = list(range(epoch, 30 + epoch))


def replaced(data, epoch):
    data.tensors = (X[: 40 - epoch] * (1 + epoch), Y[: 40 - epoch])


def weighed(loader, epoch):
    loader.sampler.weights = torch.arange(48.0) ** epoch


CASES = {
    "longer": (Curriculum, longer),
    "shorter": (Curriculum, shorter),
    "scale": (Curriculum, steeper),
    "transform": (Curriculum, transformed),
    "indices": (lambda: Subset(TensorDataset(X, Y), list(range(30))), chosen),
    "indices in place": (lambda: Subset(Curriculum(48), list(range(30))), exchanged),
    "tensors": (lambda: TensorDataset(X, Y), replaced),
    "weights": (
        lambda: DataLoader(TensorDataset(X, Y), 24, sampler=WeightedRandomSampler([1.0] * 48, 48)),
        weighed,
    ),
}


def trained(make, change, *, anew, workers=0):
    """Losses and accuracies of a few epochs, each over a set that is changed before, or made anew as it should be."""
    run, _, optimizer = begin()
    data, found = make(), []
    for epoch in run.epochs(EPOCHS):
        data = make() if anew else data
        change(data, epoch)
        found += [float(train_step(run, batch, optimizer)) for batch in run.batches(data, workers=workers)]
        found.append(run.evaluate(data, correct, workers=workers))
    run.close()
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_changed_data_set_is_read_as_one_that_was_made_so(name):
    make, change = CASES[name]
    assert trained(make, change, anew=False) == trained(make, change, anew=True)


@pytest.mark.parametrize(
    "name", ["scale", *(pytest.param(each, marks=pytest.mark.slow) for each in ("longer", "transform"))]
)
def test_workers_read_what_the_loop_has_changed(name):
    make, change = CASES[name]
    assert trained(make, change, anew=False, workers=1) == trained(make, change, anew=True)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each not in QUICK_UNSEEN)) for each in UNSEEN]
)
def test_workers_read_what_the_loop_has_changed_where_it_is_hard_to_see(name):
    make, change = UNSEEN[name]
    found = trained(make, change, anew=False, workers=2 if name == "lists" else 1)
    assert found == trained(make, change, anew=False) != trained(make, lambda *_: None, anew=False)


class Surroundings(Curriculum):
    """Its samples are of what a process has beside the set."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def __getitem__(self, index):
        return X[index] * (1 + self.read() % 7), Y[index]


def imported_level():
    from tests.data import levels

    return levels.level


def imported_level_alone():
    from tests.data.levels import level

    return level


def set_imported_level(data, epoch):
    levels.level = epoch


SURROUNDINGS = {
    "the environment": (lambda: int(os.environ.get("LEVEL", 0)), lambda _, epoch: os.environ.update(LEVEL=str(epoch))),
    "the folder": (lambda: len(str(Path.cwd())), lambda _, epoch: os.chdir("/" if epoch else "/dev")),
    "the default type": (
        lambda: torch.get_default_dtype().itemsize,
        lambda _, epoch: torch.set_default_dtype(torch.float64 if epoch else torch.float32),
    ),
    "a module that is imported where it is read": (imported_level, set_imported_level),
    "a variable that is imported where it is read": (imported_level_alone, set_imported_level),
}
QUICK_SURROUNDINGS = ("the environment", "a module that is imported where it is read")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each not in QUICK_SURROUNDINGS)) for each in SURROUNDINGS]
)
def test_workers_read_by_what_the_loop_has_changed_beside_the_set(name, monkeypatch):
    """They read by the environment variables with which they had been forked."""
    read, change = SURROUNDINGS[name]

    def losses(read, workers=0):
        monkeypatch.chdir("/dev")
        levels.level = 0
        torch.set_default_dtype(torch.float32)
        return trained(lambda: Surroundings(read), change, anew=False, workers=workers)

    found = losses(read, workers=1)
    assert found == losses(read) != losses(lambda: 0)


@pytest.mark.parametrize("kind", ["tensor", "value"])
@pytest.mark.parametrize(("workers", "within", "said"), [(1, True, 1), (1, False, 0), (0, True, 0)])
def test_memory_shared_with_workers_that_changes_within_an_epoch_is_told(kind, workers, within, said, caplog):
    """Workers read ahead, so that the bits of two equal runs differed."""
    run, _, optimizer = begin()
    data = Curriculum()
    data.scale = torch.ones(1).share_memory_() if kind == "tensor" else multiprocessing.Value("i", 1)
    data.transform = lambda x: x

    def change():
        if kind == "tensor":
            data.scale += 1
        else:
            data.scale.value += 1

    data.__class__ = type("Shared", (Curriculum,), {"__getitem__": lambda self, index: (X[index], Y[index])})
    for _ in run.epochs(2):
        change()
        for batch in run.batches(data, workers=workers):
            train_step(run, batch, optimizer)
            if within:
                change()
    run.close()
    told = [each for each in caplog.records if "has changed within the epoch" in each.getMessage()]
    assert len(told) == said


class Collating(torch.nn.Linear):
    """A model with a function that joins samples and reads no weight."""

    def collate(self, samples):
        return default_collate(samples)


class Weighing:
    def __init__(self, model):
        self.model = model

    @torch.no_grad()
    def __call__(self, x):
        return x * self.model(x).abs().sum()


def of_model(model):
    return lambda x: x * model.weight.detach().sum()


TOLD = {
    "a scale": (lambda model: Curriculum(30), "has changed .*data.scale"),
    "a model around": (lambda model: Curriculum(30, transform=of_model(model)), "holds or reads parameters"),
    "a model held": (lambda model: Curriculum(30, transform=Weighing(model)), "holds or reads parameters"),
    "its own collate function": (lambda model: DataLoader(Curriculum(30), 4, collate_fn=model.collate), ""),
    "another model": (lambda model: Curriculum(30, transform=of_model(torch.nn.Linear(6, 3))), ""),
    "a module imported there": (
        lambda model: Curriculum(30, transform=by_module),
        "has changed levels_of_a_test.level",
    ),
    "a name imported there": (lambda model: Curriculum(30, transform=by_name), "has changed levels_of_a_test.level"),
    "another name of it": (lambda model: Curriculum(30, transform=by_other_name), ""),
    "the worker": (lambda model: Curriculum(30, transform=by_worker), r"get_worker_info\(\) .* \(sample 0\)"),
    "the worker's seed": (lambda model: Curriculum(30, transform=by_worker_s_seed), ""),
    "the worker, for a file": (lambda model: Curriculum(30, transform=opening_by_worker), ""),
}


def by_module(x):
    import levels_of_a_test as levels

    return x * levels.level


def by_name(x):
    from levels_of_a_test import level

    return x * level


def by_other_name(x):
    from levels_of_a_test import other

    return x * other


def by_worker(x):
    return x if get_worker_info() is None else 2 * x


def by_worker_s_seed(x):
    worker = get_worker_info()
    return x + np.random.default_rng(torch.initial_seed() if worker is None else worker.seed).random()


def opening_by_worker(x):
    return x.clone() if get_worker_info() is None else x * 1


@pytest.mark.parametrize("workers", [1, 0])
@pytest.mark.parametrize("name", TOLD)
def test_what_changes_within_an_epoch_and_workers_cannot_know_is_told(name, workers, caplog, monkeypatch):
    """The bits depended on the number of workers, without a word."""
    make, said = TOLD[name]
    imported = ModuleType("levels_of_a_test")
    imported.level = imported.other = 1.0
    monkeypatch.setitem(sys.modules, "levels_of_a_test", imported)
    run, model, optimizer = begin(model=Collating(6, 3))
    data = make(model)
    for _ in run.epochs(2):
        for batch in run.batches(data, workers=workers):
            train_step(run, batch, optimizer)
            if name == "a scale":
                data.scale *= 0.5
            imported.level *= 0.5
    run.close()
    messages = [each.getMessage() for each in caplog.records]
    told = [each for each in messages if "samples that" in each or "get_worker_info" in each]
    assert len(told) == bool(said and workers)
    assert re.search(said, "".join(told)) or not workers


def test_a_set_that_is_changed_and_evaluated_within_an_epoch_is_trained_to_the_end_of_it():
    """The workers of the epoch were closed, and the next step raised torch's "This iteration has ended"."""
    run, _, optimizer = begin()
    data, steps = Curriculum(), 0
    for batch in run.batches(data, workers=1):
        train_step(run, batch, optimizer)
        data.scale, steps = data.scale + 1, steps + 1
        run.evaluate(data, correct, workers=1)
    run.close()
    assert steps == 2


class Recorded(Curriculum):
    """Changes whenever it is read."""

    def __init__(self):
        super().__init__(4)
        self.reads = []

    def __getitem__(self, index):
        self.reads.append(index)
        return super().__getitem__(index)


def test_a_set_that_notes_its_reads_is_compared_with_itself_once():
    run, *_ = begin(global_batch=4, micro_batches=1)
    data, reads = Recorded(), []
    for _ in run.epochs(EPOCHS):
        data.reads.clear()
        list(run.batches(data))
        reads.append(len(data.reads))
    run.close()
    assert reads[1:] == [4, 4] and reads[0] > 4


def test_workers_stay_where_nothing_has_changed():
    run, *_ = begin()
    data, seen = Curriculum(), set()
    for _ in run.epochs(EPOCHS):
        list(run.batches(data, workers=1))
        (loader,) = run._loaders._by_id[id(data)].training.values()
        seen.add(loader._reading._loader._iterator._workers[0].pid)
    run.close()
    assert len(seen) == 1
    loader = DataLoader(Subset(data, range(20)), 4, shuffle=True, generator=torch.Generator())
    assert Notes(loader).are_whole and Notes([data, {"a": (1, "b")}]).are_whole
    for unknown in (object(), np.zeros(1 << 21, np.uint8), [object()] * 65, {(1, 2)}):
        assert not Notes([data, unknown]).are_whole


def test_notes_are_equal_until_something_changes():
    data = Curriculum()
    data.table, data.nested = {"a": [1, 2.5, None]}, [TensorDataset(X, Y)]
    data.many = list(range(5_000))
    before = Notes(data)
    assert before == Notes(data)
    data.table["a"][1] = 3.5
    after = Notes(data)
    assert after != before
    data.many[4_000] = -1
    assert Notes(data) != after
    after = Notes(data)
    data.nested[0].tensors = (X, Y.clone())
    assert Notes(data) != after


@pytest.mark.parametrize("make", [lambda: multiprocessing.Value("d", 1.0), Settings])
def test_a_level_that_each_epoch_sets_in_place_is_no_other_data_set_after_a_stop(make, tmp_path):
    """The digests of its samples were those of the first epoch, so that the right ones were refused."""

    def losses(stop=None):
        run, _, optimizer = begin(directory=tmp_path, resume="auto")
        data, level, found = Curriculum(48), make(), []
        data.transform = lambda x: x * level.value
        level.value = 1.0
        for epoch in run.epochs(EPOCHS):
            level.value = 0.5**epoch
            for batch in run.batches(data):
                found.append(float(train_step(run, batch, optimizer)))
                if run.position.step + 1 == stop:
                    run.save(wait=True)
                    run.close()
                    return found
        run.close()
        return found

    whole = losses()
    assert losses(stop=3) + losses() == whole


class Bag(list):
    pass


def settings():
    made = ModuleType("settings_of_a_test")
    made.level = 0
    return made


def put_level(held):
    held.level = 1


def put_value(held):
    held.value = 1


def function_of(held):
    return eval("lambda x: x * held.level", {"held": held, "__name__": __name__})


def memory():
    return torch.from_numpy(np.zeros(3))


# Each was changed unseen: the loaders were not made anew, and workers read the copy that they were forked with.
SEEN = {
    "a class": (lambda: type("Level", (), {"level": 0, "__module__": __name__}), put_level, None),
    "an attribute of a list": (Bag, put_level, None),
    "an attribute of a function": (lambda: lambda x: x, put_level, None),
    "an attribute of a partial": (lambda: partial(print), put_level, None),
    "a slot": (Slotted, put_level, None),
    "a keyword": (dict, lambda held: held.update(a=1), lambda held: lambda x, *, table=held: table),
    "a module": (settings, put_level, function_of),
    "a method of a dict": (dict, lambda held: held.update(a=1), lambda held: held.get),
    "a partial around": (
        dict,
        lambda held: held.update(a=1),
        lambda held: (lambda part: lambda: part)(partial(max, held)),
    ),
    "a number of C": (lambda: c_int(0), put_value, None),
    "memory of an array": (memory, lambda held: held.numpy().__setitem__(0, 1.0), None),
}


@pytest.mark.parametrize("name", SEEN)
def test_notes_see_what_other_looks_see(name):
    make, change, around = SEEN[name]
    held, data = make(), Curriculum()
    data.transform = around(held) if around else held
    before = Notes(data)
    assert before == Notes(data) and before.are_whole
    change(held)
    assert before != Notes(data)
