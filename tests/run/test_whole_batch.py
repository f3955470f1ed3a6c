"""Losses of the whole global batch: the same bits on any layout, and the gradient of one undivided batch."""

import logging
from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.ranks import run_ranks
from tests.run.jobs import begin, dataset
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lockstep.core.world import World
from lockstep.errors import ConfigError
from lockstep.run import Run, RunOptions

SAMPLES, GLOBAL_BATCH = 52, 24


class Towers(nn.Module):
    """As CLIP: two embeddings for each sample, and a learned temperature."""

    def __init__(self, dropout=0.2):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 8))
        self.right = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
        self.temperature = nn.Parameter(torch.tensor([1.5]))

    def forward(self, a, b):
        return F.normalize(self.left(a), dim=1), F.normalize(self.right(b), dim=1), self.temperature.exp()


def clip(output, target):
    left, right, scale = output
    similar = scale * left @ right.T
    numbers = torch.arange(len(similar))
    assert len(target) == len(left)
    return (F.cross_entropy(similar, numbers) + F.cross_entropy(similar.T, numbers)) / 2


def with_hits(output, target):
    """The loss, and how often the other embedding of a sample is the nearest of the batch."""
    found = (output[0] @ output[1].T).argmax(1) == torch.arange(len(output[0]))
    return {"loss": clip(output, target), "hits": (found.sum(), len(found))}


def pairs():
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 4, generator=generator)
    return TensorDataset(a, b, torch.arange(SAMPLES))


def train(world, strategy="single", micro_batches=8, dropout=0.2, **options):
    torch.manual_seed(0)
    model = Towers(dropout)
    recipe = RunOptions.of(
        global_batch=GLOBAL_BATCH, micro_batches=micro_batches, threads=1, strategy=strategy, **options
    )
    run = Run(recipe, world)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    losses, said, handler = [], [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lockstep.run.checks.rehearsal").addHandler(handler)
    for _ in run.epochs(2):
        for batch in run.batches(pairs()):  # the last step has two micro-batches, of three samples and one
            loss, numbers = run.backward(batch, with_hits, whole_batch=True, also=["hits"])
            losses += [float(loss), float(numbers["hits"])]
            optimizer.step()
            optimizer.zero_grad()
    state = {name: each.clone() for name, each in run.state_dict().items()}
    fingerprint = run.fingerprint()
    run.close()
    assert not said, said  # such as that this loss may be no mean over samples
    return losses, fingerprint, state


@pytest.fixture(scope="module")
def alone():
    return train(World())


def test_equal_bits_on_several_ranks(alone):
    for strategy, ranks in (("ddp", 3), ("fsdp", 2)):
        for found in run_ranks(train, ranks, strategy):
            assert found[:2] == alone[:2], strategy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("ddp", 2), ("ddp", 4), ("ddp", 8), ("fsdp", 3), ("dp", 1), ("parameter_server", 3)],
)
def test_equal_bits_under_further_layouts(alone, strategy, ranks):
    options = {"dp": {"replicas": 2}} if strategy == "dp" else {}
    for found in run_ranks(train_with, ranks, strategy, options):
        assert found[:2] == alone[:2]


def train_with(world, strategy, options):
    return train(world, strategy, **options)


def undivided():
    torch.manual_seed(0)
    model = Towers(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    run = Run(RunOptions.of(global_batch=GLOBAL_BATCH, micro_batches=8, strategy="single"), World())
    run.prepare(nn.Linear(1, 1))
    losses, data = [], pairs()
    for _ in run.epochs(2):
        for batch in run.batches(data):
            numbers = torch.cat([torch.from_numpy(part) for part in batch.plan.indices])
            a, b, target = data[numbers]
            found = with_hits(model(a, b), target)
            found["loss"].backward()
            losses += [found["loss"].item(), float(found["hits"][0] / found["hits"][1])]
            optimizer.step()
            optimizer.zero_grad()
    run.close()
    return losses, model.state_dict()


def test_the_gradient_is_that_of_one_undivided_batch():
    losses, state = undivided()
    found, _, trained = train(World(), dropout=0.0)
    assert found == pytest.approx(losses, rel=1e-5)
    for name, tensor in state.items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-5, atol=1e-5)
    separate = train(World(), dropout=0.0, micro_batches=1)[0]
    assert separate == pytest.approx(losses, rel=1e-5)


