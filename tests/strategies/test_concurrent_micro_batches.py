"""Micro-batches that run side by side: they take turns, wait for each other, and are ended together."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import lockstep
from lockstep.config.strategy_options import STRATEGIES, SYNC_BATCH_NORM
from lockstep.errors import ConfigError
from lockstep.numerics.sync_batch_norm import RankRows
from lockstep.run import RunOptions
from lockstep.runtime.events import Callback
from lockstep.strategies.concurrent_micro_batches import Task, TaskThreads


class Walk(Task):
    """Waits at some places, and notes what it does."""

    def __init__(self, number, places, log, threads, error=None):
        super().__init__(number)
        self.places, self.log, self.threads, self.failure = places, log, threads, error

    def run(self):
        self.log.append(f"{self.number} begins")
        try:
            for place in self.places:
                received = self.threads.wait(place, torch.tensor(float(self.number)))
                self.log.append(f"{self.number} gets {float(received)}")
            if self.failure is not None:
                raise self.failure
        finally:
            self.log.append(f"{self.number} ends")

    def explain(self, error):
        error.add_note(f"task {self.number}")

    def pause(self):
        self.log.append(f"{self.number} waits")
        return lambda: self.log.append(f"{self.number} goes on")


def walk(*places, errors=()):
    """A log of the steps of tasks with these places; ``errors`` by task."""
    log, threads = [], TaskThreads(1, torch.device("cpu"))
    tasks = [Walk(n, each, log, threads, dict(errors).get(n)) for n, each in enumerate(places)]

    def meet(place, waiting):
        log.append(f"{place}: {[task.number for task in waiting]}")
        return torch.stack([task.offered for task in waiting]).sum()

    try:
        threads.run(tasks, meet)
    finally:
        threads.close()
        assert threads.current is None
    return log


def test_tasks_take_turns_and_meet_at_every_place():
    assert walk(["a", "b"], ["a", "b"]) == [
        *["0 begins", "0 waits", "1 begins", "1 waits", "a: [0, 1]"],
        *["0 goes on", "0 gets 1.0", "0 waits", "1 goes on", "1 gets 1.0", "1 waits", "b: [0, 1]"],
        *["0 goes on", "0 gets 1.0", "0 ends", "1 goes on", "1 gets 1.0", "1 ends"],
    ]


def test_tasks_that_never_wait_run_one_after_the_other():
    assert walk([], [], []) == ["0 begins", "0 ends", "1 begins", "1 ends", "2 begins", "2 ends"]


def test_an_error_is_raised_as_it_was_and_ends_the_others():
    error = ZeroDivisionError("in the second")
    with pytest.raises(ZeroDivisionError, match="in the second") as caught:
        walk(["a"], [], errors={1: error}.items())
    assert caught.value is error and error.__notes__ == ["task 1"]
    assert not [each for each in threading.enumerate() if each.name.startswith("lockstep-micro-batch_")]


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ((["a"], []), "one is at a when another has ended"),
        (([], ["a"]), "one has ended when another is at a"),
        ((["a", "b"], ["a", "c"]), "one is at b when another is at c"),
    ],
)
def test_tasks_that_meet_at_different_places_are_refused(places, said):
    with pytest.raises(ConfigError, match=said):
        walk(*places)


def prepared(model, **options):
    given = {"global_batch": 8, "micro_batches": 4, **options}
    run = lockstep.init(sync_batch_norm=True, **given)
    return run, run.prepare(model)


DATA = TensorDataset(torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3)


def first_step(model, loss=F.cross_entropy, data=DATA, options=(), **backward):
    """The loss of the first step, and the gradients that are left."""
    run, model = prepared(model, **dict(options))
    try:
        for batch in run.batches(data):
            value = run.backward(batch, loss, **backward)
        return value, [parameter.grad for parameter in model.parameters()]
    finally:
        run.close()


def rows(*others):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), *others, nn.Linear(6, 3))


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            nn.Sequential(nn.Linear(6, 3)),
            "needs a model with BatchNorm1d, 2d or 3d, and this model has none. Remove sync_batch_norm",
        ),
        (nn.Sequential(OwnNorm(6)), "cannot convert '0', a OwnNorm, .* Build the model with those"),
    ],
)
def test_models_that_cannot_be_run_so_are_refused(model, said):
    with pytest.raises(ConfigError, match=said):
        prepared(model)


def test_masks_are_those_of_micro_batches_that_run_one_after_the_other():
    """A BatchNorm in evaluation mode normalises with constants, so nothing else differs."""
    found = []
    for synchronised in (True, False):
        torch.manual_seed(3)
        model = rows(nn.Dropout(0.5), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)))
        model[1].eval()
        run = lockstep.init(global_batch=8, micro_batches=4, sync_batch_norm=synchronised)
        model = run.prepare(model)
        for batch in run.batches(DATA):
            loss = run.backward(batch, lambda output, target: F.cross_entropy(F.dropout(output, 0.2), target))
        found.append([loss, *[parameter.grad for parameter in model.parameters()]])
        run.close()
    for one, other in zip(*found):
        assert torch.equal(one, other)


def test_a_forward_of_the_user_is_taken():
    model = rows()
    by_call, gradients = first_step(model)
    model = rows()
    by_forward, others = first_step(
        model, lambda output, data: F.cross_entropy(output, data[1]), forward=lambda data: model(data[0])
    )
    assert torch.equal(by_call, by_forward)
    assert all(torch.equal(one, other) for one, other in zip(gradients, others))


def test_micro_batches_may_have_different_shapes():
    class Padded(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.randn(6, 4 + index // 2, generator=torch.Generator().manual_seed(index)), index % 3

    model = nn.Sequential(nn.BatchNorm1d(6), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(6, 3))
    run, model = prepared(model)
    for batch in run.batches(Padded(), shuffle=False):
        run.backward(batch, F.cross_entropy)
    everything = torch.cat([Padded()[index][0].t() for index in range(8)])
    torch.testing.assert_close(model[0].running_mean, 0.1 * everything.mean(0))
    torch.testing.assert_close(model[0].running_var, 0.9 + 0.1 * everything.var(0))
    run.close()


class Branches(nn.Module):
    """Calls its second BatchNorm for some micro-batches only."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        y = self.first(x)
        return self.head(self.second(y) if bool(x[0, 0] > 0) else y)


