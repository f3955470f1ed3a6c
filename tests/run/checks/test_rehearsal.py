"""Rehearsals change nothing, tell nobody, and are made in a few steps."""

import copy
import io
import itertools
import logging
import re
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from tests.run.jobs import begin, dataset, train_step
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep.core.world import World
from lockstep.errors import ConfigError
from lockstep.explain.timeline import explain_timeline
from lockstep.run import Run, RunOptions
from lockstep.run.checks.rehearsal import Rehearsals
from lockstep.runtime import Callback
from lockstep.runtime.events import StepEvents
from lockstep.runtime.heartbeat import read_beat
from lockstep.scale.rank import StepObserver


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 4))


def data(rows=32):
    torch.manual_seed(0)
    return TensorDataset(torch.randn(rows, 8), torch.randint(0, 4, (rows,)))


def train(trained, loss=F.cross_entropy, *, callback=None, rows=32, epochs=1, end=None, **options):
    """Trains an epoch, or some; the fingerprint and the losses."""
    given = {"global_batch": 8, "micro_batches": 4, "strategy": "single", **options}
    run = Run(RunOptions.of(**given), World())
    try:
        _, optimizer = run.prepare(trained, torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9))
        if callback is not None:
            run.add_callback(callback)
        losses = []
        for epoch in run.epochs(epochs):
            for batch in run.batches(data(rows)):
                losses.append(float(run.backward(batch, loss)))
                optimizer.step()
                optimizer.zero_grad()
            if end is not None:
                end(epoch)
        return run.fingerprint(), losses
    finally:
        run.close()


@pytest.mark.parametrize("options", [{}, {"precision": "fp16"}, {"precision": "bf16"}, {"micro_batches": 1}])
def test_bits_do_not_depend_on_the_setting(options):
    off = train(model(), checks="off", **options)
    assert train(model(), **options) == off
    assert train(model(), checks="always", **options) == off


def test_a_ragged_epoch_of_one_step_is_rehearsed_too():
    assert train(model(), rows=5) == train(model(), rows=5, checks="off")


class Averages(nn.Module):
    """A running mean that is not used in training, by a count of calls or by that of steps."""

    def __init__(self, counts):
        super().__init__()
        self.inner, self.counts, self.calls = nn.Linear(8, 4), counts, 0
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.calls += self.counts
        self.mean.lerp_(x.mean(0), 1 / (1 + self.calls))
        return self.inner(x)


def test_a_count_that_only_a_running_buffer_depends_on_is_refused():
    """The losses were the same, and the fingerprint depended on the number of processes."""
    train(Averages(False), running_buffers="mean")
    with pytest.raises(ConfigError, match=r"The buffer 'mean' has other bits where one .* the attribute 'calls'"):
        train(Averages(True), running_buffers="mean")


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


@pytest.mark.parametrize(("checks", "extra"), [("off", 0), ("first", 3 * 2 + 6), ("always", 4 * 2 + 6)])
def test_the_first_two_steps_and_the_last_are_computed_twice_more(checks, extra):
    """The first step twice more, once of them with twice the loss, and four times in evaluation mode."""
    calls = io.BytesIO()  # a file is not put back
    trained = model()
    trained.register_forward_hook(lambda *_: calls.write(b".") and None)
    train(trained, checks=checks)
    assert len(calls.getvalue()) == 4 * 4 + extra


def test_a_rehearsal_is_no_work_on_a_micro_batch(tmp_path, monkeypatch):
    """Ranks wait for the slow one in a rehearsal, and the line that names it had this for work of the others."""
    passes, work = io.BytesIO(), {}
    monkeypatch.setattr("lockstep.runtime.heartbeat.monotonic", lambda: float(len(passes.getvalue())))
    trained = model()
    trained.register_forward_hook(lambda *_: passes.write(b".") and None)  # a forward pass takes a second
    run = Run(RunOptions.of(global_batch=8, micro_batches=4), World(run_directory=str(tmp_path)))
    try:
        _, optimizer = run.prepare(trained, torch.optim.SGD(trained.parameters(), lr=0.1))
        for _ in run.epochs(2):
            for batch in run.batches(data()):
                work[batch.plan.step] = read_beat(tmp_path, 0).work
                run.backward(batch, F.cross_entropy)
                optimizer.step()
                optimizer.zero_grad()
    finally:
        run.close()
    assert len(passes.getvalue()) == 8 * 4 + 4 * 2 + 6, "steps 0, 1, 4 and 7 are rehearsed"
    # A micro-batch of each step takes a second; steps before the first that is timed count with it.
    assert {step: work[step] for step in (3, 4, 6, 7)} == {3: 3.0, 4: 4.0, 6: 6.0, 7: 7.0}