def test_a_model_of_double_precision_has_its_gradient_too():
    """The loss of the whole batch, and its gradient by the outputs, were rounded to float32."""

    def gradient(whole_batch):
        torch.manual_seed(0)
        run = Run(RunOptions.of(global_batch=8, micro_batches=4 if whole_batch else 1), World())
        model = nn.Linear(3, 2).double()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        numbers = torch.arange(8 * 4, dtype=torch.float64).sin().view(8, 4)
        (batch,) = run.batches(TensorDataset(numbers[:, :3], numbers[:, 3:]))
        square = lambda output, target: (output.exp() - target).square().mean()  # noqa: E731
        loss = run.backward(batch, square, whole_batch=whole_batch)
        run.close()
        return float(loss), model.weight.grad

    (loss, weight), (expected, undivided) = gradient(True), gradient(False)
    assert loss == pytest.approx(expected, rel=1e-14)
    torch.testing.assert_close(weight, undivided, rtol=1e-13, atol=1e-13)


def test_a_model_that_writes_into_its_input_has_the_gradient_of_one_call():
    def gradient(scaled, inputs):
        torch.manual_seed(0)
        model = scaled(nn.Linear(6, 3))
        run = Run(RunOptions.of(global_batch=8, micro_batches=4, strategy="single", checks="off"), World())
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.backward(next(run.batches(TensorDataset(inputs, torch.arange(8)), shuffle=False)), rivals, whole_batch=True)
        run.close()
        return model[0].weight.grad

    class Scaled(nn.Sequential):
        def forward(self, x):
            return super().forward(x.sub_(1).mul_(2))

    def rivals(output, target):
        return F.cross_entropy(output @ output.T, torch.arange(len(output)))

    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(2))
    expected = gradient(nn.Sequential, (inputs - 1) * 2)
    assert torch.equal(gradient(Scaled, inputs), expected)


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, output, target):
        return F.cross_entropy(self.scale * output @ output.T, torch.arange(len(output)))


def changing(output, target):
    return output[0].mean() if len(target) else output[0].sum()


def refused(model, loss, sentence, targets=None, **options):
    run = Run(RunOptions.of(global_batch=8, micro_batches=4, strategy="single", **options), World())
    try:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        data = TensorDataset(torch.randn(16, 6), torch.arange(16) if targets is None else targets)
        with pytest.raises(ConfigError, match=sentence):
            run.backward(next(run.batches(data)), loss, whole_batch=True)
    finally:
        run.close()


class Summed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x):
        return self.inner(x), x.sum()


class Wrapped(nn.Linear):
    def forward(self, x):
        return SimpleNamespace(logits=super().forward(x))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(6, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * self.calls


class Spectrum(nn.Linear):
    def forward(self, x):
        return torch.fft.fft(super().forward(x))


def test_numbers_that_would_not_be_gathered_as_they_are_are_refused():
    """Hashes of 64 bits became equal to their neighbours, and the loss was another one."""
    refused(nn.Linear(6, 3), F.cross_entropy, "whole ones up to 2..53", targets=2**60 + torch.arange(16))
    refused(Spectrum(6, 3), lambda output, target: output.abs().mean(), "takes real numbers")


def test_what_cannot_be_put_together_is_refused():
    refused(nn.Linear(6, 3), Learned(), "The loss uses the parameter")
    refused(Summed(), clip, "without a row for each sample")
    refused(Wrapped(6, 3), clip, "no tensor is found in a SimpleNamespace. Return a tensor, or a tuple")
    refused(Counting(), F.cross_entropy, "computed twice under the same keys")
    refused(nn.Linear(6, 3), lambda output, target: None, "It returned None")
    refused(nn.Linear(6, 3), lambda output, target: {"loss": 0.0, "top": 1.0}, r"also=\['top'\]")
    refused(
        nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)),
        F.cross_entropy,
        "sync_batch_norm",
        sync_batch_norm=True,
    )


def under_pipeline(world):
    run, _, _ = begin(strategy="pipeline")
    with pytest.raises(ConfigError, match="whole_batch=True calls the whole model"):
        run.backward(next(run.batches(dataset())), F.cross_entropy, whole_batch=True)
    run.close()


