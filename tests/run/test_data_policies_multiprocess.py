"""Skipped samples, weighted draws and buckets of lengths end in the same bits on any number of ranks and workers."""

import logging

import numpy as np
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.utils.data import Dataset, Subset

import lockstep
from lockstep.core.fingerprint import digest_tensors
from lockstep.data import Bucketed, SkipBroken, Weighted
from lockstep.errors import ConfigError, DataError

SAMPLES, WORDS = 230, 20
LENGTHS = np.random.default_rng(0).integers(2, 12, SAMPLES)
BROKEN = {17, 140}
CASES = ("skip", "skip, two workers", "weighted", "bucketed", "all")


class Sentences(Dataset):
    """Tokens with noise, so that what is drawn for a sample matters; some samples cannot be read."""

    def __init__(self, broken=frozenset()):
        self.broken = broken
        self.labels = torch.arange(SAMPLES) % 7

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError("torn")
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(WORDS, (int(LENGTHS[index]) + 1,), generator=generator)
        tokens[0] = torch.randint(WORDS, ())
        return tokens[:-1], tokens[1:]

    def sample_path(self, index):
        return f"{index}.txt"


class First(Sentences):
    """Sentences of one length, read without padding."""

    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return inputs[:2], targets[:2]


def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none").sum(), (
        target != -100
    ).sum()


def trained(dataset, workers=0, epochs=1, **options):
    """Digests of every parameter after an epoch or more, the last loss, and what was logged."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("lockstep.run.loaders")
    logger.addHandler(handler)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 8), nn.Dropout(0.1), nn.Linear(8, WORDS))
    run = lockstep.init(global_batch=24, micro_batches=4, **options)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    seen = step = 0
    try:
        for _ in run.epochs(epochs):
            for batch in run.batches(dataset, workers=workers):
                value = run.backward(batch, loss)
                optimizer.step()
                optimizer.zero_grad()
                seen, step = seen + batch.plan.samples, step + 1
        return digest_tensors(model.state_dict()), float(value), seen, records
    except DataError as error:
        return step, str(error)
    finally:
        logger.removeHandler(handler)
        run.close()


def policies(world):
    few, many = SkipBroken(First(BROKEN)), SkipBroken(First(set(range(0, SAMPLES, 20))))
    results = {
        "skip": trained(few),
        "skip, two workers": trained(few, workers=2),
        "weighted": trained(Weighted(First(), "balanced", 100)),
        "bucketed": trained(Bucketed(Sentences(), LENGTHS, 6, pool=48), epochs=2),
        "all": trained(SkipBroken(Bucketed(Sentences({3}), LENGTHS, 24, pool=48))),
        "too many": trained(many),
    }
    try:
        trained(Subset(SkipBroken(First()), range(50)))
    except ConfigError as error:
        results["inside"] = str(error)
    return results


def test_every_policy_ends_in_the_same_bits_on_any_number_of_ranks():
    alone = run_ranks(policies, 1)[0]
    several = run_ranks(policies, 3)
    for rank, results in enumerate(several):
        for name in CASES:
            *values, records = results[name]
            assert values == list(alone[name][:-1]), name
            assert records == (alone[name][-1] if rank == 0 else []), name
    assert alone["skip"][:-1] == alone["skip, two workers"][:-1]
    assert alone["skip"][0] != alone["weighted"][0] != alone["bucketed"][0] != alone["all"][0]
    assert alone["bucketed"][2] == 2 * SAMPLES and alone["weighted"][2] == 100
    assert len(alone["skip"][-1]) == 2 and len(alone["all"][-1]) == 1
    assert "In epoch 1 sample 140 (140.txt) could not be read and was skipped" in " ".join(alone["skip"][-1])
    assert "sample 3 (3.txt)" in alone["all"][-1][0]

    step, message = alone["too many"]
    assert "at most 2 (0.01 of them) may be skipped" in message and "0.txt)" in message and 0 < step < 10
    assert all(results["too many"] == alone["too many"] for results in several)
    assert "SkipBroken belongs around Subset" in alone["inside"]
