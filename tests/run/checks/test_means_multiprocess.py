"""Metrics of a whole set have one value on every layout; what is not a mean over samples is refused on every rank."""

import logging
import re
from collections import UserDict
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lockstep.errors import ConfigError
from lockstep.run import Run, RunOptions

pytestmark = pytest.mark.timeout(180)


class F1:
    """As one of torchmetrics: it would wait for other ranks in ``compute``."""

    def __init__(self):
        self.sync_on_compute = self._to_sync = True

    def reset(self):
        self.outputs, self.targets = [], []

    def update(self, output, target):
        self.outputs.append(output)
        self.targets.append(target)

    def compute(self):
        assert not self._to_sync and not self.sync_on_compute
        return f1(torch.cat(self.outputs), torch.cat(self.targets))


def f1(output, target):
    found, there = output.argmax(1) == 1, target == 1
    return 2 * (found & there).sum() / (found.sum() + there.sum())


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def begin(world, strategy="ddp", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    recipe = {"global_batch": 32, "micro_batches": 4, "threads": 1, **options}
    run = Run(RunOptions.of(strategy=strategy, **recipe), world)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return run, model, optimizer, samples()


def samples():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(100, 4, generator=generator), torch.randint(0, 2, (100,), generator=generator))


def evaluated(world, strategy):
    run, _, _, data = begin(world, strategy)
    values = run.evaluate(data, {"loss": F.cross_entropy, "f1": F1(), "accuracy": accuracy})
    outputs = run.predict(data)
    expected = None if outputs is None else f1(outputs, data.tensors[1]).item()
    run.close()
    return values, expected


def test_a_metric_of_the_whole_set_sees_all_samples_on_any_layout():
    ((values, expected),) = run_ranks(evaluated, 1, "single")
    assert list(values) == ["loss", "f1", "accuracy"] and values["f1"] == expected
    for strategy, ranks in (("ddp", 3), ("pipeline", 2)):
        assert {str(found) for found, _ in run_ranks(evaluated, ranks, strategy)} == {str(values)}


class Hits:
    """Counts beside the mean that it gives."""

    def __init__(self):
        self.hits = 0

    def __call__(self, output, target):
        self.hits += int((output.argmax(1) == target).sum())
        return accuracy(output, target)


def warned(world):
    run, _, optimizer, data = begin(world)
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lockstep").addHandler(handler)
    run.evaluate(data, {"accuracy": accuracy, "hits": Hits()})
    of_evaluation = [text for text in said if text.startswith("A metric changes")]
    for batch in run.batches(data):
        run.backward(batch, F.cross_entropy, also={"plain": accuracy, "counted": Hits()})
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return of_evaluation, [text for text in said if text.startswith("A metric changes")]


def test_a_metric_that_counts_by_itself_is_named_on_the_main_rank_in_an_evaluation_and_in_steps():
    """A metric counts one rank's samples; the mean that it returns is of all."""
    (first, everything), others = run_ranks(warned, 2)
    assert others == ([], []) and (len(first), len(everything)) == (1, 2), everything
    assert "the attribute 'hits' of the metric 'hits' (from " in first[0] and "'accuracy'" not in first[0]
    ((alone, _),) = run_ranks(warned, 1)
    assert alone == []


class Noting(nn.Linear):
    """A layer that notes its last output, as for a plot of attention."""

    def forward(self, rows):
        self.last = super().forward(rows)
        return self.last


def collected(world):
    run, data = Run(RunOptions.of(global_batch=32, micro_batches=4, seed=0, threads=1), world), samples()
    noting = Noting(4, 2)
    model, _ = run.prepare(noting, torch.optim.SGD(noting.parameters(), lr=0.1))
    said, handler, features = [], logging.Handler(), []
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lockstep").addHandler(handler)

    def own_forward(data):
        features.append(model(data[0]))
        return features[-1]

    def keep(output):
        features.append(output)
        return output

    run.predict(data)
    run.predict(data, lambda output: output.argmax(1), forward=lambda data: model(data[0]))
    told = [len(said)]
    run.evaluate(data, lambda output, data: accuracy(output, data[1]), forward=own_forward)
    told.append(len(said))
    run.predict(data, keep)
    run.predict(data, keep)
    run.close()
    return told, said


