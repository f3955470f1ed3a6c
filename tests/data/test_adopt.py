import dataclasses
import random
import re
import time
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lockstep.core.plan import BatchShape, SamplePlan, Share
from lockstep.data import (
    Digits,
    ImageArrays,
    Normalize,
    SampleKeys,
    SkipBroken,
    StepLoader,
    Stream,
    Weighted,
    adopt,
    check_batch_size,
)
from lockstep.data.reader import SampleReader
from lockstep.errors import ConfigError, DataError

DATA = TensorDataset(torch.arange(40), torch.arange(40))


def collate(samples):
    return samples


class Lines(IterableDataset):
    """A stream without a length."""

    epochs = ()

    def __iter__(self):
        return iter([(torch.tensor(number), torch.rand(2)) for number in range(12)][:3])


class Curriculum(Sampler):
    def __iter__(self):
        return iter(range(40))

    def __len__(self):
        return 40


def test_a_data_set_is_taken_as_it_is():
    source = adopt(DATA)
    assert source.dataset is DATA
    assert (source.shuffle, source.workers, source.drop_last, source.notes) == (None, None, None, ())
    assert adopt(source) is source


def test_a_loaders_settings_are_taken_over():
    loader = DataLoader(DATA, batch_size=8, shuffle=True, num_workers=2, drop_last=True, collate_fn=collate, timeout=9)
    source = adopt(loader)
    assert source.dataset is DATA and source.collate is collate
    assert (source.workers, source.shuffle, source.drop_last, source.timeout) == (2, True, True, 9)
    assert (source.batch_size, source.pin_memory) == (8, False)


@pytest.mark.parametrize(
    ("sampler", "shuffle"), [(SequentialSampler(DATA), False), (RandomSampler(DATA), True), (None, False)]
)
def test_the_order_follows_the_sampler(sampler, shuffle):
    source = adopt(DataLoader(DATA, batch_size=4, sampler=sampler))
    assert source.shuffle is shuffle and source.collate is None and source.timeout is None


def test_a_distributed_sampler_is_replaced_and_its_seed_said():
    sampler = DistributedSampler(DATA, num_replicas=4, rank=1, shuffle=True, seed=11, drop_last=True)
    source = adopt(DataLoader(DATA, batch_size=4, sampler=sampler))
    assert source.shuffle is True and source.drop_last is True and source.dataset is DATA
    (note,) = source.notes
    assert "seed=11" in note and "set_epoch is not needed" in note
    assert "The last batch of an epoch is left out where it is not full" in note
    assert "take run.steps_per_epoch(loader)" in note
    alone = DistributedSampler(DATA, num_replicas=1, rank=0)
    assert "len()" not in adopt(DataLoader(DATA, sampler=alone)).notes[0]
    still = DistributedSampler(DATA, num_replicas=2, rank=0, shuffle=False)
    assert adopt(DataLoader(DATA, sampler=still)).shuffle is False


def test_a_sampler_of_a_part_becomes_a_subset():
    source = adopt(DataLoader(DATA, batch_size=4, sampler=SubsetRandomSampler([7, 3, 5])))
    assert isinstance(source.dataset, Subset) and list(source.dataset.indices) == [7, 3, 5]
    assert source.shuffle is True


@pytest.mark.parametrize(
    "kind", [SequentialSampler, RandomSampler, partial(DistributedSampler, num_replicas=2, rank=0)]
)
def test_a_sampler_of_fewer_samples_than_there_are_narrows_the_data_set(kind):
    """A loader with ``RandomSampler(range(10))`` was read in all of its forty samples."""
    source = adopt(DataLoader(DATA, batch_size=4, sampler=kind(range(10))))
    assert [int(source.dataset[number][0]) for number in range(len(source.dataset))] == list(range(10))
    assert source.shuffle == (kind is not SequentialSampler)
    heavy = adopt(DataLoader(DATA, sampler=RandomSampler(range(10), replacement=True, num_samples=50))).dataset
    assert heavy.samples == 50 and len(heavy.dataset) == 10


def test_samplers_that_draw_with_replacement_become_weights():
    loader = DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True, num_samples=9), collate_fn=collate)
    source = adopt(loader)
    assert isinstance(source.dataset, Weighted) and len(source.dataset) == 9
    assert source.dataset.collate is collate and source.collate is None
    heavy = adopt(DataLoader(DATA, sampler=WeightedRandomSampler([0.0] * 39 + [1.0], 7))).dataset
    assert heavy.sample_at(0, 0, np.arange(7)).tolist() == [39] * 7