def test_metrics_that_a_loss_counts_are_exact():
    correct = total = 0

    def loss(output, target):
        nonlocal correct, total
        correct += int((output.argmax(1) == target).sum())
        total += len(target)
        return F.cross_entropy(output, target)

    train(model(), loss, checks="off")
    expected, correct, total = (correct, total), 0, 0
    train(model(), loss)
    assert (correct, total) == expected
    assert total == 32


def test_a_number_without_effect_is_named_once(caplog):
    with caplog.at_level(logging.WARNING):
        train(Calls())
    told = [record.getMessage() for record in caplog.records if "changes" in record.getMessage()]
    assert len(told) == 1
    assert "the attribute 'calls' of the model (from 0 to 2)" in told[0]
    assert "run.backward(..., also=)" in told[0]


def test_an_effect_that_comes_with_a_later_call_is_found():
    calls = 0

    def loss(output, target):
        nonlocal calls
        calls += 1
        return F.cross_entropy(output, target) * (2 if calls > 4 else 1)

    with pytest.raises(ConfigError, match=r"has other bits the second time.*'calls'"):
        train(model(), loss)


def test_an_epoch_begins_with_a_rehearsal():
    calls, counts = io.BytesIO(), []
    trained = model()
    trained.register_forward_hook(lambda *_: calls.write(b".") and None)
    train(trained, epochs=3, end=lambda epoch: counts.append(len(calls.getvalue())))
    assert [after - before for before, after in itertools.pairwise(counts)] == [4 * 4 + 2, 4 * 4 + 2 + 2]


def rehearsed(**how):
    """The steps that are rehearsed: those before which the model is called more often than a step does."""
    calls, steps = io.BytesIO(), []
    trained = model()
    trained.register_forward_hook(lambda *_: calls.write(b".") and None)
    noted = Notes()
    noted.on_backward_begin = lambda batch, scale: steps.append(len(calls.getvalue()))
    train(trained, callback=noted, **how)
    extra = [after - before - 4 for before, after in itertools.pairwise([-4, *steps])]
    return [step for step, more in enumerate(extra) if more]


def test_within_a_long_epoch_rehearsals_come_after_as_many_steps_again():
    assert rehearsed(rows=8 * 100) == [0, 1, 32, 64, 99]


def test_the_second_to_the_seventh_epoch_begin_with_a_rehearsal_and_later_ones_after_many_steps():
    assert rehearsed(rows=8 * 2, epochs=20) == [0, 1, 2, 4, 6, 8, 10, 12, 32, 39]


class Later(nn.Module):
    """Parts that a loop switches on after the first epoch; nothing looked at them then."""

    def __init__(self):
        super().__init__()
        self.inner, self.on, self.hidden = nn.Linear(8, 4), "", torch.zeros(4)
        self.generator, self.weight = torch.Generator(), 0.0

    def forward(self, x):
        x = self.inner(x)
        if self.on == "hidden":
            self.hidden = self.hidden.lerp(x.detach().mean(0), 0.1)
            x = x - self.hidden
        elif self.on == "generator":
            x = x + torch.randn(4, generator=self.generator)
        elif self.on == "clamped":
            self.inner.weight.data.clamp_(-0.01, 0.01)
        return x

    def loss(self, output, target):
        self.hidden = self.hidden.lerp(output.detach().mean(0), 0.1)
        return F.cross_entropy(output, target) + self.weight * self.hidden.square().sum() * output.mean()


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("hidden", "'hidden' of the model"),
        ("generator", "'generator' of the model"),
        ("clamped", "writes into the parameter"),
        ("weight", "'hidden'"),
    ],
)
def test_what_the_loop_switches_on_after_the_first_epoch_is_looked_at(part, said):
    trained = Later()

    def end(epoch):
        trained.on, trained.weight = part, float(part == "weight")

    loss = trained.loss if part == "weight" else F.cross_entropy
    with pytest.raises(ConfigError, match=said):
        train(trained, loss, epochs=3, end=end)