def test_an_evaluation_whose_own_functions_collect_is_told_once_of_each():
    """A script that kept features beside the outputs had those of one rank's samples, without a word."""
    (told, said), (_, other) = run_ranks(collected, 2)
    assert (told, len(said), other) == ([0, 1], 2, []), said
    assert all(each.startswith("An evaluation changes the variable 'features' of ") for each in said), said
    assert "of forward= (from " in said[0] and "of keep= (from " in said[1]
    ((_, alone),) = run_ranks(collected, 1)
    assert alone == []


def refused(world):
    run, _, _, data = begin(world)
    seen, found = [], {}

    def noted(output, target):
        seen.append(len(target))
        return accuracy(output, target)

    for name, metric in {"f1": f1, "hits": lambda o, t: (o.argmax(1) == t).sum(), "noted": noted}.items():
        try:
            found[name] = run.evaluate(data, {name: metric})[name]
        except ConfigError as error:
            found[name] = str(error)
    run.close()
    return found, sum(seen)


def test_a_metric_that_is_no_mean_is_refused_on_every_rank_and_side_effects_are_put_back():
    (alone, samples), others = run_ranks(refused, 1)[0], run_ranks(refused, 2)
    assert samples == 100 == sum(count for _, count in others), "a list that a metric fills"
    for found in (alone, *(each for each, _ in others)):
        assert found["f1"].startswith("The metric 'f1' is not a mean over samples") and "update(" in found["f1"]
        assert found["hits"].startswith("The metric 'hits' is a sum over the samples")
        assert found["noted"] == alone["noted"]


def recall(output, target, label=1):
    """0 where none of the class is there, or found."""
    there = target == label
    return ((output.argmax(1) == label) & there).sum() / there.sum().clamp_min(1)


def found_later(world, is_sorted, first):
    """The recall of a class, which is never predicted in the first ``first`` evaluations."""
    run, _, _, data = begin(world)
    inputs, said = data.tensors[0], []
    targets = (inputs[:, 0] > 0).long()
    order = targets.argsort() if is_sorted else torch.arange(len(targets))

    def scores(data):
        score = data[0][:, :1] + (-10 if len(said) < first else -0.5)
        return torch.cat([-score, score], 1)

    while len(said) <= first:
        try:
            run.evaluate(
                TensorDataset(inputs[order], targets[order]),
                lambda output, batch: recall(output, batch[1]),
                forward=scores,
            )
            said.append("")
        except ConfigError as error:
            said.append(str(error))
    run.close()
    return said


@pytest.mark.parametrize(("ranks", "is_sorted", "first"), [(1, False, 2), (2, False, 2), (1, True, 0), (2, True, 0)])
def test_a_metric_that_is_no_mean_is_found_when_its_rows_show_it(ranks, is_sorted, first):
    """A recall of 0 looks like a mean, and so does one over rows of one class."""
    for said in run_ranks(found_later, ranks, is_sorted, first):
        assert said[:first] == [""] * first
        assert said[-1].startswith("The metric 'metric' is "), said  # no mean, or, over one class and the other, a sum


def losses(world, **options):
    run, _, optimizer, data = begin(world, **options)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("lockstep").addHandler(handler)

    def summed(output, target):
        return F.cross_entropy(output, target, reduction="sum")

    for batch in run.batches(data):
        run.backward(batch, summed if batch.plan.step < 3 else F.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return [each for each in records if "loss" in each]


def test_a_loss_that_is_a_sum_is_warned_about_once():
    for records, *_ in (run_ranks(losses, 1), run_ranks(losses, 2)):
        assert len(records) == 1 and "summed is a sum over the samples" in records[0], records
    assert run_ranks(_off, 1) == [[]]


def _off(world):
    return losses(world, checks="off")


class WithItsLoss(nn.Module):
    """As a model of transformers: it gives its loss, a mean over the targets that are not -100."""

    def __init__(self, noise=0.0):
        super().__init__()
        self.inner, self.noise = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 6)), noise

    def forward(self, x, labels):
        logits = self.inner(x + self.noise * torch.rand_like(x)).view(-1, 2, 3)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Batches(UserDict):
    """As the BatchEncoding of transformers: a mapping that is no dict, with attributes."""

    @property
    def rows(self):
        return len(self.data["x"])


