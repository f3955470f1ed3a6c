"""Steps by closures; steps that are refused: gradients that were not reduced, two loss scales."""

import copy
import itertools
from collections import defaultdict
from functools import partial

import pytest
import torch
from tests.ranks import run_ranks
from tests.run.jobs import GLOBAL_BATCH, begin, dataset, network, train_step
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.core.world import World
from lockstep.errors import ConfigError, LockstepError

cross_entropy = nn.functional.cross_entropy


def test_a_step_without_run_backward_is_refused():
    run, model, optimizer = begin()
    for batch in run.batches(dataset()):
        with pytest.raises(ConfigError, match="so there is no gradient yet"):
            run.clip_gradients(1.0)
        inputs, targets = batch.micro_batches[0].data
        cross_entropy(model(inputs), targets).backward()
        with pytest.raises(ConfigError, match=r"gradients from loss\.backward\(\) do not count"):
            run.clip_gradients(1.0)
        with pytest.raises(ConfigError, match=r"not summed over the ranks\. Call run\.backward"):
            optimizer.step()
        break


def test_zero_grad_has_the_arguments_that_it_was_given():
    """A class whose zero_grad() takes none, as a public Lookahead, ended in a TypeError."""

    class Own(torch.optim.SGD):
        def zero_grad(self, *given):
            calls.append(given)
            super().zero_grad(*given)

    calls: list[tuple[bool, ...]] = []
    run = lockstep.init(global_batch=GLOBAL_BATCH)
    model = network()
    model, optimizer = run.prepare(model, Own(model.parameters(), 0.1))
    for _ in run.batches(dataset()):
        optimizer.zero_grad()
        optimizer.zero_grad(set_to_none=False)
        break
    run.close()
    assert calls == [(), (False,)]


def test_a_model_in_float64_is_clipped_as_torch_clips_it():
    """The factor was rounded to float32."""
    run = lockstep.init(global_batch=16, micro_batches=1)
    model = nn.Linear(8, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.prepare(model, optimizer)
    (batch,) = run.batches(TensorDataset(torch.ones(16, 8, dtype=torch.float64), torch.ones(16, dtype=torch.int64)))
    run.backward(batch, cross_entropy)
    alike = copy.deepcopy(model)
    for mine, theirs in zip(alike.parameters(), model.parameters(), strict=True):
        mine.grad = theirs.grad.clone()
    norms = [run.clip_gradients(1e-3), nn.utils.clip_grad_norm_(alike.parameters(), 1e-3)]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-14, atol=0)
    for mine, theirs in zip(model.parameters(), alike.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-14, atol=0)


@pytest.mark.parametrize("early", [True, False])
def test_gradients_that_are_cleared_before_the_first_step_are_told(early, caplog):
    run, _, optimizer = begin()
    for batch in run.batches(dataset()):
        if early:
            optimizer.zero_grad()
        run.backward(batch, cross_entropy)
        if not early:
            optimizer.zero_grad()
        optimizer.step()
        break
    assert ("The first step of the optimizer SGD has no gradient" in caplog.text) is not early


@pytest.mark.parametrize(("clears", "steps"), [(False, False), (True, False), (False, True)])
def test_a_loop_that_never_steps_is_told_at_its_end(clears, steps, caplog):
    """It trained nothing, without a word."""
    run, _, optimizer = begin()
    for batch in run.batches(dataset()):
        run.backward(batch, cross_entropy)
        if clears:
            optimizer.zero_grad()
    if steps:
        optimizer.step()
    run.close()
    assert caplog.text.count("optimizer.step() was never called after run.backward") == (not steps)


