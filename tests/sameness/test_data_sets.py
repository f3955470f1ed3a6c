"""Data sets that keep something from one read to the next are refused; sets that are read twice alike are not."""

import queue
import random
import threading
import time
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
)

from lockstep.core.world import World
from lockstep.data import Bucketed, SkipBroken, Weighted, adopt
from lockstep.data.reader import InlineReading, Request, SampleReader
from lockstep.data.rereading import content_of, restorer_of
from lockstep.errors import DataError
from lockstep.run import Run, RunOptions


class Rows(Dataset):
    def __init__(self):
        self.rows = [torch.full((4,), float(index)) for index in range(16)]
        self.reads, self.own = 0, np.random.default_rng(0)

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return self.rows[index], index % 2


class OwnGenerator(Rows):
    def __getitem__(self, index):
        return self.rows[index] + self.own.random(), index % 2


class SeldomDraws(Rows):
    """Flips a sample with a low probability, as augmentations with generators of their own do."""

    def __init__(self, is_seeded=False):
        super().__init__()
        self.transform, self.is_seeded = SimpleNamespace(flip=partial(self.flip, random.Random(1))), is_seeded

    def flip(self, own, x):
        if self.is_seeded:
            own.seed(int(torch.randint(2**31, ())))
        return -x if own.random() < 1e-4 else x

    def __getitem__(self, index):
        return self.transform.flip(self.rows[index]), index % 2


FLIP = random.Random(1)


class SeldomDrawsFromAGlobal(Rows):
    def __getitem__(self, index):
        return self.rows[index] * (-1 if FLIP.random() < 1e-4 else 1), index % 2


class InPlace(Rows):
    """Adds to the stored sample."""

    def __getitem__(self, index):
        x = self.rows[index]
        x += 1
        return x, index % 2


class Counting(Rows):
    def __getitem__(self, index):
        self.reads += 1
        return self.rows[index] * self.reads, index % 2


class WholeBatch(Counting):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Keyed(Rows):
    """Draws from the three global generators, counts, and keeps what it has prepared."""

    def __getitem__(self, index):
        self.reads += 1
        self.rows[index] = self.rows[index].clamp(max=8)
        return self.rows[index] + torch.rand(4) + np.random.rand() + random.random(), index % 2