def collated(samples):
    return Batches(x=torch.stack([x for x, _ in samples]), labels=torch.stack([y for _, y in samples]))


def loss_of_model(output, target):
    assert target.rows
    return output["loss"]


def own_loss(world, micro_batches, masked, noise=0.0, strategy="ddp"):
    torch.manual_seed(0)
    model = WithItsLoss(noise)
    run = Run(RunOptions.of(global_batch=8, micro_batches=micro_batches, threads=1, strategy=strategy), world)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(16, 4)
    some = torch.arange(3) < torch.arange(16)[:, None] % 3
    data = TensorDataset(x, torch.where(some & masked, -100, (x[:, :3] > 0).long()))
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("lockstep").addHandler(handler)
    for batch in run.batches(DataLoader(data, collate_fn=collated), shuffle=False):
        value = run.backward(batch, loss_of_model)
        optimizer.step()
        optimizer.zero_grad()
    fingerprint = run.fingerprint()
    run.close()
    return [each for each in records if "The loss" in each], float(value), fingerprint


def test_a_model_that_computes_a_mean_over_something_else_is_warned_about():
    """The model itself is called on parts, and on micro-batches of one row put together."""
    for micro_batches in (2, 8):
        (found, *bits), (others, *others_bits) = run_ranks(own_loss, 2, micro_batches, True)
        assert len(found) == 1 and "loss_of_model is not a mean over samples" in found[0] and not others
        assert bits == others_bits == list(run_ranks(own_loss, 1, micro_batches, True)[0][1:])
        assert run_ranks(own_loss, 1, micro_batches, False)[0][0] == []
    assert len(run_ranks(own_loss, 1, 8, True, 0.1)[0][0]) == 1, "noise is replaced by its expectation"


def with_lengths(samples):
    samples.sort(key=lambda sample: -sample[1])
    return torch.stack([x for x, _ in samples]), [int(length) for _, length in samples]


def packed_loss(world, reduction, same_lengths=False):
    """As for captions: the output has a row for each token, and the lengths are a list of numbers."""
    torch.manual_seed(0)
    model = nn.LSTM(2, 3, batch_first=True)
    run = Run(RunOptions.of(global_batch=16, micro_batches=4, threads=1), world)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    lengths = torch.full((16,), 3) if same_lengths else torch.arange(16) % 5 + 1
    loader = DataLoader(TensorDataset(torch.randn(16, 5, 2), lengths), collate_fn=with_lengths)

    def packed(data):
        return model(nn.utils.rnn.pack_padded_sequence(*data, batch_first=True))[0].data

    def over_tokens(output, data):
        errors = output.square().mean(1)
        return errors.mean() if reduction == "mean" else errors

    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("lockstep").addHandler(handler)
    for batch in run.batches(loader):
        run.backward(batch, over_tokens, forward=packed)
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return [each for each in records if "The loss" in each]


def test_a_mean_over_the_tokens_of_packed_sequences_is_warned_about():
    (found,), none = run_ranks(packed_loss, 2, "mean")
    assert "over_tokens is not a mean over samples" in found and none == []
    assert run_ranks(packed_loss, 1, "none") == [[]]
    assert run_ranks(packed_loss, 1, "mean", True) == [[]]


class Flattened(nn.Module):
    """Gives a row for each token, as models for text do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Embedding(9, 9)

    def forward(self, tokens):
        return self.inner(tokens).view(-1, 9)


def of_tokens(function):
    return lambda output, target: function(output, target.view(-1))


def flattened(world, last, in_training, strategy="ddp"):
    """A good metric, and one made by the same line; returns the values, or the error's text."""
    torch.manual_seed(0)
    run = Run(RunOptions.of(global_batch=16, micro_batches=4, threads=1, strategy=strategy), world)
    model = Flattened()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.randint(1, 9, (32, 5))
    data = TensorDataset(tokens, tokens)
    metrics = {"accuracy": of_tokens(accuracy), "last": of_tokens(last)}
    try:
        if not in_training:
            return run.evaluate(data, metrics)
        _, found = run.backward(next(run.batches(data)), of_tokens(F.cross_entropy), also=metrics)
        return {name: float(value) for name, value in found.items()}
    except ConfigError as error:
        return str(error)
    finally:
        run.close()


