"""Recordings made by hand, of a loop whose gradient of sample i is a fixed vector."""

import copy
from itertools import pairwise

import numpy as np

from lockstep.verify.plain import BatchRecord, Measure, RankRecord, Recording, StepRecord

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


def other_samples(step, rank):
    """From the second epoch on."""
    if step.step >= 3:
        step.batches[0].samples = [(sample + 7) % SAMPLES for sample in step.batches[0].samples]
