"""Replicas in the threads of one process: the bits of one device, the user's own errors, and what is refused."""

import threading
import traceback
from functools import cache

import pytest
import torch
from tests.ranks import run_ranks
from tests.strategies import in_process
from tests.strategies.in_process import differing, rows
from tests.strategies.jobs import JOBS, photos
from tests.strategies.training import train_all
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from lockstep.errors import ConfigError
from lockstep.models import resnet18
from lockstep.numerics.randomness import KeyedRandomness, draws_in_forward
from lockstep.strategies.dp import DataParallel, copy_model

pytestmark = pytest.mark.timeout(120)
CPU = torch.device("cpu")


def train(replicas, make, *given, **options):
    """The results of a training under so many replicas; 0: under ``single``."""
    strategy = {"strategy": "dp", "dp": {"replicas": replicas}} if replicas else {}
    return in_process.train(make, *given, **strategy, **options)


def open_run(replicas, **options):
    return in_process.open_run(strategy="dp", dp={"replicas": replicas}, **options)


class Tied(nn.Module):
    """A layer whose weight is used at two places, BatchNorm, dropout, and a layer that is not trained."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 6, bias=False),
            nn.BatchNorm1d(6),
            nn.Tanh(),
            nn.Dropout(0.3),
            nn.Linear(6, 6),
            nn.Tanh(),
        )
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.body[0].weight
        self.head = nn.Linear(6, 3)
        self.body[4].requires_grad_(False)

    def forward(self, x):
        return self.head(self.again(self.body(x)))


def quiet():
    """BatchNorm and a frozen layer; known to draw nothing, so that replicas compute at once."""
    frozen = nn.Linear(8, 8).requires_grad_(False)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), frozen, nn.Tanh(), nn.Linear(8, 3))


@cache
def alone(make):
    return train(0, make)


@pytest.mark.parametrize("make", [Tied, quiet], ids=["in turns", "at once"])
@pytest.mark.parametrize("replicas", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 8))])
def test_every_number_of_replicas_gives_the_bits_of_one_device(make, replicas):
    """12 steps; the last of an epoch has 10 rows, which leaves replicas without a micro-batch."""
    assert draws_in_forward(make()) is (make is Tied)
    assert differing(alone(make), train(replicas, make)) == []


KEPT = []


def with_halved_gradients():
    """A model whose gradients are halved before they are added, as by libraries from before hooks on parameters."""
    model = quiet()
    for parameter in model[-1].parameters():
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        node.register_prehook(lambda gradients: (gradients[0] * 0.5,))
        KEPT.append(node)
    return model


def test_hooks_of_the_nodes_that_add_gradients_run_for_all_micro_batches():
    """Only those of the first replica were called."""
    assert differing(alone(quiet), alone(with_halved_gradients))
    assert differing(alone(with_halved_gradients), train(2, with_halved_gradients)) == []


class Halved(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return found / 2 if function is nn.functional.linear else found


class HalvedOperators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return found / 2 if function is torch.ops.aten.tanh.default else found


def rounded():
    """Saves in bf16 what the backward pass needs."""
    return saved_tensors_hooks(
        lambda each: each.bfloat16() if each.is_floating_point() else each,
        lambda each: each.float() if each.is_floating_point() else each,
    )


@pytest.mark.parametrize("around", [Halved, HalvedOperators, rounded])
def test_modes_and_hooks_of_the_callers_thread_hold_for_all_replicas(around):
    with around():
        expected, found = train(0, quiet, epochs=1), train(3, quiet, epochs=1)
    assert differing(expected, found) == []
    assert differing(train(0, quiet, epochs=1), expected)


def test_a_step_of_one_micro_batch_leaves_all_other_replicas_idle():
    for replicas in (2, 4):
        assert differing(train(0, quiet, rows(18)), train(replicas, quiet, rows(18))) == []


@cache
def jobs_under(replicas):
    settings = {"strategy": "dp", "dp": {"replicas": replicas}} if replicas else {"strategy": "single"}
    return run_ranks(train_all, 1, [(job, job, settings, 0) for job in JOBS], timeout=110)[0]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_every_job_that_ddp_is_held_to_has_the_bits_of_one_device(replicas):
    for job in JOBS:
        assert differing(jobs_under(0)[job], jobs_under(replicas)[job]) == [], job


def test_replicas_on_a_cpu_share_the_memory_of_parameters_and_have_buffers_of_their_own():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    replica = copy_model(model, CPU, ())
    pairs = list(zip(model.parameters(), replica.parameters()))
    assert all(a.data_ptr() == b.data_ptr() and a is not b for a, b in pairs) and len(pairs) == 4
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(model.buffers(), replica.buffers()))


class Twice(nn.Module):
    """Uses one layer at two places, and between them waits until another replica is in its forward pass too."""

    meeting = threading.Barrier(2)

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.layer(self.layer(x).tanh()))


def meet(*_):
    """Passes as soon as two replicas are here; where they take turns, the first wait ends all further ones."""
    try:
        Twice.meeting.wait(0.5)
    except threading.BrokenBarrierError:
        return


def test_under_autocast_no_replica_empties_the_cache_of_cast_weights_that_another_one_uses(monkeypatch):
    """Two replicas in forward at once: the one that left autocast first emptied torch's one cache for all threads, the
    other cast the weight of a layer that it used twice a second time, and its gradient had other bits."""
    known_to_draw_nothing(monkeypatch, Twice)
    assert not draws_in_forward(Twice())
    wide = rows(96)

    def make():
        model = Twice()
        model.layer.register_forward_hook(meet)
        return model

    expected = train(0, Twice, wide, precision="bf16", epochs=1)
    monkeypatch.setattr(Twice, "meeting", threading.Barrier(2))
    found = train(2, make, wide, precision="bf16", epochs=1)
    assert Twice.meeting.broken, "the replicas did not take turns"
    assert differing(expected, found) == []


def test_autocast_of_the_users_own_reaches_every_replica():
    """Autocast belongs to a thread: replicas in threads of their own ignored it and trained in float32."""

    def trained(replicas):
        with torch.autocast("cpu", torch.bfloat16):
            return train(replicas, quiet, epochs=1)

    assert differing(trained(0), trained(3)) == []
    assert trained(0) != train(0, quiet, epochs=1)


def test_no_unit_is_watched_where_nothing_can_draw():
    """Hooks of two threads would share one stack of units: a replica in its loss had its keys planted over."""
    quiet_model, drawing = resnet18(num_classes=3), nn.Sequential(resnet18(num_classes=3), nn.Dropout(0.1))
    KeyedRandomness(quiet_model, 0, CPU)
    assert not any(module._forward_pre_hooks for module in quiet_model.modules())
    KeyedRandomness(drawing, 0, CPU)
    assert any(module._forward_pre_hooks for module in drawing.modules())


def noisy_loss(output, target):
    return nn.functional.cross_entropy(output + 0.1 * torch.rand_like(output), target, reduction="none")


def test_a_loss_that_draws_has_its_keys_also_where_replicas_compute_at_once():
    assert differing(train(0, quiet, loss=noisy_loss), train(3, quiet, loss=noisy_loss)) == []


def test_what_is_set_on_the_model_between_steps_reaches_all_replicas():
    def change(model, step):
        model.body[3].p = 0.05 * step
        model.body[1].momentum = 0.1 + 0.05 * step
        model.body[1].train(step % 2 == 0)

    changed = train(0, Tied, before_step=change)
    assert differing(alone(Tied), changed)
    assert differing(changed, train(3, Tied, before_step=change)) == []


class Strict(nn.Linear):
    """Raises at the row 6; until then replica 0, with the rows below 4, is kept."""

    failed, finished = threading.Event(), []

    def forward(self, x):
        if 6.0 in x:
            self.failed.set()
            raise ArithmeticError("row 6.0 is not allowed")
        assert x.min() >= 4 or self.failed.wait(20)
        self.finished.append(x.tolist())
        return super().forward(x)


def known_to_draw_nothing(monkeypatch, kind):
    """Lets replicas of this class compute at once."""
    monkeypatch.setattr("lockstep.numerics.randomness._draws_through_children", lambda module: type(module) is kind)


def test_an_error_in_a_replica_is_the_users_own_and_no_thread_is_left_at_work(monkeypatch):
    known_to_draw_nothing(monkeypatch, Strict)
    model, finished = nn.Sequential(Strict(1, 4), nn.ReLU(), nn.Linear(4, 2)), Strict.finished
    run = open_run(2, global_batch=8, micro_batches=4, checks="off")  # a rehearsal is on replica 0 alone
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.arange(8.0).unsqueeze(1), torch.arange(8) % 2)
    batch = next(iter(run.batches(data, shuffle=False)))
    with pytest.raises(ArithmeticError, match=r"row 6.0 is not allowed") as caught:
        run.backward(batch, nn.CrossEntropyLoss())
    assert "raised on replica 1, in micro-batch 3 (samples 6, 7)" in caught.value.__notes__
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "forward" and "backward" in frames
    assert sorted(finished) == [[[0.0], [1.0]], [[2.0], [3.0]], [[4.0], [5.0]]], "a replica was still at work"
    run.close()
    for thread in [each for each in threading.enumerate() if each.name.startswith("lockstep-replica")]:
        thread.join(10)
        assert not thread.is_alive()


def test_more_replicas_than_micro_batches_are_refused():
    said = r"9 replicas cannot share micro_batches=8: each needs at least one. Use at most 8 devices"
    with pytest.raises(ConfigError, match=said):
        open_run(9)
    with pytest.raises(ConfigError, match=said):
        DataParallel([CPU] * 9, 8, 1)


def locked():
    """Holds something that cannot be copied."""
    model = nn.Linear(6, 3)
    model.lock = threading.Lock()
    return model


class Counting(nn.Module):
    """Counts its calls in a buffer that nobody declared."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.head(x)