class KeepsNoise(Rows):
    """Makes noise for a sample when it is first read, and keeps it."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.noise = draw, {}

    def __getitem__(self, index):
        if index not in self.noise:
            self.noise[index] = self.draw()
        return self.rows[index] + self.noise[index], index % 2


class Seeds(Rows):
    """Seeds the global generators by the number of the sample."""

    def __getitem__(self, index):
        np.random.seed(index)
        random.seed(index)
        torch.manual_seed(index)
        return self.rows[index] + torch.rand(4) + np.random.rand() + random.random(), index % 2


class KeepsNoiseOfItsNumber(KeepsNoise):
    """Seeds what it keeps by the number of the sample, and begins by drawing what it does not use."""

    begun = False

    def __getitem__(self, index):
        if not self.begun:
            self.begun = bool(np.random.rand(3).all())
        if index not in self.noise:
            np.random.seed(index)
            random.seed(index)
            torch.manual_seed(index)
            self.noise[index] = torch.rand(4) + np.random.rand() + random.random()
        return self.rows[index] + self.noise[index], index % 2


class Grows(IterableDataset):
    """A stream that keeps what it has given, in a list, and counts it."""

    def __init__(self):
        self.given = []

    def __len__(self):
        return 16

    def __iter__(self):
        for index in range(16):
            self.given.append(index)
            yield torch.full((4,), float(len(self.given))), index % 2


def train(data, *, workers=0, checks="first", world=None):
    torch.manual_seed(0)
    model, world = nn.Linear(4, 2), world or World()
    strategy = "single" if world.world_size == 1 else "ddp"
    options = RunOptions.of(global_batch=8, micro_batches=4, strategy=strategy, checks=checks)
    run = Run(options, world)
    try:
        _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for batch in run.batches(data, workers=workers):
            run.backward(batch, F.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        return run.fingerprint()
    finally:
        run.close()


@pytest.mark.parametrize("kind", [OwnGenerator, InPlace, Counting, WholeBatch])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_set_that_changes_is_refused_by_name(kind, workers):
    with pytest.raises(DataError, match=rf"{kind.__name__}\[\d+.*\] gave other values when it was read again"):
        train(kind(), workers=workers)


@pytest.mark.parametrize(
    ("kind", "workers", "named"),
    [
        (SeldomDraws, 0, "SeldomDraws.transform.flip"),
        (SeldomDraws, 1, "SeldomDraws.transform.flip"),
        (SeldomDrawsFromAGlobal, 0, "FLIP"),
    ],
)
def test_a_generator_that_seldom_changes_a_sample_is_refused_by_name(kind, workers, named):
    """The samples that were compared were equal, and later ones differed with the number of processes."""
    with pytest.raises(DataError, match=rf"draws random numbers from {named}.*, a generator of its own"):
        train(kind(), workers=workers)


def test_a_generator_that_is_seeded_for_each_sample_is_fine():
    data = SeldomDraws(is_seeded=True)
    assert train(data) == train(data, workers=1)


def refused(world):
    """The message of a rank on a stream that counts where nobody looks."""
    with pytest.raises(DataError) as found:
        train(Grows(), world=world)
    return str(found.value)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stream_that_counts_is_refused_on_any_number_of_processes(world_size):
    """Ranks that count alike give equal samples, which a resumed run would not."""
    for said in run_ranks(refused, world_size):
        assert "Stream[0, 1, 2, 3 and 12 more] gave other values when it was read again" in said


def test_a_collate_function_is_given_the_samples_of_such_a_set_too():
    data = DataLoader(
        InPlace(),
        batch_size=2,
        collate_fn=lambda samples: tuple(map(torch.tensor, zip(*[(x.tolist(), y) for x, y in samples]))),
    )
    with pytest.raises(DataError, match=r"InPlace\[\d+\] gave other values"):
        train(data)


@pytest.mark.parametrize(
    "around",
    [
        lambda data: DataLoader(data, batch_size=2, sampler=WeightedRandomSampler([1.0] * 16, 16)),
        lambda data: DataLoader(data, batch_size=2, sampler=RandomSampler(data, replacement=True)),
        lambda data: Bucketed(Subset(data, range(8)), [1] * 8, 2),
        lambda data: SkipBroken(Weighted(data, [1.0] * 16)),
        lambda data: (data, Rows()),
    ],
)
def test_a_set_that_changes_is_refused_in_others_too(around):
    with pytest.raises(DataError, match=r"OwnGenerator\[\d+\] gave other values when it was read again"):
        train(around(OwnGenerator()))


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    "make",
    [Pair, lambda x, y: SimpleNamespace(parts=[Pair(x, y)]), lambda x, y: (x.to_sparse(), y)],
    ids=["dataclass", "object", "sparse"],
)
def test_what_objects_of_a_batch_hold_is_compared_too(make):
    """Nothing of them was, so that ranks trained on other values, in silence."""

    def collate(samples):
        return make(*default_collate(samples))

    for data in (OwnGenerator(), Keyed()):
        loader = DataLoader(data, batch_size=2, collate_fn=collate)
        keys = SampleReader(data, seed=0, collate=collate, checks=True)
        if isinstance(data, OwnGenerator):
            with pytest.raises(DataError, match="gave other values when it was read again"):
                keys.read(0, np.arange(4))
        else:
            keys.read(0, np.arange(4))
            (first,) = InlineReading(adopted(loader)).read(iter([Request(0, np.arange(4))]))
            assert content_of(first) == content_of(keys.read(0, np.arange(4))) != []


def adopted(loader):
    source = adopt(loader)
    return SampleReader(source.dataset, seed=0, collate=source.collate)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_function_that_draws_from_a_generator_of_its_own_is_refused(workers):
    own = np.random.default_rng(0)

    def mix(samples):
        x, y = default_collate(samples)
        return x + x[torch.from_numpy(own.permutation(len(x)))], y

    with pytest.raises(DataError, match=r"Rows\[\d+, \d+\] gave other values .* or its collate function"):
        train(DataLoader(Rows(), batch_size=2, shuffle=True, collate_fn=mix), workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_function_that_fills_one_buffer_again_and_again_is_refused(workers):
    buffer, labels = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)

    def fill(samples):
        for row, (x, y) in enumerate(samples):
            buffer[row], labels[row] = x, y
        return buffer[: len(samples)], labels[: len(samples)]

    with pytest.raises(DataError, match=r"Rows\[\d+\] changed when other samples were read"):
        train(DataLoader(Rows(), batch_size=2, collate_fn=fill), workers=workers)
    x, y = torch.rand(16, 4), torch.arange(16) % 2  # views of what stays as it is are fine
    train(DataLoader(list(zip(x, y)), batch_size=2, collate_fn=lambda s: (x[: len(s)], y[: len(s)])))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(()),
        lambda: float(np.random.normal(size=2_000).sum()),
        lambda: random.choice((-1, 1)),
    ],
)
def test_a_set_that_keeps_what_it_drew_is_refused(draw):
    """It gives the same values again; which ones depends on the epoch in which a process reads the sample first."""
    with pytest.raises(DataError, match=r"KeepsNoise\[\d+\] drew other random numbers when it was read again"):
        train(KeepsNoise(draw))
    with pytest.raises(DataError, match="drew other random numbers"):
        train(KeepsNoise(draw), workers=1)


def test_a_set_that_keeps_what_it_drew_is_refused_though_half_of_a_micro_batch_was_read_before():
    """By another check, or by the script. The other half alone may be what begins something."""
    data = KeepsNoise(lambda: torch.rand(()))
    data[0]
    with pytest.raises(DataError, match="drew other random numbers"):
        SampleReader(data, seed=0, checks=True).read(0, np.array([0, 1]))


def test_what_is_kept_may_have_been_drawn_by_the_number_of_the_sample():
    assert train(KeepsNoiseOfItsNumber(None)) == train(KeepsNoiseOfItsNumber(None), workers=1)


class Numbers(Rows):
    """Numbers words in the order in which it meets them."""

    def __init__(self):
        super().__init__()
        self.vocabulary = {}

    def __getitem__(self, index):
        number = self.vocabulary.setdefault(f"word {index * 7 % 5}", len(self.vocabulary))
        return self.rows[index] + number, index % 2


class FirstDecides(Rows):
    """Makes something once, of the first sample that it reads or of random numbers drawn for it."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def __getitem__(self, index):
        if not hasattr(self, "made"):
            self.made = self.make(self.rows[index])
        return self.rows[index] + self.made, index % 2