def test_a_loss_that_becomes_another_kind_of_mean_is_told(caplog):
    """A term that compares samples has the weight 0 in the first epoch, or no target is masked in the first batch."""
    weight = 0.0

    def loss(output, target):
        return F.cross_entropy(output, target) + weight * (output - output.mean(0)).square().mean()

    def end(epoch):
        nonlocal weight
        assert "not a mean over samples" not in caplog.text
        weight = 1.0

    with caplog.at_level(logging.WARNING):
        train(model(), loss, epochs=2, end=lambda epoch: epoch == 0 and end(epoch))
    assert "The loss" in caplog.text and "is not a mean over samples" in caplog.text


class FromSomeCallOn(nn.Module):
    """Rounds its output once it has been called a number of times; how many is kept in one of several ways."""

    def __init__(self, kept, limit):
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.limit = nn.Linear(8, 4), limit
        kinds = {"number": 0, "list": [], "set": set(), "tensor": torch.zeros(1), "entry": {"calls": 0}}
        self.kept, self.grows = kinds.get(kept, torch.zeros(0, 8)), kept == "bank"

    def forward(self, x):
        if isinstance(self.kept, set):
            self.kept.add(float(x.sum()))
        elif isinstance(self.kept, list):
            self.kept.append(x.detach().mean())
        elif isinstance(self.kept, dict):
            self.kept["calls"] += 1
        elif self.grows:
            self.kept = torch.cat((self.kept, x[:1]))
        else:
            self.kept += 1
        calls = self.kept["calls"] if isinstance(self.kept, dict) else self.kept
        output = self.inner(x)
        is_on = (len(calls) if self.grows or isinstance(calls, set | list) else calls) > self.limit
        return output + (output.round() - output).detach() if is_on else output


@pytest.mark.parametrize("kept", ["number", "list", "set", "tensor", "bank", "entry"])
def test_a_count_that_passes_a_threshold_between_rehearsals_is_found(kept):
    """Both computations of a later rehearsal are on one side of it."""
    with pytest.raises(ConfigError, match=r"has other bits the second time.*'kept'.* \(from .*0.* to "):
        train(FromSomeCallOn(kept, 30), epochs=6)


def test_a_count_that_passes_a_threshold_just_before_the_end_is_found():
    trained = FromSomeCallOn("number", 73)
    with pytest.raises(ConfigError, match=r"has other bits the second time.*'kept' of the model \(from 0 to 76\)"):
        train(trained, epochs=5)


@pytest.mark.parametrize(
    "kept",
    [
        "tensor",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("number", "set", "list", "bank", "entry")),
    ],
)
def test_what_is_kept_for_a_log_trains_on(kept, caplog):
    with caplog.at_level(logging.WARNING):
        found = train(FromSomeCallOn(kept, 1e9), epochs=6)
    assert len([each for each in caplog.records if "'kept'" in each.getMessage()]) == (kept != "set")
    assert train(FromSomeCallOn(kept, 1e9), epochs=6, checks="off") == found


class Parts(nn.Module):
    """A loss that leaves one of its parts, and a constant, for the log."""

    def forward(self, output, target):
        self.part, self.weight, self.unread = output.square().mean(), torch.tensor(0.1), output.sum()
        return F.cross_entropy(output, target) + self.weight * self.part


def test_what_the_loop_reads_of_the_last_micro_batch_is_told(caplog):
    run, loss, values = Run(RunOptions.of(global_batch=8, micro_batches=4), World()), Parts(), []
    trained, last = run.prepare(model()), {}
    trained[3].register_forward_hook(lambda module, given, output: last.update(output=output.mean()))
    for batch in run.batches(data()):
        run.backward(batch, loss)
        values += [loss.part, loss.weight, last["output"]]
        trained.zero_grad()
    run.close()
    (told,) = [each.getMessage() for each in caplog.records if "The loop reads" in each.getMessage()]
    assert "'part' of the loss Parts" in told and "'last' of a hook of 3['output']" in told
    assert "weight" not in told and "unread" not in told


class Counted(nn.Module):
    """Counts its calls, twice."""

    def __init__(self):
        super().__init__()
        self.calls = self.unread = 0

    def forward(self, output, target):
        self.calls += 1
        self.unread += 1
        return F.cross_entropy(output, target)


