"""The picture of the samples says what the sample plan and torch's sampler do."""

import sys
from collections import Counter

import pytest
from torch.utils.data import DistributedSampler

from lockstep.core.plan import BatchShape, SamplePlan
from lockstep.errors import ConfigError
from lockstep.explain.samples import explain_samples, samples_text


def read(scheme):
    """The samples of all ranks, step by step."""
    return [
        [sample for row in scheme.cells for part in row[step] for sample in part.samples]
        for step in range(len(scheme.steps.shown))
    ]


def test_eleven_samples_on_two_ranks_are_drawn_as_in_the_notes():
    assert samples_text(explain_samples()).splitlines()[2:7] + samples_text(explain_samples()).splitlines()[11:15] == [
        "torch's DistributedSampler + DataLoader",
        "        step 0  step 1  step 2",
        "rank 0  0 2     4 6     8 10",
        "rank 1  1 3     5 7     9 0*",
        "Rank r takes every 2nd sample from r on. 1 reading of a sample that was read before (marked *), so",
        "        step 0  step 1  step 2",
        "rank 0  k0 0 1  k0 4 5  k0 8 9",
        "rank 1  k1 2 3  k1 6 7  k1 10",
        "Every sample is read exactly once. The last step has 3 samples, and its mean is over 3. A step's",
    ]


@pytest.mark.parametrize("ranks, batch, samples", [(2, 2, 11), (3, 4, 23), (4, 3, 48), (5, 1, 3)])
def test_the_classic_half_is_what_torchs_sampler_gives(ranks, batch, samples):
    facts = explain_samples(samples=samples, ranks=ranks, batch=batch, shuffle=True, seed=5, epoch=3)
    for rank, row in enumerate(facts.classic.cells):
        sampler = DistributedSampler(range(samples), ranks, rank, shuffle=True, seed=5)
        sampler.set_epoch(3)
        assert [sample for (part,) in row for sample in part.samples] == list(sampler)
    counts = Counter(sample for step in read(facts.classic) for sample in step)
    assert facts.classic.read_again == sum(count - 1 for count in counts.values())
    marked = sum(again for row in facts.classic.cells for (part,) in row for again in part.again)
    assert marked == facts.classic.read_again == -samples % ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_our_half_is_the_sample_plan_on_any_number_of_ranks(ranks):
    facts = explain_samples(samples=40, ranks=ranks, batch=12 // ranks, micro_batches=6, shuffle=True, seed=1, epoch=2)
    plan = SamplePlan(samples=40, shape=BatchShape(global_batch=12, micro_batches=6), seed=1)
    steps = [plan.step(2, position) for position in range(4)]
    assert read(facts.ours) == [[int(i) for part in step.indices for i in part] for step in steps]
    assert Counter(sample for step in read(facts.ours) for sample in step) == Counter(range(40))
    assert facts.ours.step_samples == (12, 12, 12, 4)


def test_what_nobody_reads_is_counted():
    facts = explain_samples(samples=11, ranks=2, batch=4, drop_last=True)
    assert facts.ours.never_read == 3
    assert facts.classic.never_read == 1
    assert facts.classic.read_again == 0


def test_a_thousand_million_samples_are_explained_without_a_list_of_them():
    facts = explain_samples(samples=10**9, ranks=64, batch=8, shuffle=True)
    text = samples_text(facts)
    assert facts.classic is None
    assert "DistributedSampler makes a list" in text
    assert "Left out: ranks 7 to 62 of 64; steps 5 to 1953123 of 1,953,125." in text
    assert max(map(len, text.splitlines())) <= 100


def test_without_torch_our_half_is_drawn_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.data", None)
    facts = explain_samples()
    assert facts.classic is None
    assert "torch is not installed" in samples_text(facts)


@pytest.mark.parametrize(
    "numbers, said",
    [
        ({"ranks": 0}, "--ranks should be at least 1 and is 0"),
        ({"ranks": 3, "micro_batches": 4}, "--ranks=3 times --batch=2 is the global batch"),
        ({"ranks": 4, "micro_batches": 2}, "4 data-parallel ranks cannot share micro_batches=2"),
        ({"epoch": -1}, "--epoch should be from 0 to 1,000,000,000 and is -1"),
        ({"batch": 10**9}, "--batch times --ranks should be from 0 to 1,000,000 and is 2,000,000,000"),
        ({"samples": 3, "drop_last": True}, "too few for one step"),
        ({"seed": 1 << 70, "shuffle": True}, "is not an integer of 64 bits"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(numbers, said):
    with pytest.raises(ConfigError, match=said):
        explain_samples(**numbers)