def test_micro_batches_that_take_different_ways_are_refused():
    with pytest.raises(ConfigError, match=r"two of them take different ways through the model: one .*'second'"):
        first_step(Branches())


class Keeping(nn.Module):
    """Keeps features on itself, which a loss may read."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        self.features = self.first(x)
        return self.head(self.norm(self.features))


def keeps(make_loss, **options):
    """The first step of a model whose loss reads what its forward pass kept."""
    model = Keeping()
    run = lockstep.init(global_batch=8, micro_batches=4, **options)
    run.prepare(model)
    try:
        for batch in run.batches(DATA):
            run.backward(batch, make_loss(model))
    finally:
        run.close()


def by_values(model):
    return lambda output, target: F.cross_entropy(output * model.features.detach().square().mean(), target)


def by_gradients(model):
    return lambda output, target: F.cross_entropy(output, target) + model.features.square().mean()


def test_what_a_micro_batch_keeps_on_the_model_for_its_own_loss_is_refused():
    with pytest.raises(ConfigError, match="computed twice under the same keys, has other bits"):
        keeps(by_values, sync_batch_norm=True)
    with pytest.raises(Exception, match=r"is used up|got two gradients") as caught:
        keeps(by_gradients, sync_batch_norm=True)
    assert "what one keeps on the model for later, another one replaces" in caught.value.__notes__[0]


@pytest.mark.parametrize("make_loss", [by_values, by_gradients])
def test_without_sync_batch_norm_each_micro_batch_reads_its_own(make_loss):
    keeps(make_loss)


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_each_micro_batch_has_the_settings_of_batch_norm_that_its_forward_pass_has_made(micro_batches):
    """Virtual adversarial training switches statistics off for some calls: others that ran meanwhile had it, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=0.5), nn.Linear(6, 6), nn.BatchNorm1d(6))
    expected, rows = copy.deepcopy(model), torch.randn(12, 6)
    expected(rows)

    def forward(data):
        for norm in model[1::2]:
            norm.track_running_stats ^= True
        model(data[0])
        for norm in model[1::2]:
            norm.track_running_stats ^= True
        return model(data[0])

    run = lockstep.init(global_batch=12, micro_batches=micro_batches, sync_batch_norm=True)
    run.prepare(model)
    for batch in run.batches(TensorDataset(rows, torch.arange(12) % 3), shuffle=False):
        run.backward(batch, lambda output, data: F.cross_entropy(output, data[1]), forward=forward)
    run.close()
    for norm, other in zip(model[1::2], expected[1::2], strict=True):
        assert torch.allclose(norm.running_mean, other.running_mean, atol=1e-6)
        assert torch.allclose(norm.running_var, other.running_var, atol=1e-6)
        assert norm.momentum == other.momentum and norm.track_running_stats


def test_autocast_that_the_loop_has_entered_counts():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, _ = first_step(rows())
    outside, _ = first_step(rows(), options={"precision": "bf16"})
    assert torch.equal(inside, outside)
    assert not torch.equal(inside, first_step(rows())[0])


def test_each_micro_batch_has_a_gradient_and_a_record():
    class Notes(Callback):
        def __init__(self):
            self.seen = []

        def on_micro_batch_begin(self, micro_batch):
            self.seen.append(("begins", micro_batch.k))

        def on_micro_batch_resume(self, micro_batch, phase):
            self.seen.append((phase, micro_batch.k))

        def on_micro_batch_end(self, micro_batch):
            self.seen.append(("ends", micro_batch.k))

    notes, (run, _) = Notes(), prepared(rows(), global_batch=4, micro_batches=2)
    run.add_callback(notes)
    run.backward(next(iter(run.batches(DATA))), F.cross_entropy)
    assert notes.seen == [
        *[("begins", 0), ("begins", 1), ("forward", 0), ("forward", 1)],
        *[("backward", 0), ("ends", 0), ("backward", 1), ("ends", 1)],
    ]
    run.close()


def test_models_are_copied_and_stored():
    run, model = prepared(rows())
    assert copy.deepcopy(model)[1].rows is model[1].rows
    assert isinstance(pickle.loads(pickle.dumps(model))[1].rows, RankRows)
    run.close()


def test_compilation_is_refused():
    with pytest.raises(ConfigError, match=r"where compile cannot go. Use one of the two"):
        RunOptions(global_batch=8, sync_batch_norm=True, compile=True)


@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - set(SYNC_BATCH_NORM)))
def test_other_strategies_are_refused(strategy):
    with pytest.raises(ConfigError, match=f"strategy '{strategy}' runs one after the other. Use strategy 'ddp'"):
        RunOptions(global_batch=8, sync_batch_norm=True, strategy=strategy)


def test_powersgd_and_a_changing_scale_are_refused():
    with pytest.raises(ConfigError, match="Use precision bf16 or fp32, or reduce='bf16'"):
        RunOptions(global_batch=8, reduce="powersgd", precision="fp16")
    with pytest.raises(ConfigError, match="powersgd_rank should be at least 1 and is 0"):
        RunOptions(global_batch=8, powersgd_rank=0)
