"""Changes that a loop makes to a data set by what its rank has seen: every rank would read other samples."""

import pytest
import torch
from tests.ranks import run_ranks
from tests.run.jobs import begin, dataset
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.errors import ConfigError

FACTORS = {}
HARD = range(27, 37)
"""None of the samples that are compared between the ranks."""


class Weighed(TensorDataset):
    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.factors, self.by_place = torch.ones(len(tensors[0])), {}

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        factor = self.factors[index] * self.by_place.get(index, 1.0) * FACTORS.get(index, 1.0)
        return inputs * factor, target, index


class Noting(nn.Module):
    """A loss that notes what each sample's loss was."""

    def __init__(self, data):
        super().__init__()
        self.data = data

    def forward(self, output, batch):
        losses = nn.functional.cross_entropy(output, batch[1], reduction="none")
        for place, loss in zip(batch[2].tolist(), losses.tolist()):
            if place in HARD:
                self.data.by_place[place] = 1 + loss
        return losses.mean()


def plain(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def in_loop(data, batch):
    for part in batch.micro_batches:
        for place in part.data[2].tolist():
            if place in HARD:
                data.factors[place] += 1


def in_a_global(data, batch):
    places = [place for part in batch.micro_batches for place in part.data[2].tolist()]
    FACTORS.update({place: 2.0 for place in places if place in HARD})


def nowhere(data, batch):
    pass


def mining(world, loss, change, predicts=False):
    FACTORS.clear()
    run, model, optimizer = begin()
    data = Weighed(*dataset().tensors)
    function = loss(data) if isinstance(loss, type) else loss
    for _ in run.epochs(3):
        for batch in run.batches(data):
            run.backward(batch, function, forward=lambda batch: model(batch[0]))
            optimizer.step()
            optimizer.zero_grad()
            change(data, batch)
        if predicts:
            outputs = run.predict(data, forward=lambda batch: model(batch[0]), everywhere=True)
            data.factors[27:37] = 1 + outputs[27:37].max(1).values
    weights = run.fingerprint()
    run.close()
    return weights


def refused(world, loss, change):
    with pytest.raises(ConfigError, match=r"not to the same values on all ranks: .* is .* on rank 0; .* on rank 1"):
        mining(world, loss, change)


@pytest.mark.parametrize(
    ("loss", "change"),
    [(Noting, nowhere), (plain, in_loop), pytest.param(plain, in_a_global, marks=pytest.mark.slow)],
)
def test_a_data_set_that_each_rank_changes_by_its_own_samples_is_refused(loss, change):
    run_ranks(refused, 2, loss, change)


def evaluated(world):
    run, model, optimizer = begin()
    data = Weighed(*dataset().tensors)
    for batch in run.batches(data):
        run.backward(batch, plain, forward=lambda batch: model(batch[0]))
        optimizer.step()
        in_loop(data, batch)
    with pytest.raises(ConfigError, match="not to the same values on all ranks"):
        run.evaluate(data, plain, forward=lambda batch: model(batch[0]))


def test_a_data_set_that_each_rank_has_changed_is_not_evaluated():
    run_ranks(evaluated, 2)


def test_a_data_set_that_every_rank_changes_by_all_outputs_is_the_same_on_any_number():
    (alone,) = run_ranks(mining, 1, plain, nowhere, True)
    assert run_ranks(mining, 2, plain, nowhere, True) == [alone] * 2