class Around(torch.optim.Optimizer):
    """As implementations of SAM, whose second step is that of another optimizer."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    def second_step(self):
        self.base.step()


def test_a_loop_that_steps_the_optimizer_within_another_has_stepped(caplog):
    run, model = lockstep.init(global_batch=GLOBAL_BATCH), network()
    model, optimizer = run.prepare(model, Around(model.parameters()))
    before = model[0].weight.clone()
    for batch in run.batches(dataset()):
        run.backward(batch, cross_entropy)
        optimizer.second_step()
        optimizer.zero_grad()
    run.close()
    assert not torch.equal(model[0].weight, before)
    assert "was never called" not in caplog.text


def test_a_step_of_the_optimizer_that_was_not_returned_is_refused():
    run, model = lockstep.init(global_batch=GLOBAL_BATCH), network()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, own)
    for batch in run.batches(dataset()):
        run.backward(batch, cross_entropy)
        with pytest.raises(ConfigError, match="Step the one it returned"):
            own.step()
        break


class Scaled(torch.optim.SGD):
    """Multiplies gradients by an attribute of its own."""

    gain = 1.0

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(self.gain)
        return super().step(closure)


def stepped(change, steps=3):
    """The losses of a few steps of a loop that does something to its optimizer between them."""
    run, _, optimizer = begin(make_optimizer=lambda parameters, lr: Scaled(parameters, lr, momentum=0.9))
    losses = []
    for batch in itertools.islice(run.batches(dataset()), steps):
        losses.append(float(run.backward(batch, cross_entropy)))
        optimizer.step()
        optimizer.zero_grad()
        change(optimizer)
    return losses


def test_a_loop_may_give_its_optimizer_a_state_groups_and_attributes():
    forgotten = stepped(lambda optimizer: optimizer.state.clear())
    assert forgotten != stepped(lambda _: None)
    assert stepped(lambda optimizer: setattr(optimizer, "state", defaultdict(dict))) == forgotten
    assert stepped(lambda optimizer: optimizer.__setstate__({"state": defaultdict(dict)})) == forgotten

    def other_rate(optimizer):
        optimizer.param_groups = [dict(group, lr=0.01) for group in optimizer.param_groups]

    assert stepped(other_rate) == stepped(lambda optimizer: optimizer.param_groups[0].update(lr=0.01))
    assert stepped(lambda optimizer: setattr(optimizer, "gain", 0.5)) == stepped(
        lambda optimizer: setattr(optimizer.wrapped, "gain", 0.5)
    )


def test_copies_of_a_prepared_optimizer_are_refused():
    with pytest.raises(ConfigError, match=r"Copy optimizer\.state_dict"):
        stepped(copy.deepcopy)


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, and does not call the __init__ of its base class."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure=None):
        self.inner.step(closure)


def test_an_optimizer_without_the_init_of_its_base_class_is_stepped():
    run, _, optimizer = begin(make_optimizer=lambda parameters, lr: Lookahead(plain(parameters, lr)))
    other, _, inner = begin(make_optimizer=plain)
    for batch in run.batches(dataset()):
        run.backward(batch, cross_entropy)
        optimizer.step()
        break
    for batch in other.batches(dataset()):
        other.backward(batch, cross_entropy)
        inner.step()
        break
    assert run.fingerprint() == other.fingerprint()


class Averaging(torch.optim.Optimizer):
    """Has a state of its own, and that of the optimizer that it wraps."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, defaultdict(dict)
        self.defaults = inner.defaults

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step(closure)
        for parameter in (each for group in self.param_groups for each in group["params"]):
            slow = self.state[parameter].setdefault("slow", parameter.clone())
            parameter.copy_(slow.lerp_(parameter, 0.5))


@pytest.mark.parametrize("kind", [Averaging, Lookahead])
def test_the_state_of_a_wrapped_optimizer_goes_through_a_checkpoint(kind, tmp_path):
    """As of the Lookahead of several libraries: a resumed run was refused."""

    def trained(folder, last_steps):
        for last_step in last_steps:
            run, _, optimizer = begin(
                make_optimizer=lambda parameters, lr: kind(torch.optim.Adam(parameters, lr)),
                directory=tmp_path / folder,
                resume="auto",
            )
            for batch in run.batches(dataset()):
                train_step(run, batch, optimizer)
                if batch.plan.step == last_step:
                    run.save(wait=True)
                    break
            found = run.fingerprint()
            run.close()
        return found

    assert trained("one", [2]) == trained("two", [0, 2])


def plain(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr)


def lbfgs(parameters, lr):
    return torch.optim.LBFGS(parameters, lr=lr, max_iter=3, history_size=2)