def test_a_count_that_the_loop_reads_is_told_as_that(caplog):
    """It was said not to matter so far, though a learning rate may follow from it."""
    run, loss = Run(RunOptions.of(global_batch=8, micro_batches=4), World()), Counted()
    trained = run.prepare(model())
    for batch in run.batches(data()):
        run.backward(batch, loss)
        trained.zero_grad()
        assert loss.calls
    run.close()
    read, unread = [each.getMessage() for each in caplog.records if "the loss Counted" in each.getMessage()]
    assert read.startswith("The loop reads the attribute 'calls'") and "unread" not in read
    assert unread.startswith("The forward pass or the loss changes the attribute 'unread'") and "calls" not in unread


class Centered(nn.Module):
    """A loss that keeps the center of all outputs, as that of DINO."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1))

    def forward(self, output, target):
        found = F.cross_entropy(output - self.center, target)
        self.center.lerp_(output.detach().mean(), 0.1)
        return found


def test_a_loss_that_keeps_a_center_is_refused_and_told_of_the_whole_batch():
    run = Run(RunOptions.of(global_batch=8, micro_batches=4), World())
    run.prepare(model())
    said = "the buffer 'center' of the loss Centered .* once for all samples of a step, with whole_batch=True"
    for batch in run.batches(data()):
        with pytest.raises(ConfigError, match=said):
            run.backward(batch, Centered())
        break
    run.close()


def test_weights_that_are_cached_around_a_step_are_refused():
    trained = model()
    nn.utils.parametrizations.weight_norm(trained[0])
    with (
        nn.utils.parametrize.cached(),
        pytest.raises(ConfigError, match=r"under parametrize.cached\(\).*forward="),
    ):
        train(trained)


class AddedLater(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"first": nn.Linear(8, 4)})

    def forward(self, x):
        if "late" not in self.layers:
            self.layers["late"] = nn.Linear(4, 4)
        return self.layers["late"](self.layers["first"](x))


def test_a_layer_that_the_first_forward_pass_makes_is_refused_by_its_name():
    """It ended in a KeyError."""
    with pytest.raises(ConfigError, match=r"'layers.late.weight' of the model was replaced, added"):
        train(AddedLater())


def test_a_model_that_the_loop_converts_is_refused_by_its_types():
    trained = model()
    with pytest.raises(ConfigError, match=r"'0.weight' was torch.float32 at run.prepare and is torch.float64 now"):
        train(trained, epochs=2, end=lambda epoch: trained.double())


class Potential(nn.Module):
    """Keeps a state in a buffer that no checkpoint has, as the neurons of snntorch, and a mask that it makes late."""

    def __init__(self, *, resets):
        super().__init__()
        self.layer, self.resets = nn.Linear(8, 4), resets
        self.register_buffer("state", torch.zeros(0), persistent=False)

    def forward(self, x):
        x = self.layer(x)
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(x.shape[-1]), persistent=False)
        if self.resets or self.state.shape != x.shape:
            self.state = torch.zeros_like(x)
        for _ in range(2):
            self.state = 0.9 * self.state + x
        if not self.resets:
            self.state = self.state.detach()
        return x + self.state * self.mask


def test_what_each_pass_begins_anew_may_be_in_a_buffer_that_no_checkpoint_has():
    torch.manual_seed(1)
    model = Potential(resets=True)
    first = train(copy.deepcopy(model))
    assert train(copy.deepcopy(model), checks="off") == first == train(model, checks="always")
    with pytest.raises(ConfigError, match="computed twice under the same keys, has other bits"):
        train(Potential(resets=False))


def test_a_cache_by_length_is_no_state(caplog):
    """The check of means calls the loss with fewer rows; what it kept then was named."""
    masks = {}

    def loss(output, target):
        mask = masks.setdefault(len(output), torch.ones(len(output)))
        return (F.cross_entropy(output, target, reduction="none") * mask).mean()

    with caplog.at_level(logging.WARNING):
        train(model(), loss)
    assert "masks" not in caplog.text and list(masks) == [2]


def test_what_the_loop_sets_beside_what_calls_keep_is_its_own():
    """Values that the loop has set were put back with the containers that calls add to."""
    state, found = {"weight": 0.0}, [0.0]

    def loss(output, target):
        state["last"] = float(output.detach().mean())
        found.append(state["last"])
        return F.cross_entropy(output, target) + (state["weight"] + found[0]) * output.square().mean()

    def end(epoch):
        state["weight"] = found[0] = (epoch + 1) / 4

    fingerprint, _ = train(model(), loss, epochs=6, end=end)
    state, found = {"weight": 0.0}, [0.0]
    assert train(model(), loss, epochs=6, end=end, checks="off")[0] == fingerprint


class Notes(Callback):
    def __init__(self):
        self.events = []

    def on_micro_batch_begin(self, micro_batch):
        self.events.append(("begin", micro_batch.k))

    def on_micro_batch_end(self, micro_batch):
        self.events.append(("end", micro_batch.k))

    def on_backward_begin(self, batch, scale):
        self.events.append("backward")


def test_callbacks_are_told_of_the_steps_alone():
    first, off = Notes(), Notes()
    train(model(), callback=first)
    train(model(), callback=off, checks="off")
    assert first.events == off.events


def test_gradients_of_an_earlier_backward_are_kept():
    def fingerprint(checks):
        run = Run(RunOptions.of(global_batch=8, micro_batches=4, strategy="single", checks=checks), World())
        trained = model()
        _, optimizer = run.prepare(trained, torch.optim.SGD(trained.parameters(), lr=0.1))
        for batch in run.batches(data()):
            run.backward(batch, F.cross_entropy)
            run.backward(batch, lambda output, target: F.cross_entropy(output, target).square())
            optimizer.step()
            optimizer.zero_grad()
        found = run.fingerprint()
        run.close()
        return found

    assert fingerprint("first") == fingerprint("off")


def test_a_hook_that_counts_is_refused_by_its_gradient():
    trained, calls = model(), [0]

    def scale(gradient):
        calls[0] += 1
        return gradient * calls[0]

    trained[0].weight.register_hook(scale)
    with pytest.raises(ConfigError, match=r"gradient of '0.weight'.*has other bits"):
        train(trained)


def test_an_optimizer_that_a_hook_steps_is_refused_by_its_name():
    trained = model()
    inner = torch.optim.SGD([trained[0].weight], lr=0.1)
    trained[0].weight.register_post_accumulate_grad_hook(lambda _: inner.step())
    with pytest.raises(ConfigError, match=r"'0.weight'.*a hook of the backward pass steps an optimizer.*in the loop"):
        train(trained)


def test_one_micro_batch_in_one_process_may_do_as_it_likes():
    class Clamps(Calls):
        def forward(self, x):
            with torch.no_grad():
                self.inner.weight.clamp_(-0.1, 0.1)
            return self.inner(x)

    train(Clamps(), micro_batches=1)
    with pytest.raises(ConfigError, match=r"writes into the parameter 'inner.weight'"):
        train(Clamps())


def test_what_a_refused_run_changed_is_put_back():
    class Counts(Calls):
        def forward(self, x):
            return super().forward(x) * self.calls

    trained = Counts()
    with pytest.raises(ConfigError, match=r"the attribute 'calls' of the model"):
        train(trained)
    assert trained.calls == 0
    assert all(parameter.grad is None for parameter in trained.parameters())


def test_what_functions_write_into_their_input_does_not_depend_on_the_checks():
    class Scales(nn.Sequential):
        def forward(self, x):
            return super().forward(x.sub_(0.5).mul_(2))

    def from_one(output, target):
        target -= 1
        return F.cross_entropy(output, target)

    def chance(output, target):
        return output.sub_(output.mean(1, keepdim=True)).softmax(1).amax(1) + target.sub_(1)

    found = []
    for checks in ("first", "off"):
        inputs, targets = data().tensors
        rows = TensorDataset(inputs, targets + 1)
        torch.manual_seed(3)
        trained = Scales(nn.Linear(8, 4))
        run = Run(RunOptions.of(global_batch=16, micro_batches=4, strategy="single", checks=checks), World())
        _, optimizer = run.prepare(trained, torch.optim.SGD(trained.parameters(), lr=0.1))
        for batch in run.batches(rows):
            found.append(run.backward(batch, from_one, also={"odds": lambda o, _: o.exp_().sum(1)}))
            optimizer.step()
            optimizer.zero_grad()
        found.append(run.evaluate(rows, chance))
        run.close()
    assert found[: len(found) // 2] == found[len(found) // 2 :]


def test_input_that_is_written_to_is_read_once():
    class Writes(Calls):
        def forward(self, x):
            return self.inner(x.mul_(2))

    torch.manual_seed(2)
    first = train(Writes())
    torch.manual_seed(2)
    assert first == train(Writes(), checks="off")


@pytest.mark.parametrize(("device", "is_compared"), [("cpu", True), ("cuda", False)])
def test_kernels_without_a_fixed_order_are_not_compared(device, is_compared):
    """With ``deterministic=False``, two forward passes on a GPU may differ though nothing was kept between them."""
    options = RunOptions.of(global_batch=8, deterministic=False)
    strategy = SimpleNamespace(device=torch.device(device), all_ranks=None)
    rehearsals = Rehearsals(options, strategy, StepEvents(), is_main=True)
    assert rehearsals.is_new_evaluation(model(), None) is is_compared


class Noisy(nn.Module):
    """Adds noise that goes on from call to call."""

    def __init__(self):
        super().__init__()
        self.inner, self.generator = nn.Linear(8, 4), torch.Generator().manual_seed(7)

    def forward(self, x):
        return self.inner(x) + 0.1 * torch.randn(len(x), 4, generator=self.generator)


class NoisyInAList(nn.Module):
    """The same, with the generator in a list."""

    def __init__(self):
        super().__init__()
        self.inner, self.generators = nn.Linear(8, 4), [torch.Generator().manual_seed(7)]

    def generator(self):
        return self.generators[0]

    def forward(self, x):
        return self.inner(x) + 0.1 * torch.randn(len(x), 4, generator=self.generator())


class NoisyByItsClass(NoisyInAList):
    """The same, with the generator where no checkpoint has it."""

    drawn: ClassVar = [torch.Generator()]

    def __init__(self):
        super().__init__()
        self.drawn[0].manual_seed(7)

    def generator(self):
        return self.drawn[0]


class NoisyAndStored(NoisyInAList):
    """The same, by an object, and knows how to store it."""

    def __init__(self):
        super().__init__()
        self.key = object()
        self.generators = {self.key: self.generators[0]}

    def generator(self):
        return self.generators[self.key]

    def get_extra_state(self):
        return self.generator().get_state()

    def set_extra_state(self, state):
        self.generator().set_state(state)


class Carrying(nn.Module):
    """Begins with what the last call has left, without its graph."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(8, 4), None

    def forward(self, x):
        before = 0.0 if self.last is None else self.last.detach().mean()
        self.last = self.inner(x) + before
        return self.last


