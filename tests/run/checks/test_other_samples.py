"""Models whose output, or whose loss, for a sample depends on the others of its micro-batch are told, and no others."""

import copy
import io
import logging
import random
import threading
from functools import partial

import numpy as np
import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy, mse_loss, pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lockstep
from lockstep.run import Run, RunOptions

pytestmark = pytest.mark.timeout(180)
MIXES, KEEPS, BY_GRADIENT = "depends on the other samples", "what else the forward pass leaves", "not by its gradient"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


class Compares(nn.Module):
    """A layer whose output for a sample may depend on the others."""

    def __init__(self, how):
        super().__init__()
        self.how, self.inner = how() if isinstance(how, partial) else how, nn.Linear(6, 4)

    def forward(self, x):
        return self.how(self.inner(x))


class Attends(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=batch_first, dropout=0.1)

    def forward(self, x):
        pair = torch.stack([x, x.cos()], 1)
        return self.inner(pair, pair, pair, need_weights=False)[0].mean(1)


class InTraining(nn.Module):
    """Changes its input in training mode only, as layers with random numbers do."""

    def __init__(self, how):
        super().__init__()
        self.how, self.drop = how, nn.Dropout(0.3)

    def forward(self, x):
        return self.how(self.drop(x)) if self.training else x


def cross_of(x):
    """Takes as many rows as it was made for."""
    return x.view(8, 4) - x.mean(0)


def train(model, loss, *, forward=None, **options):
    torch.manual_seed(0)
    run = lockstep.init(**{"global_batch": 32, "micro_batches": 4, **options})
    _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(1)
    samples = TensorDataset(torch.randn(64, 6, generator=generator), torch.arange(64) % 4)
    for _ in run.epochs(1):
        for batch in run.batches(samples):
            run.backward(batch, loss, forward=forward)
            optimizer.step()
            optimizer.zero_grad()
    run.close()


@pytest.mark.parametrize(
    ("how", "is_told"),
    [
        (lambda x: x - x.mean(0), True),
        (lambda x: x / x.abs().sum(), True),
        (lambda x: x + x.flip(0), True),
        (lambda x: x + x.cumsum(0), True),
        (lambda x: F.batch_norm(x, None, None, training=True), True),
        (partial(Attends, batch_first=False), True),
        (partial(InTraining, lambda x: x - x.mean(0)), True),
        (partial(InTraining, lambda x: x + 0.1 * torch.randn_like(x) - x.mean(0)), True),
        (cross_of, True),
        (partial(Attends, batch_first=True), False),
        (lambda x: x - x.mean(1, keepdim=True), False),
        (lambda x: x * 0, False),
        (lambda x: x.argmax(1, keepdim=True) * x, False),
        (lambda x: x.view(8, 4), False),
        (partial(InTraining, lambda x: x * (torch.rand(len(x), 1) + 0.8).floor() + torch.randn(x.shape)), False),
        (partial(InTraining, lambda x: 0.7 * x + 0.3 * x[torch.randperm(len(x))]), False),
        (partial(InTraining, lambda x: x * float(np.random.rand()) + random.random()), False),
        (partial(InTraining, lambda x: F.gumbel_softmax(x) + torch.poisson(x.detach().exp())), False),
        (partial(nn.BatchNorm1d, 4), False),
    ],
)
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}])
def test_a_model_that_compares_samples_is_told(how, is_told, options, caplog):
    train(Compares(how), cross_entropy, **options)
    assert caplog.text.count(MIXES) == is_told


@pytest.mark.parametrize("micro_batches", [1, 32])
def test_one_micro_batch_mixes_nothing_and_single_samples_are_put_together(micro_batches, caplog, tmp_path):
    """A run of one micro-batch that writes checkpoints was told of it, too."""
    train(Compares(lambda x: x - x.mean(0)), cross_entropy, micro_batches=micro_batches, directory=tmp_path)
    assert caplog.text.count(MIXES) == (micro_batches > 1) == len(caplog.records)


