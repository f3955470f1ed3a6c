import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from lockstep.core.plan import BatchShape, SamplePlan, Share
from lockstep.data import EvaluationLoader, StepLoader
from lockstep.errors import ConfigError


class Augmented(Dataset):
    """Draws from every generator that a transform might use."""

    def __init__(self, size=203):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        drawn = torch.rand(2), torch.from_numpy(np.random.rand(2)), torch.tensor(random.random())
        return {"x": torch.cat([drawn[0].double(), drawn[1], drawn[2][None].double()]), "index": index}


def plan_of(dataset, **options):
    return SamplePlan(samples=len(dataset), shape=BatchShape(global_batch=32, micro_batches=8), seed=5, **options)


def loaded(dataset, epochs=(0,), first=0, **options):
    """All micro-batches by (epoch, step, k)."""
    loader = StepLoader(dataset, plan_of(dataset), seed=5, **options)
    found = {}
    for epoch in epochs:
        for batch in loader.batches(epoch, first if epoch == epochs[0] else 0):
            for part in batch.micro_batches:
                found[epoch, batch.plan.position, part.k] = part
    loader.close()
    return found


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for key, part in found.items():
        assert np.array_equal(part.indices, wanted[key].indices)
        assert torch.equal(part.data["x"], wanted[key].data["x"])


@pytest.mark.parametrize("holders", [1, 2, 3, 5, 8])
def test_the_ranks_together_read_every_sample_of_the_plan_once(holders):
    dataset = TensorDataset(torch.arange(203), torch.arange(203) % 7)
    plan = plan_of(dataset)
    seen = []
    loaders = [StepLoader(dataset, plan, share=Share(holder=holder, holders=holders)) for holder in range(holders)]
    for batches in zip(*(loader.batches(1) for loader in loaders), strict=True):
        step = plan.step(1, batches[0].plan.position)
        parts = [part for batch in batches for part in batch.micro_batches]
        assert [part.k for part in parts] == list(range(step.leaves))
        for part in parts:
            assert np.array_equal(part.indices, step.indices[part.k])
            assert part.data[0].tolist() == part.indices.tolist()
            assert part.data[1].tolist() == (part.indices % 7).tolist()
        seen += [index for part in parts for index in part.indices.tolist()]
    assert sorted(seen) == list(range(203))


def test_a_rank_without_a_micro_batch_still_gets_each_step():
    dataset = TensorDataset(torch.arange(33))
    sizes = [
        (sum(map(len, batch.micro_batches)), len(batch))
        for batch in StepLoader(dataset, plan_of(dataset), share=Share(holder=7, holders=8)).batches(0)
    ]
    assert sizes == [(4, 32), (0, 1)]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_workers_changes_no_bit(workers):
    dataset = Augmented()
    assert_equal(loaded(dataset, (0, 1), workers=workers), loaded(dataset, (0, 1)))


@pytest.mark.parametrize("prefetch", [1, 4])
def test_reading_ahead_changes_no_bit(prefetch):
    dataset = Augmented(90)
    assert_equal(loaded(dataset, workers=2, prefetch=prefetch), loaded(dataset))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_epoch_goes_on_with_the_same_bits(workers):
    dataset = Augmented()
    whole = loaded(dataset, (2, 3))
    for first in (1, 4):
        rest = loaded(dataset, (2, 3), first, workers=workers)
        assert_equal(rest, {key: part for key, part in whole.items() if key[0] == 3 or key[1] >= first})


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_was_left_early_does_not_disturb_the_next(workers):
    dataset = Augmented()
    loader = StepLoader(dataset, plan_of(dataset), seed=5, workers=workers)
    for batch in loader.batches(0):
        if batch.plan.position == 1:
            break
    found = {}
    for batch in loader.batches(1):
        found |= {(1, batch.plan.position, part.k): part for part in batch.micro_batches}
    loader.close()
    assert_equal(found, loaded(dataset, (1,)))


def test_seed_and_epoch_change_the_random_numbers_of_a_sample():
    dataset = Augmented(32)

    def drawn(seed, epoch):
        (batch,) = StepLoader(dataset, plan_of(dataset, shuffle=False), seed=seed).batches(epoch)
        return torch.cat([part.data["x"] for part in batch.micro_batches])

    assert torch.equal(drawn(0, 0), drawn(0, 0))
    assert not torch.isin(drawn(0, 0), drawn(1, 0)).any()
    assert not torch.isin(drawn(0, 0), drawn(0, 1)).any()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("holders", [1, 3])
@pytest.mark.fault("C8")
def test_evaluation_reads_every_sample_once_and_in_order(workers, holders):
    dataset = Augmented(50)
    indices, rows, numbers = [], [], []
    for holder in range(holders):
        loader = EvaluationLoader(
            dataset, micro_batch_size=8, share=Share(holder=holder, holders=holders), workers=workers
        )
        assert loader.count == 7
        for part in loader:
            numbers.append(part.k)
            indices += part.indices.tolist()
            rows.append(part.data["x"])
        loader.close()
    assert indices == list(range(50)) and numbers == list(range(7))
    whole = EvaluationLoader(dataset, micro_batch_size=50)
    assert torch.equal(torch.cat(rows), next(iter(whole)).data["x"])


def test_every_evaluation_sees_the_same_samples():
    loader = EvaluationLoader(Augmented(20), micro_batch_size=7, workers=1)
    first, second = ([part.data["x"] for part in loader] for _ in range(2))
    loader.close()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_an_evaluation_may_leave_a_rank_without_samples():
    loader = EvaluationLoader(TensorDataset(torch.arange(5)), micro_batch_size=4, share=Share(holder=2, holders=3))
    assert list(loader) == [] and len(loader) == 0 and loader.count == 2


def test_a_plan_for_another_number_of_samples_is_refused():
    plan = SamplePlan(samples=64, shape=BatchShape(global_batch=32, micro_batches=8))
    with pytest.raises(ConfigError, match=r"plan is for 64 samples and the data set has 65"):
        StepLoader(TensorDataset(torch.arange(65)), plan)


def test_a_data_set_without_numbers_is_refused():
    with pytest.raises(ConfigError, match="no __len__ or no __getitem__"):
        EvaluationLoader(iter([1, 2]), micro_batch_size=1)


def test_tensors_begin_where_kernels_treat_all_alike():
    loader = EvaluationLoader(Augmented(9), micro_batch_size=3, collate=lambda samples: torch.rand(4, 3)[1:])
    assert all(part.data.data_ptr() % 64 == 0 for part in loader)