def closed(world, make, strategy="single", directory=None, epochs=2):
    run, _, optimizer = begin(
        make_optimizer=make, strategy=strategy, directory=directory, resume="auto" * bool(directory)
    )
    losses = []
    for _ in run.epochs(epochs):
        for batch in run.batches(dataset()):

            def closure(batch=batch):
                optimizer.zero_grad()
                return run.backward(batch, cross_entropy)

            losses.append(float(optimizer.step(closure)))
        optimizer.zero_grad()
        if directory:
            run.save(wait=True)
    found = losses, run.fingerprint()
    run.close()
    return found


@pytest.mark.parametrize("given", [(None, 0.5), (0.5,), {"scale": 0.5}])
def test_a_step_with_other_arguments_is_refused(given):
    run, _, optimizer = begin()
    run.backward(next(iter(run.batches(dataset()))), nn.functional.cross_entropy)
    with pytest.raises(ConfigError, match=r"step\(\) of SGD was given more than a closure.*attribute"):
        optimizer.step(**given) if isinstance(given, dict) else optimizer.step(*given)


def test_a_closure_evaluates_the_loss_as_often_as_the_optimizer_wants(tmp_path):
    """LBFGS has equal bits on ranks, and after a resume."""
    for make in (lbfgs, plain):
        alone = closed(World(), make)
        assert run_ranks(closed, 2, make, "ddp") == [alone, alone]
    assert closed(World(), plain) == closed_by_steps()
    whole = closed(World(), lbfgs)
    closed(World(), lbfgs, directory=tmp_path, epochs=1)
    assert closed(World(), lbfgs, directory=tmp_path)[1] == whole[1]


def two_optimizers(directory):
    """A run whose parameters two optimizers train, and the two."""
    run = lockstep.init(
        global_batch=GLOBAL_BATCH, micro_batches=4, strategy="single", directory=directory, resume="auto"
    )
    model = network()
    first = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return run, *run.prepare(model, first, lbfgs(model.parameters(), 0.1))[1:]


def trained_in_two_phases(directory, stop_in):
    run, first, second = two_optimizers(directory)
    for epoch in run.epochs(4):
        optimizer = first if epoch < 2 else second
        for number, batch in enumerate(run.batches(dataset())):

            def closure(batch=batch, optimizer=optimizer):
                optimizer.zero_grad()
                return run.backward(batch, cross_entropy)

            optimizer.step(closure)
            if number:
                assert not run.require_prepared().gradients, "a signal would not stop the run here"
            run.save(wait=True)
        if epoch == stop_in:
            break
    found = run.fingerprint()
    run.close()
    return found


def test_a_gradient_that_one_of_two_optimizers_has_used_does_not_wait_for_the_other(tmp_path):
    """As where Adam trains first and LBFGS goes on, and each clears the gradients before its step."""
    whole = trained_in_two_phases(tmp_path / "whole", None)
    for epoch in (1, 2, 3):
        found = trained_in_two_phases(tmp_path / "stopped", epoch)
    assert found == whole


def test_a_gradient_that_two_optimizers_use_in_turn_waits_for_the_second(tmp_path):
    run, first, second = two_optimizers(tmp_path)
    for batch in run.batches(dataset()):
        run.backward(batch, cross_entropy)
        first.step()
        assert run.require_prepared().gradients
        second.step(lambda batch=batch: run.backward(batch, cross_entropy))
        assert not run.require_prepared().gradients
    run.close()


def closed_by_steps():
    run, _, optimizer = begin(make_optimizer=plain, strategy="single")
    losses = [float(train_step(run, batch, optimizer)) for _ in run.epochs(2) for batch in run.batches(dataset())]
    found = losses, run.fingerprint()
    run.close()
    return found


def told(world, make, call):
    try:
        run, _, optimizer = begin(make_optimizer=make, strategy="fsdp")
        run.backward(next(run.batches(dataset())), cross_entropy)
        call(optimizer)
    except ConfigError as error:
        return str(error)


def test_an_optimizer_with_a_closure_needs_the_whole_model_and_its_closure():
    for found in run_ranks(told, 2, lbfgs, torch.optim.Optimizer.step):
        assert found.startswith("LBFGS may evaluate the loss several times per step") and "'ddp'" in found
    _, _, optimizer = begin(make_optimizer=lbfgs)
    with pytest.raises(ConfigError, match=r"Write optimizer\.step\(closure\)"):
        optimizer.step()
    _, _, optimizer = begin(precision="fp16", make_optimizer=lbfgs)
    with pytest.raises(ConfigError, match="fp16 scales"):
        optimizer.step(lambda: 0.0)