def test_outputs_that_are_rounding_alone_mix_nothing(caplog):
    """As those of a policy in relation to its reference (DPO), before the first step: they differ by the batch size."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    reference = copy.deepcopy(model).requires_grad_(False)

    def forward(data):
        size = 0.7 * len(data[0])  # rounds as matrix products do, whose kernels depend on it
        return model(data[0]) * size / size - reference(data[0])

    train(model, lambda output, data: -F.logsigmoid(output), forward=forward)
    assert MIXES not in caplog.text


def test_a_mode_in_which_samples_are_mixed_is_named(caplog):
    train(Compares(partial(InTraining, lambda x: x - x.mean(0))), cross_entropy)
    assert f"{MIXES} of its micro-batch in training mode." in caplog.text
    train(Compares(lambda x: x - x.mean(0)), cross_entropy)
    assert f"{MIXES} of its micro-batch, also in evaluation mode." in caplog.text


class Keeps(nn.Module):
    """Keeps a term for the loss."""

    def __init__(self, term):
        super().__init__()
        self.inner, self.term, self.kept = nn.Linear(6, 4), term, None

    def forward(self, x):
        x = self.inner(x)
        self.kept = self.term(F.dropout(x, 0.5, self.training))
        return x


def balance(x):
    """As of experts: the part of the samples that each gets, times its mean probability."""
    return (F.one_hot((5 * x).argmax(1), 4).float().mean(0) * (5 * x).softmax(1).mean(0)).sum()


@pytest.mark.parametrize(
    ("term", "is_told"),
    [
        (balance, True),
        (lambda x: x.square().sum(), True),
        (lambda x: x.square().sum(1).mean(), False),
        (lambda x: mse_loss(x, x.round().detach()) + 1, False),
    ],
)
@pytest.mark.parametrize("micro_batches", [2, 16])
def test_a_term_that_the_model_keeps_for_the_loss_is_judged_with_it(term, is_told, micro_batches, caplog):
    """It stays the same where the loss is called on rows of the output, which said nothing."""
    model = Keeps(term)
    train(model, lambda output, target: cross_entropy(output, target) + model.kept, micro_batches=micro_batches)
    assert [KEEPS in each.getMessage() for each in caplog.records] == [True] * is_told


def adversarial(model, reduction):
    def forward(data):
        x = data[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(cross_entropy(model(x), data[1], reduction=reduction), x)
        return model(data[0] + 0.5 * gradient)

    return forward


@pytest.mark.parametrize(("reduction", "is_told"), [("mean", True), ("sum", False)])
def test_the_gradient_of_a_mean_in_the_forward_pass_is_told(reduction, is_told, caplog):
    model = nn.Linear(6, 4)
    train(model, lambda output, data: cross_entropy(output, data[1]), forward=adversarial(model, reduction))
    assert [MIXES in each.getMessage() for each in caplog.records] == [True] * is_told


@pytest.mark.parametrize(("is_detached", "is_told"), [(True, True), (False, False)])
def test_a_loss_of_the_forward_pass_is_judged_by_the_gradient_of_the_parameters(is_detached, is_told, caplog):
    model = nn.Linear(6, 4)

    def forward(data):
        output = model(data[0])
        loss, size = cross_entropy(output, data[1]), output.square().mean()
        return loss + size * ((loss / size).detach() if is_detached else 0.3)

    train(model, lambda output, data: output, forward=forward)
    assert [BY_GRADIENT in each.getMessage() for each in caplog.records] == [True] * is_told


class Sentences(Dataset):
    """Samples of several lengths, or of one."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((1 + index % self.lengths, 6), 0.1 * index), torch.full(
            (1 + index % self.lengths,), index % 4
        )


class Pictures(Sentences):
    """Have one label each."""

    def __getitem__(self, index):
        return super().__getitem__(index)[0], index % 4


class Pooled(nn.Linear):
    def __init__(self):
        super().__init__(6, 4)

    def forward(self, x):
        return super().forward(x.mean(1))


