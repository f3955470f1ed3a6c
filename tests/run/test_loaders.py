"""However samples are read, a run ends in the same bits; and nobody waits for what could have been read before."""

import pytest
import torch
from tests.data.test_loader_ahead import told  # noqa: F401  a fixture
from tests.run.jobs import begin, correct, train_step
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Subset

from lockstep.data import SkipBroken
from lockstep.errors import ConfigError


class Noisy(Dataset):
    """Samples that are drawn anew in each epoch."""

    def __len__(self):
        return 53

    def __getitem__(self, index):
        return torch.randn(6) + index % 3, index % 3


class Paired(Dataset):
    """Samples that are their numbers."""

    def __len__(self):
        return 53

    def __getitem__(self, index):
        return index


def train(epochs=3, workers=0, wrap=lambda dataset: dataset, after=lambda run: None, **options):
    """Digests of every parameter after each epoch, its evaluation, and the state to go on from."""
    run, model, optimizer = begin(strategy="single", **options)
    data, other, seen = wrap(Noisy()), Noisy(), []
    for _ in run.epochs(epochs):
        for batch in run.batches(data, workers=workers):
            train_step(run, batch, optimizer)
        seen.append((run.evaluate(other, correct, workers=workers), run.fingerprint()))
        after(run)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run.close()
    return seen, state


@pytest.fixture(scope="module")
def expected():
    return train()


def assert_same(found, wanted):
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    for name, tensor in wanted[1].items():
        assert torch.equal(found[1][name], tensor), name


@pytest.mark.parametrize(("workers", "prefetch"), [(0, 2), (1, 1), (1, 4), (3, 2)])
def test_workers_and_prefetch_change_no_bit_of_a_run(expected, workers, prefetch):
    assert_same(train(workers=workers, prefetch=prefetch), expected)


def test_a_set_that_skips_broken_samples_has_the_same_bits_with_workers(expected):
    assert_same(train(workers=1, wrap=SkipBroken), expected)


@pytest.mark.parametrize("workers", [0, 3])
def test_a_run_that_was_resumed_with_other_workers_has_the_same_bits(expected, workers, tmp_path):
    first, _ = train(epochs=1, workers=2, directory=tmp_path, after=lambda run: run.save(wait=True))
    rest, state = train(workers=workers, directory=tmp_path, resume="auto")
    assert_same((first + rest, state), expected)


def test_what_is_evaluated_after_an_epoch_is_read_while_its_last_step_computes(told):  # noqa: F811
    run, _, optimizer = begin(strategy="single")
    training = Noisy()
    for epoch in run.epochs(2):
        for batch in run.batches(training, workers=1):
            if epoch == 1 and batch.plan.position == 2:
                told.wait_for(1)
            train_step(run, batch, optimizer)
        if epoch == 0:
            run.evaluate(told, lambda output, data: data.double(), forward=lambda data: data, workers=1)
            told.wait_for(len(told))
    run.close()


def test_the_next_epoch_is_read_while_the_last_step_computes(told):  # noqa: F811
    run, model, optimizer = begin(strategy="single", global_batch=32)
    for epoch in run.epochs(2):
        for batch in run.batches(told, workers=1):
            if epoch == 0 and batch.plan.position == 1:
                told.wait_for(len(told) + 1)
            run.backward(batch, lambda output, _: output.sum(1), forward=lambda data: model(rows(data)))
            optimizer.zero_grad()
    told.wait_for(len(told) - 1)
    run.close()


def rows(numbers):
    return numbers[:, None].float().expand(-1, 6)


class Torn(Noisy):
    """Of three samples nothing is left."""

    def __getitem__(self, index):
        if index % 18 == 0:
            raise OSError("torn")
        return super().__getitem__(index)


def test_a_count_of_skipped_samples_that_begins_within_an_epoch_says_so(caplog):
    """It was said to be that of the epoch."""
    run, _, optimizer = begin(strategy="single")
    data = SkipBroken(Torn(), most=0.5)
    for batch in run.batches(data):
        train_step(run, batch, optimizer)
        if "was skipped" in caplog.text:
            break
    step = batch.plan.position + 1
    for batch in run.batches(data):
        train_step(run, batch, optimizer)
    run.close()
    lines = [each.getMessage() for each in caplog.records if "was skipped" in each.getMessage()]
    assert "(2 so far, at most 26)" in lines[0]
    assert f"so far from step {step} of the epoch on, at most 26)" in lines[-1]


def test_reading_no_step_ahead_is_refused_with_its_name():
    for prefetch in (0, -1):
        with pytest.raises(ConfigError, match=f"prefetch should be at least 1 and is {prefetch}"):
            begin(prefetch=prefetch)


def test_the_order_of_a_data_loader_is_its_own():
    run, *_ = begin(strategy="single")
    with pytest.raises(ConfigError, match="was given a DataLoader that shuffles"):
        run.batches(DataLoader(Noisy(), batch_size=24, shuffle=True), shuffle=False)
    (first, *_) = run.batches(DataLoader(Noisy(), batch_size=24))
    assert first.plan.numbers(0) == [0, 1, 2]
    run.close()


def test_settings_of_loaders_that_are_read_side_by_side_and_are_not_used_are_told_once(caplog):
    """The last step was a smaller one, and aligned pairs were shuffled, without a word."""
    run, model, optimizer = begin(strategy="single")
    first, second = (DataLoader(Noisy(), 24, drop_last=True, shuffle=shuffle) for shuffle in (False, True))
    aside = {
        "forward": lambda data: model(data[0][0]),
        "loss": lambda output, data: cross_entropy(output, data[0][1]),
    }
    for options in ({}, {}, {"drop_last": True}):
        steps = run.batches((first, second), **options)
        assert len(steps) == 3 - bool(options)
        for batch in steps:
            run.backward(batch, **aside)
            optimizer.step()
    assert "in one order" not in caplog.text
    pairs = [DataLoader(Paired(), 24, shuffle=True) for _ in range(2)]
    (part, *_) = next(run.batches(pairs)).micro_batches
    assert part.data[0].equal(part.data[1])
    run.close()
    assert caplog.text.count("53 samples each that shuffle are read side by side in one order") == 1
    assert caplog.text.count("and all of them are shuffled") == 1
    assert caplog.text.count("the last step of an epoch is a smaller one all the same") == 1


class Named(Dataset):
    """Samples of named classes, within a data set that shows no names."""

    def __init__(self, classes, target_transform=None):
        self.classes, self.target_transform = list(classes), target_transform

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((6,), float(index)), index % len(self.classes)


@pytest.mark.parametrize(
    ("evaluated", "is_told"),
    [("bc", True), ("abd", True), ("abc", False), ("ab", False), (Named("bc", target_transform=int), False)],
)
def test_labels_that_are_other_classes_where_a_model_is_evaluated_are_told(caplog, evaluated, is_told):
    """The accuracy was that of other classes: torchvision numbers the folders that it finds."""
    run, _, optimizer = begin()
    evaluated = Named(evaluated) if isinstance(evaluated, str) else evaluated
    for _ in range(2):
        for batch in run.batches(Subset(Named("abc"), range(24))):
            train_step(run, batch, optimizer)
        run.evaluate(DataLoader(evaluated), correct)
    assert ("its loss and accuracy would be of other classes" in caplog.text) == is_told