def hits(output, target):
    return (output.argmax(1) == target).sum()


@pytest.mark.parametrize("in_training", [False, True])
def test_metrics_of_flattened_outputs_are_told_apart_too(in_training):
    """The number of hits was averaged over micro-batches; so was any second metric that the same line made."""
    values = run_ranks(flattened, 2, accuracy, in_training)
    assert values == [{"accuracy": values[0]["last"], "last": values[0]["last"]}] * 2
    for strategy in ("ddp", "fsdp"):
        for said in run_ranks(flattened, 2, hits, in_training, strategy):
            assert said.startswith("The metric 'last' is a sum over the samples of a micro-batch")


def joined_boxes(world):
    """The messages on a mean over boxes, and on one over images, where a tensor has the boxes of all images."""
    torch.manual_seed(0)
    run = Run(RunOptions.of(global_batch=8, micro_batches=2, threads=1), world)
    model = nn.Linear(3, 1)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def joined(samples):
        boxes = [(place, value) for place, (_, count) in enumerate(samples) for value in range(int(count))]
        return torch.stack([x for x, _ in samples]), torch.tensor(boxes)

    def over_boxes(output, boxes):
        return (output[boxes[:, 0], 0] - boxes[:, 1]).square().mean()

    def over_images(output, boxes):
        return output.square().mean() + 0 * len(boxes)

    loader = DataLoader(TensorDataset(torch.randn(8, 3), torch.arange(8) % 3 + 1), 8, collate_fn=joined)
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage().partition(" is of data")[0])
    logging.getLogger("lockstep").addHandler(handler)
    for loss in (over_images, over_boxes):
        (batch,) = run.batches(loader)
        run.backward(batch, partial(loss), also={f"{loss.__name__} in a step": loss})
    logging.getLogger("lockstep").removeHandler(handler)  # the loop never steps
    run.close()
    return said


def test_a_mean_over_boxes_of_all_images_is_said_to_be_unknown():
    """Nothing was said, and a mean over boxes was averaged over micro-batches."""
    said = ["The loss joined_boxes.<locals>.over_boxes", "The metric 'over_boxes in a step'"]
    assert run_ranks(joined_boxes, 1) == [said]
    assert run_ranks(joined_boxes, 2) == [said, []]


def one_left_out(world):
    """The collate function leaves out one sample, of the last micro-batch."""
    run, _, _, data = begin(world)
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage().partition(", as where")[0])
    logging.getLogger("lockstep").addHandler(handler)
    last = data[len(data) - 1][0]
    kept = partial(filter, lambda sample: not torch.equal(sample[0], last))
    loader = DataLoader(data, 4, collate_fn=lambda samples: torch.utils.data.default_collate([*kept(samples)]))
    for _ in range(2):
        run.evaluate(loader, F.cross_entropy)
    run.close()
    return [text for text in said if " has " in text]


def test_the_main_process_tells_of_samples_that_another_has_left_out():
    """With several processes the warning was in the log of one of them only."""
    (alone,) = run_ranks(one_left_out, 1)
    assert len(alone) == 1 and re.fullmatch(r"The micro-batch of the samples .* has \d rows?", alone[0])
    assert run_ranks(one_left_out, 2) == [alone, alone]


class Detector(nn.Linear):
    """Gives its layers' outputs in training mode alone, as YOLO does."""

    def forward(self, x):
        return {"layer": super().forward(x)} if self.training else super().forward(x)


class Penalised(nn.Linear):
    """Takes a gradient within its forward pass, and gives numbers without a row for each sample."""

    def forward(self, x):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)
        return {"squares": gradient.square().mean(), "norm": gradient.norm()}