@pytest.mark.parametrize(
    "make, said",
    [
        (
            locked,
            r"copy.deepcopy of Linear failed: cannot pickle '_thread.lock' object. Make the model copyable",
        ),
        (
            Counting,
            r"changes the buffer 'calls', and Lockstep does not know .* Average it with running_buffers=\['calls'\]",
        ),
    ],
)
def test_a_model_that_replicas_cannot_hold_is_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        train(2, make)


def one_step(replicas, loss=None, forward=None):
    """A step in which loss and forward may use the model that the user holds."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    run = open_run(replicas)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = next(iter(run.batches(rows())))
    run.backward(batch, loss(model) if loss else nn.CrossEntropyLoss(), forward=forward(model) if forward else None)
    run.close()


def decayed(model):
    cross_entropy = nn.CrossEntropyLoss()
    return lambda output, target: cross_entropy(output, target) + model[0].weight.square().sum()


def test_a_loss_that_uses_the_users_model_is_refused_where_there_are_several():
    one_step(1, loss=decayed)
    with pytest.raises(ConfigError, match=r"The loss uses the parameter '0.weight' of the model itself.*'ddp'"):
        one_step(2, loss=decayed)


def test_a_forward_of_ones_own_is_refused_where_there_are_several_models():
    def forward(model):
        return lambda data: model(data[0])

    def loss(model):
        return lambda output, data: nn.functional.cross_entropy(output, data[1])

    one_step(1, loss, forward)
    with pytest.raises(ConfigError, match=r"a forward of your own.*Give the model a forward\(input\)"):
        one_step(2, loss, forward)


def blocks():
    """Two blocks, each compiled for itself, around a dropout."""
    inner = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(inner[0], nn.Dropout(0.2), inner[1], nn.Linear(6, 3))


def compiled(world):
    """The differences between one compiled model and compiled replicas, for a model of blocks and one without."""
    found = []
    for make in (blocks, quiet):
        expected = train(0, make, compile=True, epochs=1)
        found.append(differing(expected, train(3, make, compile=True, epochs=1)))
    return found


@pytest.mark.slow
def test_compiled_replicas_compute_on_their_own_parameters():
    """The copy of a compiled block called the block that it was copied from."""
    assert run_ranks(compiled, 1, timeout=100) == [[[], []]]


@pytest.mark.gpus(2)
def test_gpus_give_the_bits_of_one_gpu():
    data = photos(40)

    def make():
        return resnet18(num_classes=5)

    assert differing(train(0, make, data, epochs=1), train(2, make, data, epochs=1)) == []
