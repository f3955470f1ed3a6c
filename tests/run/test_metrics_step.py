"""Numbers beside the loss of a step have one value on every layout, as the loss has."""

import functools

import pytest
import torch
from tests.ranks import run_ranks
from tests.run.jobs import begin, correct, dataset
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep.core.world import World
from lockstep.errors import ConfigError, NonFiniteError
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


@pytest.mark.parametrize(("also", "sentence"), [({"f1": f1}, "'f1' is not a mean"), ({"f1": 1.0}, "was given a float")])
def test_what_is_no_mean_is_refused(also, sentence):
    run = Run(RunOptions.of(global_batch=24, micro_batches=24, strategy="single"), World())
    model = nn.Linear(6, 3)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        with pytest.raises(ConfigError, match=sentence):
            run.backward(next(run.batches(dataset())), F.cross_entropy, also=also)
    finally:
        run.close()


def precision(output, target, least=1):
    found = output.argmax(1) == 1
    return (found & (target == 1)).sum() / found.sum().clamp(min=least)


@pytest.mark.parametrize("function", [precision, functools.partial(precision, least=0)])
def test_a_metric_of_which_nothing_could_be_told_is_looked_at_again(function):
    """As long as a model finds nothing, its precision is 0, or 0/0, as a mean may be. Later values were wrong."""
    run = Run(RunOptions.of(global_batch=24, micro_batches=4, strategy="single"), World())
    model = nn.Linear(6, 3)
    nn.init.constant_(model.bias[1], -100.0)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = dataset()
    try:
        for batch in run.batches(data):
            run.backward(batch, F.cross_entropy, also={"f": function})
            optimizer.zero_grad()
        assert not run.evaluate(data, function) > 0
        with torch.no_grad():
            model.bias[1] = 0.0
        for _ in range(2):  # a refusal that was caught settles nothing
            name = getattr(function, "__name__", "metric")
            with pytest.raises(ConfigError, match=rf"The metric {name!r} is"):
                run.evaluate(data, function)
        with pytest.raises(ConfigError, match=r"The metric 'f' is"):
            run.backward(next(run.batches(data)), F.cross_entropy, also={"f": function})
    finally:
        run.close()


def test_a_metric_is_looked_at_in_later_micro_batches_too():
    """Targets that are ignored may come late, as padding does where samples are sorted by length."""
    inputs, targets = torch.randn(64, 6), torch.arange(64) % 3
    targets[32::3] = -100
    run = Run(RunOptions.of(global_batch=8, micro_batches=4, strategy="single"), World())
    run.prepare(nn.Linear(6, 3))
    try:
        with pytest.raises(ConfigError, match="is not a mean over samples"):
            run.evaluate(TensorDataset(inputs, targets), F.cross_entropy)
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
        (lambda o, t: {"loss": o.mean(), "f1": f1(o, t)}, ["f1"], {}, "'f1' is not a mean"),
    ],
)
def test_entries_that_the_loss_does_not_have_are_refused(loss, also, more, sentence):
    run = Run(RunOptions.of(global_batch=24, micro_batches=24 if "f1" in also else 4, strategy="single"), World())
    model = nn.Linear(6, 3)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (batch,) = run.batches(torch.utils.data.TensorDataset(torch.randn(24, 6), torch.arange(24) % 3))
    with pytest.raises(ConfigError) as raised:
        run.backward(batch, loss, also=also, **more)
    assert sentence in str(raised.value)


def writing(world, strategy="single"):
    """Numbers of functions that write into what they are given, and those of the same without."""
    run, _, optimizer = begin(strategy=strategy)
    found = []
    for batch in run.batches(dataset()):
        found.append(float(run.backward(batch, lambda o, t: F.cross_entropy(o, t.sub_(1) + 1))))
        optimizer.step()
        optimizer.zero_grad()
    metrics = (
        lambda o, t: o.sigmoid_()[:, 0],
        lambda o, t: F.cross_entropy(o.add_(1), t.add_(1) - 1),
        lambda o, t: o.sigmoid()[:, 0],
        lambda o, t: F.cross_entropy(o + 1, t),
    )
    found += [float(run.evaluate(dataset(), metric)) for metric in metrics]
    run.close()
    return found


def test_losses_and_metrics_may_write_into_what_they_are_given():
    """The check of the kind of mean calls them several times: the numbers depended on the number of processes."""
    (alone,) = run_ranks(writing, 1)
    assert alone[-4:-2] == alone[-2:]
    assert run_ranks(writing, 2, "ddp") == [alone] * 2


class Centred(nn.Module):
    """Writes into its input."""

    def forward(self, x):
        x -= x.mean(1, keepdim=True)
        return x.mul_(2)


def test_a_model_that_writes_into_its_input_is_evaluated():
    """It was refused as one that keeps something from one call to the next."""
    run, model, _ = begin(nn.Sequential(Centred(), nn.Linear(6, 3)))
    found = float(run.evaluate(dataset(), nn.CrossEntropyLoss()))
    with torch.no_grad():
        output = model(dataset().tensors[0].clone())
    assert found == pytest.approx(float(F.cross_entropy(output, dataset().tensors[1])), rel=1e-5)
    run.close()


def test_a_metric_that_writes_into_what_the_backward_pass_needs_is_named():
    run, _, _ = begin()
    (batch, *_) = run.batches(dataset())
    with pytest.raises(ConfigError, match=r"The metric 'first' of run\.backward writes into the output"):
        run.backward(batch, lambda o, t: (o**2).mean(1), also={"first": lambda o, t: o.sigmoid_()[:, 0]})
    run.close()


def test_an_error_of_a_metric_beside_the_loss_tells_what_it_was_given():
    """Only one of ``run.evaluate`` was explained."""
    run, _, _ = begin()
    (batch, *_) = run.batches(dataset())
    with pytest.raises(KeyError) as raised:
        run.backward(batch, F.cross_entropy, also={"first": lambda o, t: {}["missing"]})
    assert any("called the metric 'first' as metric(output, target), with" in each for each in raised.value.__notes__)
    run.close()


def test_a_metric_that_writes_into_what_others_are_given_is_named():
    """The others were of what it had written: they depended on the order of a dict."""
    run, _, _ = begin()
    metrics = {2: lambda o, t: o.sigmoid_()[:, 0], "loss": F.cross_entropy}
    with pytest.raises(ConfigError, match=r"The metric 2 of run\.evaluate writes into the output or the target, w"):
        run.evaluate(dataset(), metrics)
    values = run.evaluate(dataset(), dict(reversed(metrics.items())))  # the last may
    assert values["loss"] == run.evaluate(dataset(), F.cross_entropy)
    (batch, *_) = run.batches(dataset())
    with pytest.raises(ConfigError, match=r"The metric 2 of run\.backward writes into .* other metrics"):
        run.backward(batch, F.cross_entropy, also=metrics)
    run.close()


def test_a_step_without_weight_is_named_as_one():
    """All targets were left out, and an operation whose derivative is infinite was to be looked for."""
    run, _, _ = begin()
    (batch, *_) = run.batches(dataset())
    with pytest.raises(NonFiniteError, match="The loss of step 0 has no mean, since its weights add up to 0"):
        run.backward(batch, lambda o, t: (o.sum() * 0, t.sum() * 0))
        run.save()
    run.close()