def said_of(world, model, per_micro_batch, joined, loss, metric):
    """The messages on a loss and on a metric in two steps."""
    torch.manual_seed(0)
    options = RunOptions.of(global_batch=8, micro_batches=8 // per_micro_batch, threads=1)
    run = Run(options, world)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lockstep").addHandler(handler)
    try:
        loader = DataLoader(TensorDataset(torch.randn(16, 3), torch.arange(16) % 3), 8, collate_fn=joined)
        for batch in run.batches(loader):
            run.backward(batch, loss, forward=lambda data: model(data[0]), also={"metric": metric})
        return said
    except ConfigError as error:
        return str(error)
    finally:
        logging.getLogger("lockstep").removeHandler(handler)  # the loop never steps
        run.close()


def with_boxes(samples):
    return torch.stack([x for x, _ in samples]), torch.cat([torch.zeros(1 + int(n), 2) for _, n in samples])


def of_layers(output, data):
    return output["layer"].square().mean() + data[1].mean()


def squares(output, _):
    return output["squares"]


def norm(output, _):
    return output["norm"]


def test_a_loss_of_what_a_model_gives_in_training_mode_alone_is_said_to_be_unknown():
    """Nothing was said of the loss of YOLO, a mean over boxes."""
    (said,) = run_ranks(said_of, 1, Detector(3, 1), 4, with_boxes, of_layers, of_layers)
    assert [each.partition(" is of data")[0] for each in said] == [
        "The loss of_layers",
        "The metric 'metric'",
    ]


def test_a_gradient_within_the_forward_pass_does_not_hide_what_is_no_mean():
    """The model was called without gradients and failed, so that nothing was known of a root."""
    for per_micro_batch in (1, 4):
        (said,) = run_ranks(said_of, 1, Penalised(3, 1), per_micro_batch, None, squares, squares)
        assert said == []  # also in the second step of micro-batches with a single row
        (said,) = run_ranks(said_of, 1, Penalised(3, 1), per_micro_batch, None, squares, norm)
        assert said.startswith("The metric 'metric' is not a mean over samples")


def joined_graphs(world, model_gives_rows):
    """As graphs are joined to one: nodes follow each other, and a tensor tells whose they are."""
    torch.manual_seed(0)
    run = Run(RunOptions.of(global_batch=8, micro_batches=2, threads=1), world)
    model = nn.Linear(3, 1)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def joined(samples):
        return {"x": torch.cat([x[:length] for x, length in samples]), "of": [int(n) for _, n in samples]}

    def forward(data):
        nodes = model(data["x"])
        if not model_gives_rows:
            return nodes
        return torch.stack([part.mean(0) for part in nodes.split(data["of"])])

    data = TensorDataset(torch.randn(8, 5, 3), torch.arange(8) % 3 + 1)
    loader, records = DataLoader(data, batch_size=8, collate_fn=joined), []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("lockstep").addHandler(handler)
    mean = lambda output, data: output.square().mean()  # noqa: E731
    pair = lambda output, data: (output.square().sum(), len(output))  # noqa: E731
    (batch,) = run.batches(loader)
    run.backward(batch, mean, forward=forward)
    run.evaluate(loader, {"mean": mean, "pair": pair}, forward=forward)
    with pytest.raises(ConfigError, match="'count' is a sum over the samples"):
        run.evaluate(loader, {"count": lambda output, data: (output > 0).sum()}, forward=forward)
    run.close()
    return [each.partition(" is of data")[0] for each in records if "is not known" in each]


def test_what_cannot_be_tested_is_said_where_the_output_has_no_row_for_each_sample():
    (loss, metric), others = run_ranks(joined_graphs, 2, False)
    line = Path(__file__).read_text().partition("    mean = lambda output, data")[0].count("\n") + 1
    assert loss == f"The loss joined_graphs.<locals>.<lambda> ({Path(__file__).name}:{line})"
    assert metric == "The metric 'mean'" and not others
    assert run_ranks(joined_graphs, 1, True) == [[]]


def unknown_means(world, strategy, returns_pair):
    """The messages on a mean over unmasked tokens as a loss and as metrics, and the value or the refusal."""
    torch.manual_seed(0)
    run = Run(RunOptions.of(global_batch=8, micro_batches=4, threads=1, strategy=strategy), world)
    model = WithItsLoss()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    labels = torch.where(torch.arange(3) < torch.arange(8)[:, None] % 3, -100, 1)
    data = DataLoader(TensorDataset(torch.randn(8, 4), labels), batch_size=8, collate_fn=collated)
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lockstep").addHandler(handler)

    def loss(output, target):
        count = (target["labels"] != -100).sum()
        return (output["loss"] * count, count) if returns_pair else output["loss"]

    metrics = [lambda output, target: loss(output, target), lambda output, target: loss(output, target)]
    try:
        for batch in run.batches(data):
            run.backward(batch, loss, also={"also": metrics[0]})
        return said, str(run.evaluate(data, {"evaluated": metrics[1]})["evaluated"])
    except ConfigError as error:
        return said, str(error)
    finally:
        run.close()


def test_what_only_a_strategy_that_holds_the_whole_model_can_tell_is_said_to_be_unknown():
    """Nothing was said: the mean over micro-batches of masked means stood in the log."""
    (_, refused), _ = run_ranks(unknown_means, 2, "ddp", False)
    assert "'also' is not a mean over samples" in refused
    (said, value), _ = run_ranks(unknown_means, 2, "fsdp", False)
    assert [each.partition(" was given outputs")[0] for each in said] == [
        "The loss unknown_means.<locals>.loss",
        "The metric 'also'",
        "The metric 'evaluated'",
    ]
    with_all, in_parts = (run_ranks(unknown_means, 2, strategy, True)[0] for strategy in ("ddp", "fsdp"))
    assert with_all == in_parts and with_all[0] == [] and with_all[1] != value


def ragged(world, size):
    """The messages on a mean over samples, whose last step has a single sample; the first steps have ``size``."""
    torch.manual_seed(0)
    options = RunOptions.of(global_batch=4 * size, micro_batches=4, threads=1, strategy="fsdp")
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lockstep").addHandler(handler)
    with Run(options, world) as run:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.epochs(1):
            for batch in run.batches(TensorDataset(torch.randn(8 * size + 1, 3), torch.randn(8 * size + 1, 1))):
                run.backward(batch, nn.MSELoss())
                optimizer.step()
                optimizer.zero_grad()
    return said


def test_a_last_step_of_a_single_sample_does_not_make_a_loss_unknown():
    """Every run of fsdp with such a step ended in the warning, though the first steps had told that it is a mean.

    So did every run of single samples, which are put together for a call of the model.
    """
    assert run_ranks(ragged, 2, 2) == run_ranks(ragged, 2, 1) == [[], []]


def watched(world):
    """A model and a function of the user's that keep something in every call, also in evaluation mode."""
    torch.manual_seed(0)
    run = Run(RunOptions.of(global_batch=8, micro_batches=2), world)
    model = nn.Linear(3, 2)
    model.calls = 0
    model.register_forward_hook(lambda module, given, output: setattr(module, "calls", module.calls + 1))
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    shapes = []

    def forward(data):
        shapes.append(len(data[0]))
        return model(data[0]).sum()

    data = TensorDataset(torch.randn(12, 3), torch.arange(12) % 2)
    run.evaluate(data, {"one": lambda output, target: (output * 0, len(target[0]))}, forward=forward)
    run.close()
    return shapes, model.calls


def test_an_evaluation_calls_the_model_once_for_each_micro_batch_as_far_as_that_shows():
    assert run_ranks(watched, 1) == [([4, 4, 4], 3)]


def of_two_rows(world):
    run, *_ = begin(world, evaluation_batch=1)
    inputs = torch.arange(2 * 4.0).view(2, 4) / 4

    def perplexity(output, target):
        return F.cross_entropy(output, target).exp()

    try:
        return run.evaluate(TensorDataset(inputs, torch.arange(2)), perplexity)
    except ConfigError as error:
        return str(error)
    finally:
        run.close()


def test_rows_of_all_processes_tell_what_a_metric_is_where_each_has_one():
    for ranks in (1, 2):
        for said in run_ranks(of_two_rows, ranks):
            assert "root or the exponential" in str(said), (ranks, said)