class Numbers(IterableDataset):
    """A stream that shuffles by its epoch, and draws for each sample."""

    def __init__(self):
        self.begun, self.epoch = [], 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 20

    def __iter__(self):
        self.begun.append(self.epoch)
        return ((torch.tensor(number + 100 * self.epoch), torch.rand(())) for number in range(20))


def read(stream, share, epoch, first=0):
    """The samples that a holder reads of the steps of an epoch."""
    plan = SamplePlan(samples=20, shape=BatchShape(global_batch=6, micro_batches=3), shuffle=False)
    steps = StepLoader(stream, plan, share=share).batches(epoch, first)
    parts = [part for batch in steps for part in batch.micro_batches]
    return {
        int(index): (int(number), float(drawn))
        for part in parts
        for index, number, drawn in zip(part.indices, *part.data)
    }


def test_a_stream_has_the_same_samples_and_draws_for_any_reader():
    """On another number of processes, and where reading begins within an epoch."""
    whole = read(Stream(Numbers()), Share(), 3)
    assert [number for number, _ in whole.values()] == list(range(300, 320))
    assert len({drawn for _, drawn in whole.values()}) == 20
    state = torch.get_rng_state()
    parts = [read(Stream(Numbers()), Share(holder=holder, holders=3), 3) for holder in range(3)]
    assert {index: found for part in parts for index, found in part.items()} == whole
    assert torch.equal(torch.get_rng_state(), state)
    later = read(Stream(Numbers()), Share(), 3, first=2)
    assert later == {index: found for index, found in whole.items() if index >= 12}
    numbers = Numbers()
    stream = Stream(numbers)
    assert read(stream, Share(), 0) != read(stream, Share(), 1) and numbers.begun == [0, 1], "once an epoch"


@dataclasses.dataclass(slots=True)
class Stage:
    turn: int = 0


class Changing(IterableDataset):
    """Calls ``change(self)`` at the beginning or at the end of an epoch."""

    def __init__(self, change, at_end=False):
        self.count, self.generator, self.pipeline = 0, torch.Generator(), [Drawing([])]
        self.numpy, self.plain, self.index = np.random.default_rng(0), random.Random(0), None
        self.zero_dim, self.one_row, self.missing = torch.zeros(()), np.zeros(1), float("nan")
        self.memory, self.files, self.counts = np.zeros(4), ["a", "b", "c"], [0, 0]
        self.named, self.listed = {"crop": np.random.default_rng(1)}, [torch.Generator()]
        self.stages = [Stage()]
        self._change, self._at_end = change, at_end

    def __len__(self):
        return 4

    def __iter__(self):
        if not self._at_end:
            self._change(self)
        for number in range(4):
            yield torch.tensor(number)
        if self._at_end:
            self._change(self)


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda stream: setattr(stream, "count", stream.count + 1), "count"),
        (lambda stream: torch.rand((), generator=stream.generator), "generator"),
        (lambda stream: stream.numpy.random(), "numpy"),
        (lambda stream: stream.plain.random(), "plain"),
        (lambda stream: stream.named["crop"].random(), "named.crop"),
        (lambda stream: torch.rand((), generator=stream.listed[0]), "listed.0"),
        (lambda stream: setattr(stream.stages[0], "turn", stream.stages[0].turn + 1), "stages.0.turn"),
        (lambda stream: setattr(stream.pipeline[0], "epoch", 1), "pipeline.0.epoch"),
        (lambda stream: stream.zero_dim.add_(1), "zero_dim"),
        (lambda stream: stream.one_row.__iadd__(1), "one_row"),
        (lambda stream: stream.files.append(stream.files.pop(0)), "files of 3"),
    ],
)
def test_a_stream_that_counts_how_often_it_was_read_is_refused(change, name, at_end):
    """At its first sample, or where the next epoch begins, before a sample of it is used."""
    dataset = Changing(change, at_end)
    dataset.pipeline[0].epoch = 0
    stream, keys = Stream(dataset), SampleKeys(0, 0, np.arange(4))
    if at_end:
        stream.get_batch(keys.indices, keys)
        list(dataset)
    with pytest.raises(DataError, match=f"changes its attribute '{name}' when it is iterated over.*set_epoch"):
        stream.get_batch(keys.indices, dataclasses.replace(keys, epoch=1))


