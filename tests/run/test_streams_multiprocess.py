"""A stream that was stopped within an epoch and goes on on another number of processes ends in the same bits."""

import io
import logging
import os
import tarfile

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import IterableDataset, default_collate

from lockstep.data import Stream
from lockstep.errors import ConfigError, DataError
from lockstep.run import Run, RunOptions

SAMPLES = 20


class Lines(IterableDataset):
    """Lines of files behind fsspec, with noise that torch draws."""

    def __init__(self, files):
        self.files = files

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        import fsspec

        for file in self.files:
            with fsspec.open(file, "rt") as lines:
                for line in lines:
                    x = torch.full((3,), float(line)) / SAMPLES
                    yield x + 0.1 * torch.rand(3), x[:1]


def lines(folder):
    for number in range(2):
        rows = range(number * 10, number * 10 + 10)
        (folder / f"{number}.txt").write_text("".join(f"{row}\n" for row in rows))
    return Lines([(folder / f"{number}.txt").as_uri() for number in range(2)])


def web_shards(folder):
    import webdataset

    for number in range(2):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for row in range(10):
                found = tarfile.TarInfo(f"{number}-{row}.cls")
                content = str(number * 10 + row).encode()
                found.size = len(content)
                tar.addfile(found, io.BytesIO(content))
    files = [str(folder / f"{number}.tar") for number in range(2)]
    shards = webdataset.WebDataset(files, shardshuffle=False, nodesplitter=None)
    return Stream(shards.map(pair_of), samples=SAMPLES)


class Shuffled(IterableDataset):
    """Shuffled shards, in another order in each epoch."""

    def __init__(self, files):
        self.files, self.epoch = files, 0

    def __len__(self):
        return SAMPLES

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        import webdataset

        shards = webdataset.WebDataset(self.files, shardshuffle=False, nodesplitter=None)
        shards = shards.compose(webdataset.detshuffle(10, initial=10, seed=0, epoch=self.epoch - 1))
        return iter(shards.map(pair_of))


def shuffled_shards(folder):
    web_shards(folder)
    return Shuffled([str(folder / f"{number}.tar") for number in range(2)])


def pair_of(sample):
    x = torch.full((3,), float(sample["cls"])) / SAMPLES
    return x + 0.1 * torch.rand(3), x[:1]


def shuffled_table(folder):
    import datasets

    rows = datasets.Dataset.from_dict({"x": [[row / SAMPLES] * 3 for row in range(SAMPLES)]}).with_format("torch")
    stream = rows.to_iterable_dataset(num_shards=2).shuffle(seed=0, buffer_size=5)
    return Stream(stream, samples=SAMPLES, collate=lambda found: default_collate([(f["x"], f["x"][:1]) for f in found]))


KINDS = {
    "fsspec": lines,
    "webdataset": web_shards,
    "webdataset, shuffled": shuffled_shards,
    "datasets": shuffled_table,
}


def train(world, folder, kind, stop):
    run = Run(RunOptions.of(global_batch=6, micro_batches=3, directory=folder / "run", resume="auto"), world)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    (folder / f"data-{os.getpid()}").mkdir()
    data = KINDS[kind](folder / f"data-{os.getpid()}")
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lockstep").addHandler(handler)
    for _ in run.epochs(2):
        for batch in run.batches(data):
            run.backward(batch, mse_loss)
            optimizer.step()
            optimizer.zero_grad()
            if batch.plan.step + 1 == stop:
                run.save(wait=True)
                return ""
    assert not [each for each in said if "_epoch" in each or "_as_given" in each], "the run tells a stream its epoch"
    return run.fingerprint()


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_goes_on_on_another_number_of_processes_has_the_same_bits(kind, tmp_path):
    pytest.importorskip(kind.partition(",")[0])
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    (whole,) = run_ranks(train, 1, tmp_path / "whole", kind, 0)
    run_ranks(train, 3, tmp_path / "cut", kind, 6)
    assert run_ranks(train, 2, tmp_path / "cut", kind, 0) == [whole] * 2


class Unseeded(IterableDataset):
    """Begins with the same sample in each process, and goes on in an order of that process's own."""

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        for place in [
            0,
            *torch.randperm(SAMPLES - 1, generator=torch.Generator().manual_seed(os.getpid())) + 1,
        ]:
            yield torch.full((3,), float(place)), torch.zeros(1)


def unseeded(world):
    run = Run(RunOptions.of(global_batch=6, micro_batches=3), world)
    run.prepare(nn.Linear(3, 1))
    with pytest.raises(ConfigError) as refused:
        run.batches(Unseeded())
    return str(refused.value)


def test_ranks_whose_streams_only_begin_alike_are_refused():
    """The first sample was compared; the ranks trained on some samples twice and on others never."""
    for said in run_ranks(unseeded, 2):
        assert "The ranks hold different data: the beginning of the data set has the digest" in said


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files of WebDataset
def test_shuffles_that_count_epochs_or_look_at_the_clock_are_refused(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    web_shards(tmp_path)
    files = [str(tmp_path / f"{number}.tar") for number in range(2)]
    run = Run(RunOptions.of(global_batch=2, micro_batches=1))
    run.prepare(nn.Linear(3, 1))
    shards = webdataset.WebDataset(files, shardshuffle=False, nodesplitter=None)
    for how, said in (
        (webdataset.detshuffle(10), "changes its attribute 'pipeline.*epoch' when it is iterated over"),
        (webdataset.shuffle(10), "gave other values when it was read again"),
    ):
        with pytest.raises(DataError, match=said):
            next(iter(run.batches(Stream(shards.compose(how).map(pair_of), samples=SAMPLES))))
    run.close()
