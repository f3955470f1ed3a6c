"""Numbers beside the loss of a step have one value on every layout, as the loss has."""

import pytest
import torch
from tests.ranks import run_ranks
from tests.run.jobs import begin, correct, dataset
from torch import nn
from torch.nn import functional as F

from lockstep.core.world import World
from lockstep.errors import ConfigError
from lockstep.run import Run, RunOptions


def confidence(output, target):
    return output.softmax(1).amax(1).sum(), len(target)


def train(world, strategy="single"):
    run, _, optimizer = begin(strategy=strategy)
    found, metrics = [], {"accuracy": correct, "loss": nn.CrossEntropyLoss(), "confidence": confidence}
    for batch in run.batches(dataset()):  # the last step has one short micro-batch
        loss, numbers = run.backward(batch, nn.CrossEntropyLoss(), also=metrics)
        assert list(numbers) == list(metrics) and float(loss) == float(numbers["loss"])
        found.append([float(value) for value in numbers.values()])
        optimizer.step()
        optimizer.zero_grad()
    found.append(run.fingerprint())
    run.close()
    return found


def plain(world):
    run, _, optimizer = begin(strategy="single")
    for batch in run.batches(dataset()):
        run.backward(batch, nn.CrossEntropyLoss())
        optimizer.step()
        optimizer.zero_grad()
    fingerprint = run.fingerprint()
    run.close()
    return fingerprint


def test_they_have_one_value_on_every_layout_and_change_no_bit_of_the_training():
    (alone,) = run_ranks(train, 1)
    assert alone[-1] == run_ranks(plain, 1)[0]
    assert all(0 <= accuracy <= 1 and confidence > 1 / 3 for accuracy, _, confidence in alone[:-1])
    for strategy, ranks in (("ddp", 3), ("fsdp", 2)):
        assert run_ranks(train, ranks, strategy) == [alone] * ranks, strategy


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("pipeline", 2), ("parameter_server", 3), ("dp", 1)])
def test_they_have_one_value_under_further_strategies(strategy, ranks):
    (alone,) = run_ranks(train, 1)
    assert run_ranks(train, ranks, strategy) == [alone] * ranks


def f1(output, target):
    found, there = output.argmax(1) == 1, target == 1
    return 2 * (found & there).sum() / (found.sum() + there.sum())


@pytest.mark.parametrize(
    ("also", "sentence"), [({"f1": f1}, "'f1' is no mean"), ({"f1": 1.0}, "was given a float")]
)
def test_what_is_no_mean_is_refused(also, sentence):
    run = Run(RunOptions.of(global_batch=24, micro_batches=24, strategy="single"), World())
    model = nn.Linear(6, 3)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        with pytest.raises(ConfigError, match=sentence):
            run.backward(next(run.batches(dataset())), F.cross_entropy, also=also)
    finally:
        run.close()