def test_a_strategy_that_runs_the_model_in_parts_is_refused_on_every_rank():
    run_ranks(under_pipeline, 2)


def gathering(output, target):
    torch.distributed.all_reduce(output[0])
    return clip(output, target)


def by_rank(output, target):
    left, right, scale = output
    numbers = torch.arange(len(left)).roll(torch.distributed.get_rank())
    return F.cross_entropy(scale * left @ right.T, numbers)


def by_size(output, target):
    return clip(output, target) * torch.distributed.get_world_size()


def said_of(world, loss):
    """The refusal or the warnings of a step with this loss."""
    run, _, _ = begin(Towers())
    (step, *_), warned = run.batches(pairs()), []
    logging.getLogger("lockstep").addHandler(handler := logging.Handler())
    handler.emit = lambda record: warned.append(record.getMessage())
    try:
        run.backward(step, loss, whole_batch=True)
    except ConfigError as error:
        return str(error)
    finally:
        run.close()
    return " ".join(warned)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (gathering, "all_reduce is called in the loss of the whole batch (test_whole_batch.py:"),
        (by_rank, "The loss of the whole batch has other bits on other ranks"),
        (by_size, "asks how many processes there are"),
    ],
)
def test_a_loss_that_depends_on_the_processes_is_named_with_whole_batch_too(loss, words):
    """Of a loss written for DistributedDataParallel a run on two processes made other weights without a word."""
    assert any(words in said for said in run_ranks(said_of, 2, loss))