CLASSES = {}


def numbering(samples):
    numbers = [CLASSES.setdefault(float(x[0]) % 3, len(CLASSES)) for x, _ in samples]
    return torch.stack([x for x, _ in samples]), torch.tensor(numbers) % 2


@pytest.mark.parametrize(
    "make",
    [
        Numbers,
        lambda: FirstDecides(torch.mean),
        lambda: FirstDecides(torch.rand_like),
        lambda: FirstDecides(lambda row: np.random.permutation(16)[0]),
        lambda: DataLoader(Rows(), batch_size=2, collate_fn=numbering),
    ],
    ids=["numbers of words", "a value of a sample", "drawn", "an order", "numbers of classes"],
)
def test_a_set_that_makes_something_of_the_first_samples_is_refused(make):
    """It ended in other bits on each number of processes and workers."""
    CLASSES.clear()
    for options in ({}, {"workers": 1}):
        with pytest.raises(DataError, match=r"\w+\[[\d, ]+\] gave other values when it was read before others"):
            train(make(), **options)


def ending_with(world, make):
    """How training ends on a rank, which has first samples of its own."""
    try:
        return train(make(), world=world)
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("make", [Numbers, partial(FirstDecides, torch.mean)], ids=["numbers", "a value"])
def test_several_ranks_refuse_such_a_set_too(make):
    """All of them read some samples to compare, and went on with what these had made."""
    for said in run_ranks(ending_with, 2, make, timeout=60):
        assert "gave other values when it was read before others" in said


