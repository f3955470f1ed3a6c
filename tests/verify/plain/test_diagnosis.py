"""The cause follows from records alone: made by hand here, of a loop whose gradient of sample i is a fixed vector."""

import copy
from itertools import pairwise

import numpy as np
import pytest

from lockstep.errors import ConfigError
from lockstep.verify import Cause
from lockstep.verify.plain import BatchRecord, Measure, RankRecord, Recording, StepRecord, diagnose_plain

NAMES = ("first", "second", "third", "fourth")
LENGTH, SAMPLES, STEPS, BATCH = 6, 24, 6, 8
GRADIENTS = {name: np.random.default_rng(n).normal(size=(SAMPLES, LENGTH)) for n, name in enumerate(NAMES)}


def measure(values, bits=True):
    values = np.asarray(values, dtype=np.float64)
    digest = values.tobytes().hex() if bits else ""
    return Measure(digest, float(np.linalg.norm(values)), tuple(values.tolist()))


def recording(ranks=2, accumulate=1):
    """A sound run; an epoch has 3 steps."""
    made = [
        RankRecord(
            rank,
            ranks,
            seed=0,
            context={
                "threads": "1",
                "torch": "2",
                "precision": "float32",
                "optimizers": "torch.optim.sgd.SGD default",
            },
            start={name: measure(np.zeros(LENGTH)) for name in NAMES},
        )
        for rank in range(ranks)
    ]
    values = {name: np.zeros(LENGTH) for name in NAMES}
    for step in range(STEPS):
        order = np.random.default_rng(step // 3).permutation(SAMPLES)[BATCH * (step % 3) :][:BATCH]
        used = {name: GRADIENTS[name][order].mean(0) for name in NAMES}
        before = copy.deepcopy(values)
        values = {name: values[name] - 0.1 * used[name] for name in NAMES}
        for rank in made:
            share = order[rank.rank :: ranks]
            rank.steps.append(_step(step, np.split(share, accumulate), used, before, values))
    return Recording(made)


def _step(step, parts, used, before, values):
    return StepRecord(
        step,
        batches=[_batch(part.tolist()) for part in parts],
        begin={name: measure(each).digest for name, each in before.items()},
        buffers={"mean": measure([1.0, step])},
        used={name: measure(each) for name, each in used.items()},
        settings={"lr": str(0.1 * 0.9**step), "momentum": "0.9", "fused of 0": "None"},
        updates=1,
        values={name: measure(each) for name, each in values.items()},
        calls=[("a", "x", "y"), ("b", "y", "z")] if not step else [],
        trained=list(NAMES),
    )


def _batch(samples):
    return BatchRecord(
        samples=samples,
        inputs=[f"x{sample}" for sample in samples],
        losses=[1.0 + sample / 10 for sample in samples],
        generators=("one", "one"),
        gradients={name: measure(GRADIENTS[name][samples].mean(0), bits=False) for name in NAMES},
    )


def changed(change, ranks=2, **options):
    """A run of which every step from the third on is changed: ``change(step record, rank)``."""
    made = recording(ranks, **options)
    for rank in made.ranks:
        for step in rank.steps[2:]:
            change(step, rank.rank)
        for step, after in pairwise(rank.steps):
            after.begin = {name: each.digest for name, each in step.values.items()}
    return made


def reduced_with(*weights):
    """Every rank's optimizer is given this weighted sum of the ranks' gradients."""

    def change(made):
        for number in range(2, STEPS):
            steps = made.at(number)
            batches = [batch for step in steps for batch in step.batches]
            for name in NAMES:
                parts = (np.array(batch.gradients[name].sketch) for batch in batches)
                total = sum(weight * part for weight, part in zip(weights, parts))
                for step in steps:
                    step.used[name] = measure(total)

    return change


def all_ranks(**fields):
    return lambda step, rank: [setattr(step, name, value) for name, value in fields.items()]


def on_rank_1(change):
    return lambda step, rank: change(step) if rank == 1 else None


def not_reduced(step, rank):
    step.used = dict(step.batches[0].gradients)


def rounded(step, rank):
    step.values = {name: measure(np.array(each.sketch) * (1 + 1e-9)) for name, each in step.values.items()}
    step.used = {name: measure(np.array(each.sketch) * (1 + 1e-9)) for name, each in step.used.items()}


def other_losses(step, rank):
    step.batches[0].losses = [value + 1 for value in step.batches[0].losses]


def other_losses_with_numbers_drawn(step, rank):
    other_losses(step, rank)
    step.batches[0].generators = (f"state {rank}", "after")


def other_samples(step, rank):
    """From the second epoch on."""
    if step.step >= 3:
        step.batches[0].samples = [(sample + 7) % SAMPLES for sample in step.batches[0].samples]


def other_update(step, rank):
    step.values = {name: measure(2 * np.array(each.sketch)) for name, each in step.values.items()}


CASES = {
    "gradients that nobody reduces": (not_reduced, Cause.NOT_REDUCED),
    "samples that nobody reads": (on_rank_1(lambda s: _shorten(s.batches[0])), Cause.DROPPED),
    "other samples": (other_samples, Cause.DATA_ORDER),
    "other losses": (other_losses, Cause.FORWARD),
    "other losses and numbers drawn": (other_losses_with_numbers_drawn, Cause.MODEL_RANDOMNESS),
    "another update": (other_update, Cause.UPDATE),
    "a parameter that one rank has for itself": (
        on_rank_1(
            lambda s: s.values.update(first=Measure("own", s.values["first"].norm, s.values["first"].sketch))
        ),
        Cause.REPLICAS,
    ),
    "a learning rate that never was": (
        lambda s, r: s.settings.update(lr="0.5"),
        Cause.OPTIMIZER,
    ),
    "a schedule that lags": (lambda s, r: s.settings.update(lr=str(0.1 * 0.9)), Cause.SCHEDULE),
    "gradients of one layer that are gone": (lambda s, r: s.used.pop("third"), Cause.LEFT_OUT),
    "a step that nobody takes": (all_ranks(updates=0), Cause.UPDATE),
    "a buffer that is not the reference's": (all_ranks(buffers={"mean": measure([7.0, 7.0])}), Cause.BUFFERS),
    "rounding": (rounded, Cause.REDUCTION_ORDER),
}


def _shorten(batch):
    for name in ("samples", "inputs", "losses"):
        setattr(batch, name, getattr(batch, name)[:-1])


@pytest.mark.parametrize("case", CASES)
def test_the_cause_follows_from_the_records(case):
    change, cause = CASES[case]
    found = diagnose_plain(recording(1), changed(change))
    assert found is not None and found.cause is cause, found


WEIGHTS = {
    "summed and not divided": ((1.0, 1.0), Cause.GRADIENT_SCALE, "2 times"),
    "divided twice": ((0.25, 0.25), Cause.GRADIENT_SCALE, "0.5 times"),
    "not in proportion": ((0.7, 0.3), Cause.LOSS_WEIGHTING, "weights 0.7, 0.3"),
    "only rank 0's": ((1.0, 0.0), Cause.NOT_REDUCED, "rank 1 do not count"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_the_weights_of_a_wrong_sum_are_named(case):
    weights, cause, detail = WEIGHTS[case]
    made = recording(2)
    reduced_with(*weights)(made)
    found = diagnose_plain(recording(1), made)
    assert (found.cause, found.step) == (cause, 2)
    assert detail in found.detail


def test_weights_that_cut_gradients_down_to_one_norm_are_clipping():
    for cap in (0.5, 1.0):
        made = recording(4)
        for number in range(2, STEPS):
            reduced_at(made, number, cap)
        found = diagnose_plain(recording(1), made)
        assert found.cause is Cause.CLIPPING, found
    made = recording(2)
    reduced_with(0.3, 0.7)(made)
    assert diagnose_plain(recording(1), made).cause is Cause.LOSS_WEIGHTING


def reduced_at(made, number, cap):
    """Clips the largest gradients to a share of the largest norm's median, and reduces them."""
    steps = made.at(number)
    norms = [np.hypot.reduce([each.norm for each in step.batches[0].gradients.values()]) for step in steps]
    limit = cap * float(np.median(norms))
    factors = [min(1.0, limit / norm) / len(steps) for norm in norms]
    for name in NAMES:
        parts = [np.array(step.batches[0].gradients[name].sketch) for step in steps]
        total = sum(factor * part for factor, part in zip(factors, parts))
        for step in steps:
            step.used[name] = measure(total)


def test_accumulation_without_scaling_is_told_from_a_sum_that_is_not_divided():
    made = recording(2, accumulate=2)
    reduced_with(0.5, 0.5, 0.5, 0.5)(made)
    assert diagnose_plain(recording(1), made).cause is Cause.ACCUMULATION
    reduced_with(1.0, 1.0, 1.0, 1.0)(made)
    assert diagnose_plain(recording(1), made).cause is Cause.GRADIENT_SCALE


def test_a_reduction_that_is_no_weighted_sum_is_not_called_one():
    made = recording(2)
    for number in range(2, STEPS):
        for step in made.at(number):
            step.used = {name: measure(np.sign(each.sketch)) for name, each in step.used.items()}
    found = diagnose_plain(recording(1), made)
    assert found.cause is Cause.GRADIENTS
    assert "no weighted sum" in found.detail


def test_a_sound_run_on_any_number_of_ranks_has_no_difference():
    for ranks, accumulate in ((1, 1), (2, 1), (2, 2), (4, 1), (8, 1)):
        assert diagnose_plain(recording(1), recording(ranks, accumulate)) is None


def test_a_reported_loss_comes_last():
    reference, made = recording(1), recording(2)
    for run in (reference, made):
        for number in range(STEPS):
            everyone = [loss for step in reference.at(number) for loss in step.batches[0].losses]
            for step in run.at(number):
                step.batches[0].loss = sum(everyone) / len(everyone)
    assert diagnose_plain(reference, made) is None
    for step in made.ranks[0].steps:
        step.batches[0].loss = sum(step.batches[0].losses) / len(step.batches[0].losses)
    found = diagnose_plain(reference, made)
    assert (found.cause, found.step) == (Cause.REPORTED, 0)
    assert "the mean of its own samples" in found.detail
    for step in made.at(3):
        not_reduced(step, 0)
    assert diagnose_plain(reference, made).cause is Cause.NOT_REDUCED


def test_an_operator_is_blamed_only_where_the_reference_differs_from_itself():
    other = changed(rounded)
    assert diagnose_plain(recording(1), other, again=recording(1)).cause is Cause.REDUCTION_ORDER
    again = changed(lambda s, r: rounded(s, r), ranks=1)
    assert diagnose_plain(recording(1), other, again=again).cause is Cause.OPERATOR
    assert diagnose_plain(recording(1), changed(not_reduced), again=again).cause is Cause.NOT_REDUCED


def test_other_software_explains_rounding_but_not_other_samples():
    other = changed(rounded)
    for rank in other.ranks:
        rank.context["torch"] = "3"
    assert diagnose_plain(recording(1), other).cause is Cause.SOFTWARE
    other = changed(CASES["other samples"][0])
    for rank in other.ranks:
        rank.context["torch"] = "3"
    assert diagnose_plain(recording(1), other).cause is Cause.DATA_ORDER


def test_another_class_of_optimizer_is_named_before_the_first_step():
    other = recording(2)
    for rank in other.ranks:
        rank.context["optimizers"] = "torch.optim.adam.Adam default"
    found = diagnose_plain(recording(1), other)
    assert (found.cause, found.step) == (Cause.OPTIMIZER, -1)


def test_another_precision_is_named_before_the_first_step():
    other = recording(2)
    other.ranks[1].context["precision"] = "bfloat16"
    found = diagnose_plain(recording(1), other)
    assert (found.cause, found.step) == (Cause.PRECISION, -1)
    assert "bfloat16 on rank 1" in found.detail


def test_what_counts_as_rounding_follows_from_the_precision():
    def off(step, rank):
        step.batches[0].losses = [value * 1.01 for value in step.batches[0].losses]

    for precision, is_rounding in (("float32", False), ("bfloat16", True)):
        reference, other = recording(1), changed(off)
        for run in (reference, other):
            for rank in run.ranks:
                rank.context["precision"] = precision
        assert (diagnose_plain(reference, other) is None) is is_rounding
    assert diagnose_plain(recording(1), changed(off), tolerance=0.1) is None


def test_a_reference_of_several_processes_is_refused():
    with pytest.raises(ConfigError, match="Record it on one"):
        diagnose_plain(recording(2), recording(2))