def test_a_loss_may_write_into_the_outputs_of_the_whole_batch():
    """They were leaves of the graph, into which torch lets nothing be written."""
    run, _, _ = begin()
    (batch, *_) = run.batches(dataset())

    def centred(output, target):
        output -= output.mean(0)
        return (output**2).sum(1)

    found = run.backward(batch, centred, whole_batch=True)
    run.close()
    assert float(found) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_and_a_weight_for_each_sample_are_added_up(dtype):
    """The sum of the losses was divided by each weight, and those quotients averaged; bf16 counted 300 for 301."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(602, 6), torch.arange(602) % 3
    run, model, _ = begin(nn.Linear(6, 3), global_batch=602, micro_batches=7)
    (batch,) = run.batches(TensorDataset(inputs, targets), shuffle=False)

    def masked(output, target):
        return F.cross_entropy(output, target, reduction="none"), (torch.arange(602) % 2).to(dtype)

    found = run.backward(batch, masked, whole_batch=True)
    expected = F.cross_entropy(model(inputs), targets, reduction="sum") / 301
    (gradient,) = torch.autograd.grad(expected, [model.weight])
    run.close()
    assert float(found) == pytest.approx(float(expected.detach()), rel=1e-5)
    torch.testing.assert_close(model.weight.grad, gradient)


def mean_of_pairs(output, target):
    similar = output @ output.T - 99 * torch.eye(len(output))
    return F.cross_entropy(similar, target.roll(1) % len(output)), len(output) * (len(output) - 1)


def sum_of_pairs(output, target):
    mean, count = mean_of_pairs(output, target)
    return mean * count, torch.tensor(count)


class Queued:
    """Keeps how often it was called, and how many rows it was given."""

    def __init__(self):
        self.calls, self.rows = 0, []

    def __call__(self, output, target):
        self.calls += 1
        self.rows.append(len(output))
        return mean_of_pairs(output, target)


@pytest.mark.parametrize(("loss", "warns"), [(mean_of_pairs, 1), (sum_of_pairs, 0), (Queued(), 1)])
def test_a_mean_beside_a_count_is_warned_of_once(loss, warns, caplog):
    """It was divided by the count without a word."""
    torch.manual_seed(1)
    run, _, optimizer = begin(nn.Linear(6, 3), global_batch=32, micro_batches=4)
    for batch in run.batches(TensorDataset(torch.randn(96, 6), torch.arange(96) % 32), shuffle=False):
        value = float(run.backward(batch, loss, whole_batch=True))
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    assert value > 0
    said = [record.message for record in caplog.records if "as if the first were a mean" in record.message]
    assert len(said) == warns
    assert all(", 992), which counts as (sum, weight)" in each and ", 240), as if" in each for each in said)
    if isinstance(loss, Queued):
        assert loss.calls == 3 and loss.rows == [32, 32, 32]  # the call for half of the batch left nothing


def test_a_loss_that_is_given_none_and_targets_of_several_lengths_are_told_the_remedy():
    """The one ended in "cannot unpack non-iterable NoneType", the other was said of outputs, which had one shape."""
    run, model, _ = begin(nn.Linear(6, 3), global_batch=8, micro_batches=4)
    (batch,) = run.batches([(torch.ones(6), torch.ones(2 + i // 4)) for i in range(8)], shuffle=False)
    with pytest.raises(TypeError) as given:
        run.backward(
            batch,
            lambda output, data: (output * len(data[1])).mean(),
            forward=lambda data: model(data[0]),
            whole_batch=True,
        )
    with pytest.raises(
        ConfigError, match=r"micro-batch 2 has float32 \[2, 3\] instead of float32 \[2, 2\].*: pad lists"
    ):
        run.backward(batch, lambda output, target: output.mean(), whole_batch=True)
    run.close()
    assert "Let forward= return what the loss needs" in "".join(given.value.__notes__)


class Named(nn.Linear):
    """Its input may come by name, with others."""

    def forward(self, x, **others):
        return super().forward(x)


def target_of(world, wraps):
    """The target of a step whose samples have a class, a name, a constant and an array, in a pair or in ``wraps``."""
    run = Run(RunOptions.of(global_batch=8, micro_batches=4, threads=1), world)
    model = Named(6, 3)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    samples = [{"label": torch.tensor(i), "name": f"n{i}", "kind": ("a", 1), "array": np.ones(2) * i} for i in range(8)]

    def joined(items):
        entries = {name: [item[name] for item in items] for name in ("name", "array")}
        entries |= {"label": torch.stack([item["label"] for item in items]), "kind": items[0]["kind"]}
        x = torch.ones(len(items), 6)
        return (x, entries) if wraps is None else wraps({"x": x, **entries})

    given = []
    (batch,) = run.batches(DataLoader(samples, 8, collate_fn=joined))
    run.backward(batch, lambda output, target: given.append(target) or output.square().mean(), whole_batch=True)
    run.close()
    return given[-1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_is_given_what_all_micro_batches_have_and_nothing_of_its_own_process(ranks):
    """It got the names, or a BatchEncoding, of the first micro-batch of its process: another loss on each number."""
    for target in run_ranks(target_of, ranks, None):
        assert sorted(target.pop("label").tolist()) == list(range(8))
        assert target == {"name": None, "array": None, "kind": ("a", 1)}
    assert run_ranks(target_of, ranks, UserDict) == run_ranks(target_of, ranks, dict) == [None] * ranks


class Info:
    def __init__(self, **held):
        vars(self).update(held)


class Quiet(Info):
    def __repr__(self):
        return "Quiet()"


@pytest.mark.parametrize(
    ("make", "weight"),
    [
        (lambda rows: Info(weight=2.0, parts=[{"a": None}]), 2.0),
        (lambda rows: Info(weight=rows), None),
        (lambda rows: Quiet(weight=rows), None),
        (lambda rows: Info(inner=Info(weight=str(rows))), None),
        (lambda rows: Info(inner=Info(weight=torch.tensor(2.0))), None),
        (lambda rows: [Info(weight=rows)], None),
    ],
)
def test_an_object_that_is_not_the_same_in_every_micro_batch_is_none_for_the_loss(make, weight):
    """The loss got that of the first micro-batch, whose numbers counted for the whole batch, without a word."""

    def joined(rows):
        inputs = torch.stack([x for x, _ in rows])
        return inputs, (torch.stack([y for _, y in rows]), make(float(rows[0][1])))

    run, _, _ = begin(nn.Linear(6, 3), global_batch=8, micro_batches=4)
    given, samples = [], TensorDataset(torch.randn(8, 6), torch.arange(8))
    (batch,) = run.batches(DataLoader(samples, 8, collate_fn=joined))
    run.backward(batch, lambda output, target: given.append(target[1]) or output.square().mean(), whole_batch=True)
    run.close()
    assert (given[-1] and given[-1].weight) == weight
