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


def parts(output, target):
    """A loss that gives its parts, each of another form."""
    cross = F.cross_entropy(output, target, reduction="none")
    size = output.square().mean(1)
    return {
        "loss": cross + 0.1 * size,
        "cross": cross.sum() / len(target),
        "size": size,
        "right": correct(output, target),
    }


def train_with_parts(world, strategy="single"):
    run, _, optimizer = begin(strategy=strategy)
    found = []
    for batch in run.batches(dataset()):
        loss, numbers = run.backward(batch, parts, also=["size", "cross", "right"])
        assert list(numbers) == ["size", "cross", "right"]
        assert abs(float(loss - numbers["cross"] - 0.1 * numbers["size"])) < 1e-6
        found.append([float(loss), *map(float, numbers.values())])
        optimizer.step()
        optimizer.zero_grad()
    found.append(run.fingerprint())
    run.close()
    return found


def test_entries_of_the_loss_have_one_value_on_every_layout():
    (alone,) = run_ranks(train_with_parts, 1)
    for strategy, ranks in (("ddp", 3), ("fsdp", 2), ("pipeline", 2)):
        assert run_ranks(train_with_parts, ranks, strategy) == [alone] * ranks, strategy


def test_entries_of_the_loss_are_those_of_the_undivided_batch():
    run = Run(RunOptions.of(global_batch=24, micro_batches=8, strategy="single"), World())
    model = nn.Linear(6, 3)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, targets = torch.randn(24, 6), torch.arange(24) % 3
    for batch in run.batches(torch.utils.data.TensorDataset(inputs, targets)):
        _, numbers = run.backward(batch, parts, also=("cross", "size"))
        output = model(inputs)
        expected = F.cross_entropy(output, targets), output.square().mean()
        assert torch.allclose(torch.stack([*numbers.values()]).float(), torch.stack(expected))
        gradient = torch.autograd.grad(expected[0] + 0.1 * expected[1], model.weight)[0]
        assert torch.allclose(model.weight.grad, gradient, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "also", "more", "sentence"),
    [
        (parts, ["lost"], {}, "has no 'lost'. Return a dict with 'loss', 'lost'"),
        (nn.CrossEntropyLoss(), ["size"], {}, "returned is a Tensor. Return a dict with 'loss', 'size'"),
        (lambda o, t: {"cross": o.mean()}, ["cross"], {}, "has no 'loss'"),
        (parts, "size", {"whole_batch": True}, "with whole_batch=True it is called for the whole batch"),
        (lambda o, t: {"loss": o.mean(), "f1": f1(o, t)}, ["f1"], {}, "'f1' is no mean"),
    ],
)
def test_entries_that_the_loss_does_not_have_are_refused(loss, also, more, sentence):
    run = Run(
        RunOptions.of(global_batch=24, micro_batches=24 if "f1" in also else 4, strategy="single"), World()
    )
    model = nn.Linear(6, 3)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (batch,) = run.batches(torch.utils.data.TensorDataset(torch.randn(24, 6), torch.arange(24) % 3))
    with pytest.raises(ConfigError) as raised:
        run.backward(batch, loss, also=also, **more)
    assert sentence in str(raised.value)