class Rising(nn.Module):
    """Has a learning signal that rises with each call: a number, which checkpoints hold."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * self.calls


def train_in_two_parts(made, folder):
    """The fingerprint of an epoch of four steps, of one process and one micro-batch, stopped after the second."""
    for stop in (2, 4):
        torch.manual_seed(3)
        trained = made()
        options = {"global_batch": 8, "micro_batches": 1, "strategy": "single", "directory": folder}
        run = Run(RunOptions.of(**options, resume="auto"), World())
        try:
            _, optimizer = run.prepare(trained, torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9))
            for batch in run.batches(data()):
                run.backward(batch, F.cross_entropy)
                optimizer.step()
                optimizer.zero_grad()
                if run.position.step + 1 == stop:
                    break
            run.save(wait=True)
            found = run.fingerprint()
        finally:
            run.close()
    return found


@pytest.mark.parametrize(
    "made",
    [
        *(NoisyInAList, Carrying, model),
        *(pytest.param(each, marks=pytest.mark.slow) for each in (Noisy, NoisyAndStored, Rising)),
    ],
)
def test_one_process_that_keeps_what_a_checkpoint_holds_is_resumed_with_equal_bits(made, tmp_path, caplog):
    torch.manual_seed(3)
    whole, _ = train(made(), micro_batches=1)
    assert train_in_two_parts(made, tmp_path) == whole
    assert "no checkpoint holds" not in caplog.text


def test_one_process_that_keeps_what_no_checkpoint_holds_is_told_and_not_resumed(tmp_path, caplog):
    with pytest.raises(
        ConfigError,
        match=r"'drawn' of NoisyByItsClass\[0\] from one call to the next\. The checkpoint does",
    ):
        train_in_two_parts(NoisyByItsClass, tmp_path)
    named = "'drawn' of NoisyByItsClass[0] from one call to the next, which no checkpoint holds"
    assert caplog.text.count(named) == 1


def evaluated(made, folder, *, trains):
    """The mean of an evaluation, after an epoch of one process and one micro-batch, or in a run that resumes there."""
    torch.manual_seed(3)
    trained, options = made(), {"global_batch": 8, "micro_batches": 1, "strategy": "single"}
    run = Run(RunOptions.of(**options, directory=folder, resume="auto"), World())
    try:
        _, optimizer = run.prepare(trained, torch.optim.SGD(trained.parameters(), lr=0.1))
        for _ in run.epochs(1):
            assert trains
            for batch in run.batches(data()):
                run.backward(batch, F.cross_entropy)
                optimizer.step()
                optimizer.zero_grad()
            run.save(wait=True)
        return run.evaluate(data(), F.cross_entropy)
    finally:
        run.close()


@pytest.mark.parametrize("made", [Noisy, NoisyAndStored, Rising, model])
def test_a_run_that_resumes_for_its_evaluation_only_gets_the_same(made, tmp_path):
    assert evaluated(made, tmp_path, trains=True) == evaluated(made, tmp_path, trains=False)


def test_an_evaluation_that_needs_what_no_checkpoint_holds_is_refused_in_a_resumed_run(tmp_path):
    evaluated(NoisyByItsClass, tmp_path, trains=True)
    with pytest.raises(ConfigError, match=r"forward pass of the evaluation keeps .*'drawn'.*does not hold it"):
        evaluated(NoisyByItsClass, tmp_path, trains=False)


def test_one_process_that_saves_nothing_is_not_told(caplog):
    train(Noisy(), micro_batches=1)
    assert "one call to the next" not in caplog.text


def test_a_rehearsal_is_no_waiting_for_data(tmp_path):
    """The first steps of a timeline waited for data up to a third of the time, and so did scale without a warm-up."""
    run, _, optimizer = begin(directory=tmp_path, profile="0:4")
    observer = StepObserver(run)
    batches, computing = iter(run.batches(dataset(96))), []
    for _ in range(4):
        batch = next(batches)
        computing.append(SLOW * len(batch.micro_batches))
        train_step(run, batch, optimizer, loss=slow)
        observer.end_step()
    run.close()
    shown = explain_timeline(tmp_path / "timeline.json").ranks[0].lanes
    lanes = {lane.title: lane for lane in shown}
    assert len(lanes["rehearsal"].boxes) == 2
    waits = lanes["waiting for data"].boxes
    for rehearsal in lanes["rehearsal"].boxes:
        assert rehearsal.ended - rehearsal.began > 100
        assert all(wait.ended <= rehearsal.began or rehearsal.ended <= wait.began for wait in waits)
    assert len(observer.clock.steps) == len(waits) == 4
    for phases, seconds, rehearsal in zip(observer.clock.steps, computing, lanes["rehearsal"].boxes):
        elsewhere = sum(phases.values()) - phases["data"]
        assert elsewhere > seconds + (rehearsal.ended - rehearsal.began) / 1000


SLOW = 0.05


def slow(output, target):
    time.sleep(SLOW)
    return nn.functional.cross_entropy(output, target)


@pytest.mark.parametrize(
    ("batch", "options", "told"),
    [
        (32, {"micro_batches": 8}, "has 4 samples of the 32 of a step.* Use micro_batches=4 "),
        (12, {"micro_batches": 6}, "has 2 samples of the 12 of a step.* Use micro_batches=1 "),
        (32, {"micro_batches": 4}, ""),
        (32, {"micro_batches": 8, "sync_batch_norm": True}, ""),
        (4, {"micro_batches": 1}, ""),
        (32, {"micro_batches": 8, "checks": "off"}, ""),
    ],
)
def test_batch_norm_on_micro_batches_of_few_samples_is_told(batch, options, told, caplog):
    train(model(), global_batch=batch, **options)
    said = [record.getMessage() for record in caplog.records if "BatchNorm" in record.getMessage()]
    assert len(said) == bool(told) and all(re.match(f"BatchNorm '1' normalises.*{told}", each) for each in said)


def test_batch_norm_in_evaluation_mode_normalises_no_micro_batch(caplog):
    frozen = model()
    frozen[1].eval()
    train(frozen)
    assert "BatchNorm" not in caplog.text