def test_a_stream_may_keep_what_it_has_read_and_count_where_set_epoch_is_told():
    keys = SampleKeys(0, 0, np.arange(4))
    for change in (
        lambda stream: setattr(stream, "index", 5),
        lambda stream: setattr(stream, "more", 5),
        lambda stream: setattr(stream, "pipeline", []),
        lambda stream: stream.files.append("d"),
        lambda stream: stream.counts.__setitem__(0, stream.counts[0] + 1),
        lambda stream: stream.memory.__iadd__(1),
    ):
        stream = Stream(Changing(change))
        for epoch in range(2):
            stream.get_batch(keys.indices, dataclasses.replace(keys, epoch=epoch))
    counting = Changing(lambda stream: setattr(stream, "count", stream.count + 1))
    counting.set_epoch = lambda epoch: setattr(counting, "count", epoch)
    stream = Stream(counting)
    for epoch in range(2):
        stream.get_batch(keys.indices, dataclasses.replace(keys, epoch=epoch))


def test_a_stream_is_begun_twice_to_be_compared_and_once_to_be_read():
    begun = []
    stream = Stream(Changing(begun.append))
    reader = SampleReader(stream, seed=0, checks=True)
    reader.read(0, np.arange(4))
    assert len(begun) == 3
    reader.read(0, np.arange(4))
    assert len(begun) == 4

    class Clock(IterableDataset):
        def __iter__(self):
            return iter(torch.tensor([time.perf_counter_ns()]))

    with pytest.raises(DataError, match="gave other values when it was read again"):
        SampleReader(Stream(Clock(), 1), seed=0, checks=True).read(0, np.arange(1))


def test_a_stream_whose_order_is_another_one_after_its_first_sample_is_refused():
    class Shuffled(Numbers):
        def __iter__(self):
            rest = np.random.default_rng().permutation(19).tolist()
            return iter(torch.tensor([0, *(1 + number for number in rest)]))

    with pytest.raises(DataError, match=r"Stream\[0, 1, 2, 3 and 12 more\] gave other values"):
        SampleReader(Stream(Shuffled(), 20), seed=0, checks=True).read(0, np.arange(1))


def test_a_stream_that_is_longer_than_it_says_is_warned_of_once(caplog):
    class Longer(Numbers):
        def __len__(self):
            return 3

        def __iter__(self):
            return iter(torch.arange(5))

    for stream in (Stream(Longer()), Stream(Longer(), samples=3)):
        reader = SampleReader(stream, seed=0)
        for epoch in range(2):
            assert [reader.read(epoch, np.array([index])).tolist() for index in range(3)] == [[0], [1], [2]]
    assert [record.getMessage() for record in caplog.records] == [
        "Longer has the length 3 and gave more samples: an epoch ends there, and the others are not read. Correct "
        "__len__, or write Stream(dataset, samples=N)."
    ]


def test_a_loader_of_a_stream_is_adopted_with_its_collate_function():
    source = adopt(DataLoader(Numbers(), batch_size=5, collate_fn=collate, drop_last=True, num_workers=2))
    assert (source.shuffle, source.drop_last, source.evaluation_batch, source.workers) == (
        False,
        True,
        5,
        None,
    )
    keys = SampleKeys(0, 0, np.arange(2))
    assert [int(number) for number, _ in source.dataset.get_batch(keys.indices, keys)] == [0, 1]
    with pytest.raises(DataError, match=r"Lines ended after 3 samples.* Give Stream a smaller samples="):
        Stream(Lines(), 5).get_batch(np.array([4]), keys)


def test_the_error_of_a_stream_that_fails_is_told_each_time_it_is_read():
    """The samples that ranks compare were read first. After that the stream "ended after 0 samples", and no more."""

    class Failing(IterableDataset):
        def __iter__(self):
            yield 0
            yield torch.utils.data.get_worker_info().id

    stream, keys = Stream(Failing(), 5), SampleKeys(0, 0, np.arange(2))
    for _ in range(2):
        with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'id'"):
            stream.get_batch(keys.indices, keys)


def test_a_stream_that_is_shorter_than_it_says_is_refused_with_its_own_remedy():
    class Shorter(Lines):
        def __len__(self):
            return 5

    keys = SampleKeys(0, 0, np.arange(1))
    with pytest.raises(DataError, match=r"should have 5\. Correct __len__, or"):
        Stream(Shorter()).get_batch(np.array([4]), keys)