class OpensLater(Rows):
    """Opens its file at the first read, and counts its reads."""

    def __init__(self, path):
        super().__init__()
        self.path, self.file, self.cache = path, None, {}

    def __getitem__(self, index):
        self.reads += 1
        if self.file is None:
            self.file = np.memmap(self.path, np.uint8, "r")
        self.cache.setdefault(index, int(self.file[index]))
        return self.rows[index] + self.cache[index], index % 2


def test_a_file_that_is_opened_at_the_first_read_and_a_cache_are_fine(tmp_path):
    (path := tmp_path / "file").write_bytes(bytes(range(16)))
    data = OpensLater(path)
    assert train(data) == train(OpensLater(path), workers=1)
    assert data.reads > 16 and len(data.cache) == 16


class SkipsTheSeek(Rows):
    """Reads on where its file, which was open from the start, already stands."""

    def __init__(self, path):
        super().__init__()
        self.file, self.at = path.open("rb"), 0

    def __getitem__(self, index):
        if index != self.at:
            self.file.seek(index)
        self.at = index + 1
        return torch.tensor(self.file.read(1)[0])


@pytest.mark.parametrize("first", range(16))
def test_a_position_that_a_set_keeps_of_its_file_stays_that_of_the_file(tmp_path, first):
    """Reading in another order put the number back and not the file, and later samples were others."""
    (path := tmp_path / "file").write_bytes(bytes(range(16)))
    data = SkipsTheSeek(path)
    reader, rows = SampleReader(data, seed=0, checks=True), [*range(first, 16), *range(first)]
    with data.file:
        assert [int(reader.read(0, np.array([index]))) for index in rows] == rows


class AsksAThread(Rows):
    """Has a thread of its own that waits for the numbers of samples."""

    def __init__(self):
        super().__init__()
        self.asked, self.given = queue.Queue(), queue.Queue()
        threading.Thread(target=self.answer, daemon=True).start()

    def answer(self):
        while (index := self.asked.get()) is not None:
            self.given.put(self.rows[index])

    def __getitem__(self, index):
        self.asked.put(index)
        return self.given.get(timeout=20), index % 2


def test_the_queues_of_a_thread_stay_as_they_are():
    """Those who wait for one were put back to whom it had known before, and waited for ever."""
    data = AsksAThread()
    assert train(data) == train(Rows())
    data.asked.put(None)


def test_what_a_set_keeps_is_put_back_unless_it_is_large():
    small, large = {}, dict.fromkeys(range(20_000))
    put_back = restorer_of({"small": small, "large": large})
    small["new"] = large["new"] = 1
    put_back()
    assert "new" not in small and "new" in large


def test_keyed_draws_and_prepared_samples_are_fine():
    assert train(Keyed()) == train(Keyed(), workers=1) == train(Keyed(), checks="off")


def test_a_set_that_seeds_by_the_number_of_the_sample_costs_no_search_for_how_far_it_has_drawn():
    """The two first steps took a second each."""
    train(Keyed())
    begin = time.process_time()
    train(Seeds())
    assert time.process_time() - begin < 0.4


def test_off_reads_once():
    data = Keyed()
    train(data, checks="off")
    assert data.reads == 16