@pytest.mark.parametrize(("lengths", "is_mean"), [(1, True), (3, True), (3, False)])
def test_a_number_of_single_samples_of_several_lengths_is_told_not_to_be_known(lengths, is_mean, caplog):
    run = lockstep.init(global_batch=4, micro_batches=4)
    model = nn.Linear(6, 4)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def over_tokens(output, target):
        loss = cross_entropy(output.flatten(0, 1), target.flatten())
        return loss if lengths == 1 or not is_mean else loss.view(1)

    for batch in run.batches(Sentences(lengths), shuffle=False):
        run.backward(batch, over_tokens)
    run.close()
    told = [each.getMessage() for each in caplog.records if "over_tokens" in each.getMessage()]
    assert ["is one number for each micro-batch, of a single sample" in each for each in told] == [True] * (not is_mean)


@pytest.mark.parametrize(("reduction", "is_told"), [("mean", False), ("sum", True)])
def test_single_samples_of_several_lengths_are_judged_by_outputs_of_one_shape(reduction, is_told, caplog):
    """As of images of several sizes, each with an output of one row."""
    run = lockstep.init(global_batch=4, micro_batches=4)
    model = Pooled()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in run.batches(Pictures(3), shuffle=False):
        run.backward(batch, lambda output, target: cross_entropy(output, target, reduction=reduction))
    run.close()
    told = [each.getMessage() for each in caplog.records if "The loss" in each.getMessage()]
    assert [" is a sum over the samples" in each for each in told] == [True] * is_told


class Detector(nn.Linear):
    """Gives a dict of losses in training, else a list; its targets are dicts with one label or more for each image."""

    def __init__(self):
        super().__init__(6, 4)

    def forward(self, images, targets):
        outputs = super().forward(torch.stack([image.mean(0) for image in images]))
        if not self.training:
            return list(outputs)
        counts = torch.tensor([len(each["labels"]) for each in targets])
        labels = torch.cat([each["labels"] for each in targets])
        return {"boxes": cross_entropy(outputs.repeat_interleave(counts, 0), labels), "size": outputs.square().mean()}


class Detections(Sentences):
    """Images with 2, 2, 1 and 4 labels and so on."""

    def __getitem__(self, index):
        labels = torch.arange((2, 2, 1, 4)[index % 4]) % 4
        return torch.full((3, 6), 0.1 * index), {"labels": labels, "number": index}


@pytest.mark.parametrize(
    ("name", "is_pair", "is_told"), [("boxes", False, True), ("boxes", True, False), ("size", False, False)]
)
def test_a_list_of_targets_is_cut_by_samples_also_where_their_boxes_are_as_many(name, is_pair, is_told, caplog):
    run = lockstep.init(global_batch=8, micro_batches=4)
    model = Detector()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def loss_fn(losses, data):
        count = sum(len(each["labels"]) for each in data[1])
        return (losses[name] * count, torch.tensor(float(count))) if is_pair else losses[name]

    for batch in run.batches(DataLoader(Detections(0), 8, collate_fn=lambda items: tuple(zip(*items)))):
        run.backward(batch, loss_fn, forward=lambda data: model(*data))
    run.close()
    told = [each.getMessage() for each in caplog.records if "The loss" in each.getMessage()]
    assert ["is not a mean over samples" in each for each in told] == [True] * is_told


def test_nested_tensors_are_computed_and_not_cut(caplog):
    """They have as many rows as there are samples, and torch takes no slice of these."""
    run = lockstep.init(global_batch=8, micro_batches=4)
    model = nn.Linear(6, 4)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def collate(items):
        images, labels = zip(*items)
        return torch.nested.nested_tensor([*images], layout=torch.jagged), torch.tensor(labels)

    for batch in run.batches(DataLoader(Pictures(3), 8, collate_fn=collate)):
        run.backward(
            batch,
            lambda output, data: cross_entropy(torch.stack([each.mean(0) for each in output.unbind()]), data[1]),
            forward=lambda data: model(data[0]),
        )
    run.close()
    assert not [each for each in caplog.records if "is not a mean" in each.getMessage()]