def read_together(share, epoch=1):
    """Of each sample of an epoch: its number in the first and in the second set, and what the second drew."""
    short = Drawing([torch.tensor(number) for number in range(7)])
    source = adopt((DataLoader(TensorDataset(torch.arange(20)), num_workers=1), short))
    assert source.workers == 1
    plan = SamplePlan(samples=len(source.dataset), shape=BatchShape(global_batch=6, micro_batches=3))
    found = {}
    for batch in StepLoader(source.dataset, plan, share=share).batches(epoch):
        for part in batch.micro_batches:
            (numbers,), (others, drawn) = part.data
            found |= {int(a): (int(b), float(c)) for a, b, c in zip(numbers, others, drawn)}
    return found


class Drawing(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index], torch.rand(())


def test_two_sets_are_read_together_and_the_smaller_one_begins_again():
    whole = read_together(Share())
    assert sorted(whole) == list(range(20))
    turns = [[whole[number][0] for number in range(begin, begin + 7)] for begin in (0, 7)]
    assert [sorted(turn) for turn in turns] == [list(range(7))] * 2 and turns[0] != turns[1]
    assert len({drawn for _, drawn in whole.values()}) == 20
    assert read_together(Share(), epoch=2) != whole
    parts = [read_together(Share(holder=holder, holders=2)) for holder in range(2)]
    assert {**parts[0], **parts[1]} == whole
    with pytest.raises(ConfigError, match="one is empty"):
        adopt((DATA, Subset(DATA, [])))
    for unnumbered in (Numbers(), DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 40, 40))):
        with pytest.raises(ConfigError, match=r"numbers of their samples, and a.* is read by places in an epoch"):
            adopt((DATA, unnumbered))


def test_a_set_that_skips_broken_samples_is_read_beside_others():
    source = adopt((SkipBroken(DATA), DATA))
    plan = SamplePlan(samples=len(source.dataset), shape=BatchShape(global_batch=8, micro_batches=2))
    (first, *_), *_ = (
        [part.data for part in batch.micro_batches] for batch in StepLoader(source.dataset, plan).batches(0)
    )
    assert [each.tolist() for each in first[0]] == [each.tolist() for each in first[1]]


def test_a_stream_in_a_loader_is_told_where_its_collate_function_goes():
    with pytest.raises(
        ConfigError, match=r"not in a DataLoader; a collate function goes into Stream\(\.\.\., collate="
    ):
        Stream(Lines(), 3)[0]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), "whose sampler draws"),
        (lambda: SkipBroken(Weighted(DATA, [1.0] * len(DATA))), "or Weighted"),
        (lambda: Stream(Lines(), 3), "an iterable data set"),
    ],
)
def test_a_set_that_is_read_by_places_in_an_epoch_is_refused_beside_others(make, name):
    """Its first sample could not be read: "Weighted ... Give it to run.batches as it is", of a plain DataLoader."""
    with pytest.raises(ConfigError, match=f"{name}.* is read by places in an epoch. Let one data set give samples"):
        adopt((DATA, make()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 40, 40, replacement=False)),
            r"weights to the loss, for example",
        ),
        (
            lambda: DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=9)),
            r"Write run\.batches\(dataset\)",
        ),
        (lambda: DataLoader(DATA, sampler=Curriculum()), r"Curriculum has its own order.*Write run\.batches"),
        (
            lambda: DataLoader(DATA, batch_size=None),
            r"batch_size=None.*Give single samples: run\.batches\(dataset\)",
        ),
        (
            lambda: DataLoader(Lines()),
            r"Lines can be iterated over and has no length.*Stream\(dataset, samples=N\)",
        ),
        (lambda: Lines(), r"Lines can be iterated over and has no length"),
        (lambda: ChainDataset([Lines(), Lines()]), r"ChainDataset can be iterated over and has no length"),
        (lambda: Stream(iter([1]), 1), r"iterated over anew in each epoch, and was given a list_iterator"),
        (
            lambda: DistributedSampler(DATA, 2, 0),
            r"needs a data set and got a DistributedSampler.*Write run\.batches\(dataset\)",
        ),
        (lambda: DataLoader(Numbers(), batch_size=None), r"batch_size=None.*Give single samples"),
        (lambda: iter([1]), r"no __len__ or no __getitem__.* a DataLoader of one, whose collate_fn makes the batches"),
    ],
)
def test_what_no_plan_can_follow_is_refused_with_the_line_that_replaces_it(make, message):
    with pytest.raises(ConfigError, match=message):
        adopt(make())