def test_a_parameter_that_was_frozen_cannot_be_trained_later():
    model = network()
    model[0].weight.requires_grad_(False)
    run, _, optimizer = begin(model)
    for batch in run.batches(dataset()):
        train_step(run, batch, optimizer)
        model[0].weight.requires_grad_(True)
        with pytest.raises(ConfigError, match=r"'0\.weight' was frozen at run\.prepare"):
            run.backward(batch, cross_entropy)
        break


def test_a_second_backward_before_the_step_is_refused_under_fp16_only():
    run, _, optimizer = begin(precision="fp16")
    batches = run.batches(dataset())
    run.backward(next(batches), cross_entropy)
    with pytest.raises(ConfigError, match="two loss scales"):
        run.backward(next(batches), cross_entropy)
    optimizer.zero_grad()


def test_a_resumed_run_has_the_scale_of_the_checkpoint_and_the_growth_of_its_own_options(tmp_path):
    run, _, optimizer = begin(precision="fp16", directory=tmp_path, loss_scale=64.0)
    for _ in run.epochs(1):
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
    run.save(wait=True)
    run.close()
    changed = {"loss_scale": 8.0, "loss_scale_growth_interval": 7}
    resumed, _, _ = begin(precision="fp16", directory=tmp_path, resume="auto", **changed)
    scaler = resumed._precision.scaler
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (64.0, 7)
    resumed.close()


def scaled(fused):
    """Weights and skipped steps of a run whose first steps overflow, in memory that others have used."""
    waste = [torch.full((size,), 3e38) for size in (8, 16, 24, 48, 64) * 50]
    del waste
    run, model, optimizer = begin(
        make_optimizer=partial(torch.optim.SGD, momentum=0.9, fused=fused),
        precision="fp16",
        loss_scale=2.0**40,
        loss_scale_backoff_factor=2.0**-12,
    )
    for _ in run.epochs(4):
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
    return model.state_dict(), run.skipped_steps


def test_fused_steps_that_overflow_are_skipped_and_counted():
    """torch's fused SGD has no first momentum where its first step was skipped, and takes what the memory held."""
    expected, skipped = scaled(fused=False)
    found, also_skipped = scaled(fused=True)
    assert skipped == also_skipped > 0
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_a_step_that_several_optimizers_skip_is_counted_once():
    """A run of four steps said that eight were skipped."""
    run = lockstep.init(global_batch=6, micro_batches=3, precision="fp16", loss_scale=2.0**60)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model, *both = run.prepare(model, *(torch.optim.SGD(each.parameters(), 0.1) for each in model))
    counts = []
    for batch in run.batches(TensorDataset(torch.ones(11, 3), torch.zeros(11, dtype=torch.int64))):
        run.backward(batch, cross_entropy)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        counts.append(run.skipped_steps)
    assert counts == [1, 2]


class NeverEmpty(torch.optim.SGD):
    def step(self, closure=None):
        torch.stack([parameter.grad.sum() for parameter in self.param_groups[0]["params"]])
        return super().step(closure)


class Estimating(torch.optim.SGD):
    """Keeps a number of all gradients in its group, as Prodigy does."""

    def step(self, closure=None):
        group = self.param_groups[0]
        group["distance"] = sum(float(each.grad.norm()) for each in group["params"])
        return super().step(closure)


def served(world, make):
    run, _, optimizer = begin(make_optimizer=make, strategy="parameter_server")
    for batch in run.batches(dataset()):
        train_step(run, batch, optimizer)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (NeverEmpty, r"NeverEmpty cannot step without parameters \(RuntimeError"),
        (
            Estimating,
            r"an optimizer that computes a setting from the gradients of its process \(use strategy 'ddp'",
        ),
    ],
)
def test_optimizers_that_only_a_server_could_step_are_refused_in_words(kind, said):
    with pytest.raises(LockstepError, match=said):
        run_ranks(served, 2, kind)