def test_what_was_said_of_one_loss_is_not_said_at_length_of_another(caplog):
    run = lockstep.init(global_batch=32, micro_batches=4)
    model = nn.Linear(6, 4)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def one(output, target):
        return cross_entropy(output, target, reduction="sum")

    def other(output, target):
        return output.square().sum()

    for batch in run.batches(TensorDataset(torch.randn(64, 6), torch.arange(64) % 4)):
        run.backward(batch, one)
        run.backward(batch, other)
    run.close()
    (first, second) = [each.getMessage() for each in caplog.records if "loss" in each.getMessage()]
    assert ".one is a sum over the samples" in first
    assert second.startswith("The same holds for the loss") and second.endswith(".other.")


def centred(x):
    return x - x.mean(0)


def dropping_rows(x):
    return x * torch.rand(len(x), 1)


def warnings_of(world, strategy, how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Compares(how), nn.BatchNorm1d(4), nn.Linear(4, 4))
    recipe = {"global_batch": 32, "micro_batches": 4, "threads": 1}
    run = Run(RunOptions.of(strategy=strategy, **recipe), world)
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lockstep").addHandler(handler)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    samples = TensorDataset(torch.randn(48, 6), torch.arange(48) % 4)
    for batch in run.batches(samples):
        run.backward(batch, cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    fingerprint = run.fingerprint()
    run.close()
    return sum(MIXES in each for each in said), fingerprint


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline", "parameter_server"])
def test_samples_that_are_compared_are_told_under_every_strategy(strategy):
    for how, is_told in ((centred, True), (InTraining(dropping_rows), False)):
        (told, *bits), (others, *_) = run_ranks(warnings_of, 2, strategy, how)
        assert (told, others) == (is_told, 0)
        assert bits == list(run_ranks(warnings_of, 1, "single", how)[0][1:])


class HasBuffer(nn.Module):
    """A layer with a buffer that its forward pass changes."""

    def __init__(self, first, change):
        super().__init__()
        self.change, self.inner = change, nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.register_buffer("kept", first)

    def forward(self, x):
        if self.training:
            self.kept = self.change(self.kept, x.detach())
        return self.inner(x)


def with_rows(table, x):
    table = table.clone()
    table[(x[:, 0] * 1000).long() % len(table)] = x
    return table


@pytest.mark.parametrize("first", [torch.zeros(6), torch.ones(6)])
@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        (lambda kept, x: 0.9 * kept + 0.1 * x.mean(0), False),
        (lambda kept, x: 0.9 * kept + 0.1 * x.var(0), False),
        (lambda kept, x: x.sum(0), False),
        (lambda kept, x: x.mean(0), False),
        (lambda kept, x: kept * 0.999, False),
        (lambda kept, x: 0.9 * kept + 0.1 * torch.randn(6), False),
        (lambda kept, x: 0.9 * kept + 0.1 * x.sum(0), True),
        (lambda kept, x: kept + x.abs().sum(0), True),
        (lambda kept, x: torch.cat([kept[3:], x[:3, 0]]), True),
    ],
)
def test_a_running_buffer_that_is_no_mean_is_told(first, change, is_told, caplog):
    run = lockstep.init(global_batch=32, micro_batches=4, running_buffers="kept")
    torch.manual_seed(0)
    model = HasBuffer(first.clone(), change)
    _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    samples = TensorDataset(torch.randn(32, 6), torch.arange(32) % 4)
    for _ in run.epochs(1):
        for batch in run.batches(samples):
            run.backward(batch, cross_entropy)
            optimizer.step()
    run.close()
    assert ("'kept' in running_buffers" in caplog.text) == is_told


def test_a_table_in_running_buffers_is_told(caplog):
    """As of the losses or outputs of single samples: an average would mix new rows with those of the step before."""
    run = lockstep.init(global_batch=32, micro_batches=2, running_buffers="kept")
    torch.manual_seed(0)
    model = HasBuffer(torch.zeros(100, 6), lambda kept, x: with_rows(kept, x))
    _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in run.batches(TensorDataset(torch.randn(32, 6), torch.arange(32) % 4)):
        run.backward(batch, cross_entropy)
        optimizer.step()
    run.close()
    assert "'kept' in running_buffers" in caplog.text