def test_a_batch_sampler_of_ones_own_is_refused():
    class Bucketed(BatchSampler):
        pass

    loader = DataLoader(DATA, batch_sampler=Bucketed(SequentialSampler(DATA), 4, False))
    with pytest.raises(
        ConfigError,
        match=r"batch_sampler Bucketed decides the batches.*Write run\.batches\(dataset\).*for i in batch\]",
    ):
        adopt(loader)


def test_a_plain_batch_sampler_is_taken_over():
    loader = DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), batch_size=5, drop_last=True))
    source = adopt(loader)
    assert source.shuffle is True and source.drop_last is True and source.batch_size == 5


def test_a_worker_init_function_is_said_to_be_left_out():
    (note,) = adopt(DataLoader(DATA, num_workers=1, worker_init_fn=lambda worker: None)).notes
    assert "worker_init_fn is not called" in note


class Scaled(DataLoader):
    def __iter__(self):
        return (2 * batch for batch in super().__iter__())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Scaled(DATA), r"Scaled\.__iter__ is not called: the run reads the data set itself"),
        (lambda: DataLoader(DATA, shuffle=True, generator=torch.Generator()), "generator is not used"),
        (lambda: DataLoader(DATA, sampler=RandomSampler(DATA, generator=torch.Generator())), "not used"),
        (lambda: DataLoader(Numbers(), worker_init_fn=print), "worker_init_fn is not called"),
        (lambda: (DATA, DataLoader(DATA, generator=torch.Generator())), "generator is not used"),
    ],
)
def test_what_a_loader_does_and_the_run_does_not_is_said(make, said):
    (note,) = adopt(make()).notes
    assert re.search(said, note)


def test_samplers_that_torchdata_has_put_in_place_of_torchs_are_taken_for_those():
    """A StatefulDataLoader was refused, since its BatchSampler is a class of its own."""
    kinds = [
        type(kind.__name__, bases, {"__module__": "torchdata.sampler", "__init__": kind.__init__})
        for kind, bases in ((RandomSampler, (Sampler,)), (BatchSampler, (BatchSampler,)))
    ]
    kinds[0].num_samples = 40
    source = adopt(
        DataLoader(DATA, batch_sampler=kinds[1](kinds[0](DATA, generator=torch.Generator()), 5, drop_last=True))
    )
    assert (source.shuffle, source.drop_last, source.batch_size, source.notes) == (True, True, 5, ())


def test_a_loader_that_was_given_a_state_is_refused():
    """As torchdata's StatefulDataLoader may be, which notes it in this attribute."""
    loader = DataLoader(DATA)
    loader.next_iter_state = {"_num_yielded": 3}
    with pytest.raises(ConfigError, match=r"load_state_dict, and would begin within an epoch.*resume='auto'"):
        adopt(loader)


def test_what_is_left_to_the_device_is_found_below_subsets():
    finish = Normalize((0.5,), (0.5,))
    images = ImageArrays(
        torch.zeros(4, 1, 2, 2, dtype=torch.uint8),
        torch.zeros(4),
        classes=["a"],
        name="x",
        device_transform=finish,
    )
    assert adopt(Subset(images, [1, 2])).device_transform is finish
    assert adopt(DataLoader(images, batch_size=2)).device_transform is finish
    assert adopt(Digits()).device_transform is None


@pytest.mark.parametrize(("batch_size", "said"), [(128, False), (16, False), (32, False), (100, True)])
def test_a_batch_size_that_is_none_of_the_recipes_is_said(batch_size, said):
    source = adopt(DataLoader(DATA, batch_size=batch_size))
    note = check_batch_size(source, global_batch=128, micro_batch_size=16, holders=4)
    assert (note is not None) is said
    if said:
        assert "batch_size=100 is replaced by the run's global_batch=128" in note
        assert note.endswith("write run.steps_per_epoch(loader).")
    assert check_batch_size(adopt(DATA), global_batch=128, micro_batch_size=16, holders=4) is None


def test_a_stream_of_letters_or_of_keys_is_none():
    """The path of a file gave its letters as samples."""
    for wrong in ("samples.txt", b"ab", {"a": 1}, list):
        with pytest.raises(ConfigError, match="Stream needs data that can be iterated over anew"):
            Stream(wrong, 2)