def test_no_rank_calls_a_synchronised_model_alone():
    """``forward=`` may switch it to training mode, in which all ranks meet; so the others would be waited for."""
    run = lockstep.init(global_batch=8, micro_batches=2, sync_batch_norm=True)
    torch.manual_seed(0)
    model, threads = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), io.StringIO()  # a file is not put back
    _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def forward(data):
        threads.write(threading.current_thread().name + "\n")
        return model.train()(data[0])

    for batch in run.batches(TensorDataset(torch.randn(8, 6), torch.arange(8) % 4)):
        run.backward(batch, lambda output, data: cross_entropy(output, data[1]), forward=forward)
        optimizer.step()
    run.close()
    assert all(name.startswith("lockstep-micro-batch") for name in threads.getvalue().split())


class Sequences(Dataset):
    """Sequences of 2 to 6 tokens."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.arange(1, 3 + index % 5)


def padded(sequences):
    return pad_sequence(sequences, batch_first=True)


def padded_at_left(sequences):
    return pad_sequence([each.flip(0) for each in sequences], batch_first=True).flip(1)


def padded_to_6(sequences):
    return pad(whole := padded(sequences), (0, 6 - whole.shape[1]))


def at_random(sequences):
    return padded([each if torch.rand(()) < 0.5 else each[:1] for each in sequences])


def of_two(sequences):
    first, second, *others = sequences
    return padded([first, second, *others])


class Tagger(nn.Module):
    def __init__(self, bidirectional=False, drops=0.0):
        super().__init__()
        self.tokens, self.drops = nn.Embedding(10, 4), drops
        self.rnn = nn.LSTM(4, 4, batch_first=True, bidirectional=bidirectional)

    def forward(self, x):
        return F.dropout(self.rnn(self.tokens(x))[0], self.drops)


def over_positions(output, tokens):
    return (output.sum(2) - tokens).square().mean()


def over_tokens(output, tokens):
    return ((output.sum(2) - tokens).square() * (tokens > 0)).sum(), (tokens > 0).sum()


@pytest.mark.parametrize(
    ("model", "collate", "loss", "is_told"),
    [
        (Tagger, padded, over_positions, True),
        (Tagger, padded, over_tokens, False),
        (Tagger, padded_to_6, over_positions, False),
        (partial(Tagger, True), padded, over_tokens, True),
        (partial(Tagger, True), padded_at_left, over_tokens, True),
        (partial(Tagger, True), padded_to_6, over_tokens, False),
        (partial(Tagger, False, 0.1), padded, over_positions, False),
        (Tagger, at_random, over_tokens, False),
        (Tagger, of_two, over_tokens, False),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loss_that_depends_on_the_padding_of_a_micro_batch_is_told(model, collate, loss, is_told, workers, caplog):
    """The loss was another one than that of the undivided batch, and nothing told."""
    run = lockstep.init(global_batch=8, micro_batches=4)
    torch.manual_seed(0)
    model = model()
    _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = DataLoader(Sequences(), 8, collate_fn=collate, num_workers=workers)
    for _ in run.epochs(2):
        for batch in run.batches(loader):
            run.backward(batch, loss, forward=model)
            optimizer.step()
    run.close()
    assert caplog.text.count("depends on how far the collate function pads it") == is_told


@pytest.mark.parametrize(("precision", "is_told"), [("fp32", True), ("bf16", False)])
def test_padding_that_changes_a_loss_by_rounding_is_not_told(precision, is_told, caplog):
    run = lockstep.init(global_batch=8, micro_batches=4, precision=precision)
    torch.manual_seed(0)
    model = Tagger()
    _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))

    def loss(output, tokens):
        total, count = over_tokens(output, tokens)
        return total * (1.02 if (tokens == 0).any() else 1.0), count

    for batch in run.batches(DataLoader(Sequences(), 8, collate_fn=padded)):
        run.backward(batch, loss, forward=model)
        optimizer.step()
    run.close()
    assert ("depends on how far the collate function pads it" in caplog.text) == is_told
