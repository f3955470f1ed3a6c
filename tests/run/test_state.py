"""Checkpoints that a run refuses to restore."""

import json
import re
from collections import Counter, deque
from functools import partial

import pytest
import torch
from tests.checkpoint.manifests import manifest_of
from tests.run.jobs import begin, dataset, network, train_step
from torch import nn

import lockstep
from lockstep.checkpoint import read_newest
from lockstep.checkpoint.manifest import MANIFEST, RECORD
from lockstep.errors import CheckpointError, CheckpointMismatch, ConfigError
from lockstep.run.attributes import Values


def saved(tmp_path, **options):
    run, _, optimizer, *_ = begin(directory=tmp_path, **options)
    train_step(run, next(iter(run.batches(dataset()))), optimizer)
    run.save()


@pytest.mark.fault("M10")
def test_a_checkpoint_of_another_context_is_refused_unless_forced(tmp_path):
    saved(tmp_path)
    with pytest.raises(CheckpointMismatch, match=r"seed: 0 there, 1 here"):
        begin(directory=tmp_path, resume="auto", seed=1)
    run, *_ = begin(directory=tmp_path, resume="auto", seed=1, force_context=True)
    assert run.position.step == 1


@pytest.mark.parametrize(
    ("turned", "name"),
    [
        (torch.set_flush_denormal, "torch.set_flush_denormal was True"),
        (torch.backends.cuda.enable_flash_sdp, "torch.backends.cuda.flash_sdp_enabled() was True"),
        (torch.backends.mkldnn.set_flags, "torch.backends.mkldnn.enabled was True"),
    ],
)
def test_settings_of_torch_that_the_loop_has_made_and_the_resumed_run_has_not_are_refused(turned, name, tmp_path):
    """They were in no checkpoint: the run went on with other bits."""
    before = torch.backends.mkldnn.enabled

    def step(**options):
        run, _, optimizer = begin(directory=tmp_path, resume="auto", **options)
        train_step(run, next(iter(run.batches(dataset()))), optimizer)
        run.close()

    try:
        turned(True)
        saved(tmp_path)
        step()
        turned(False)
        with pytest.raises(ConfigError, match=re.escape(name)):
            step()
        step(force_context=True)
    finally:
        torch.set_flush_denormal(False)
        torch.backends.cuda.enable_flash_sdp(True)
        torch.backends.mkldnn.set_flags(before)


class Counting(torch.optim.SGD):
    """Keeps a number where its ``state_dict`` does not have it."""

    steps, kind = 0, "plain"

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)


def test_numbers_that_an_optimizer_keeps_as_attributes_go_on(tmp_path):
    saved(tmp_path, make_optimizer=Counting)
    run, _, optimizer = begin(directory=tmp_path, resume="auto", make_optimizer=Counting)
    assert run.require_prepared().state.parts.optimizers[0].steps == 1
    train_step(run, next(iter(run.batches(dataset()))), optimizer)
    assert run.require_prepared().state.parts.optimizers[0].steps == 2


class Tabled(torch.optim.SGD):
    """Keeps numbers in containers, which others hold too."""

    def __init__(self, *given, **settings):
        super().__init__(*given, **settings)
        self.counts, self.rates = {"all": {"steps": 0}, 3: (0, None)}, deque([0.5], maxlen=2)
        self.held = self.counts

    def step(self, closure=None):
        self.counts["all"]["steps"] += 1
        self.rates.append(1 / self.counts["all"]["steps"])
        return super().step(closure)


def test_numbers_that_an_optimizer_keeps_in_containers_go_on(tmp_path):
    saved(tmp_path, make_optimizer=Tabled)
    run, _, optimizer = begin(directory=tmp_path, resume="auto", make_optimizer=Tabled)
    own = run.require_prepared().state.parts.optimizers[0]
    assert own.counts is own.held
    assert own.counts == {"all": {"steps": 1}, 3: (0, None)}
    assert own.rates == deque([0.5, 1.0])
    assert own.rates.maxlen == 2
    train_step(run, next(iter(run.batches(dataset()))), optimizer)
    assert own.rates == deque([1.0, 0.5])


class Velocity(torch.optim.Optimizer):
    """Keeps a tensor for each parameter in an attribute."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.velocity = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for place, p in enumerate(group["params"]):
                kept = self.velocity.setdefault(place, torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                p.sub_(kept, alpha=group["lr"])


class Wrapping(torch.optim.Optimizer):
    """Steps another one, as implementations of sharpness-aware minimisation do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, momentum=0.9)

    def step(self, closure=None):
        self.base.step()


class Shared(Wrapping):
    """The same, with the state of the other as its own."""

    def __init__(self, params):
        super().__init__(params)
        self.state = self.base.state


class Counted(torch.optim.SGD):
    """Counts in an entry of ``state`` that belongs to no parameter, and a list there."""

    def step(self, closure=None):
        self.state["all"] = [self.state.get("all", [0])[0] + torch.ones(1)]
        return super().step(closure)


class CountedByKind(torch.optim.SGD):
    """Counts in an object of its own, in an entry of ``state`` that belongs to no parameter."""

    class Count:
        steps = 0

    def step(self, closure=None):
        self.state.setdefault(nn.Linear, self.Count()).steps += 1
        return super().step(closure)


class Preconditioned(torch.optim.SGD):
    """Counts in ``state`` and a dict there, keeps a queue and an orthogonal matrix, along columns, and a dtype."""

    def __init__(self, *given, **settings):
        super().__init__(*given, **settings)
        self.param_groups[0]["kept_as"] = torch.float64
        self.state["steps"], self.state["tensor"], self.state[0] = 0, torch.zeros(1), {"steps": 0}

    @torch.no_grad()
    def step(self, closure=None):
        self.state["steps"] += 1
        self.state[0]["steps"] += 1
        self.state["tensor"] += self.state["steps"]
        for p in self.param_groups[0]["params"]:
            if p.dim() == 2:
                state = self.state[p]
                state.setdefault("queue", deque(maxlen=2)).append(p.grad.clone())
                if "basis" not in state:
                    state["basis"] = torch.linalg.qr(p.grad @ p.grad.mT)[0].to(self.param_groups[0]["kept_as"])
                state.setdefault("kinds", Counter()).update({"seen": 1})
                p.grad.copy_(state["basis"].mT @ state["queue"][0].double() / state["kinds"]["seen"])
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Velocity, "velocity[0] of Velocity"),
        (Counted, "state['all'][0] of Counted"),
        (CountedByKind, "state[...].steps of CountedByKind"),
    ],
)
def test_what_an_optimizer_keeps_elsewhere_is_named_and_such_a_run_is_not_resumed(kind, said, tmp_path, caplog):
    def made(params, *_, **__):
        return kind(params) if kind is Velocity else kind(params, lr=0.1)

    saved(tmp_path, make_optimizer=made)
    assert f"No checkpoint holds {said}" in caplog.text
    with pytest.raises(CheckpointMismatch, match=re.escape(f"does not hold {said}")):
        begin(directory=tmp_path, resume="auto", make_optimizer=made)
    run, *_ = begin(directory=tmp_path, resume="auto", make_optimizer=made, force_context=True)
    assert run.position.step == 1


def test_an_optimizer_that_the_loop_makes_itself_is_named_and_such_a_run_is_not_resumed(tmp_path, caplog):
    def save_after_a_step(folder, momentum):
        run, model, _ = begin(directory=folder)
        second = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        steps = iter(run.batches(dataset()))
        for _ in range(1):
            train_step(run, next(steps), second)
            run.save(wait=True)

    save_after_a_step(tmp_path / "plain", 0.0)
    assert "No checkpoint holds" not in caplog.text, "it keeps nothing"
    save_after_a_step(tmp_path / "kept", 0.9)
    assert "No checkpoint holds the state of" in caplog.text
    assert "second (SGD), which run.prepare was not given" in caplog.text
    with pytest.raises(CheckpointMismatch, match=r"second \(SGD\), which run.prepare was not given"):
        begin(directory=tmp_path / "kept", resume="auto")
    begin(directory=tmp_path / "plain", resume="auto")


class TwoMeans(nn.Module):
    """Two buffers beside the features."""

    def __init__(self, tied):
        super().__init__()
        self.register_buffer("first", torch.zeros(1))
        self.register_buffer("second", self.first if tied else torch.zeros(1))

    def forward(self, x):
        return x + 0 * (self.first + self.second)


@pytest.mark.parametrize("tied", [False, True])
def test_buffers_that_the_loop_ties_or_parts_are_named_and_such_a_run_is_not_resumed(tied, tmp_path, caplog):
    def begun():
        means = TwoMeans(tied)
        run, _, optimizer = begin(nn.Sequential(means, *network()), directory=tmp_path, resume="auto")
        return means, run, optimizer

    means, run, optimizer = begun()
    batches = iter(run.batches(dataset()))
    train_step(run, next(batches), optimizer)
    run.save(wait=True)
    begun()
    assert "No checkpoint holds" not in caplog.text
    train_step(run, next(batches), optimizer)
    means.second = means.first.clone() if tied else means.first
    run.save(wait=True)
    assert "No checkpoint holds the buffer '0.second', which is None, of another shape" in caplog.text
    with pytest.raises(CheckpointMismatch, match=r"does not hold the buffer '0\.second'"):
        begun()


@pytest.mark.parametrize(
    "change",
    [
        lambda means: setattr(means, "first", torch.zeros(2)),
        lambda means: means.first.resize_(2),
        lambda means: setattr(means, "second", means.second.double()),
        lambda means: setattr(means, "first", None),
        lambda means: means.register_buffer("third", torch.zeros(1)),
        lambda means: means.register_buffer("third", torch.zeros(1), persistent=False),
        lambda means: setattr(means, "second", torch.ones(1)),
    ],
)
def test_buffers_that_become_others_are_named_where_the_checkpoint_is_written(change, tmp_path, caplog):
    """The run ended well, and could not be resumed: 'The checkpoint holds the state of another model'."""
    means = TwoMeans(tied=False)
    run, _, optimizer = begin(nn.Sequential(means, *network()), directory=tmp_path)
    train_step(run, next(iter(run.batches(dataset()))), optimizer)
    change(means)
    run.save(wait=True)
    is_kept = {"third"} & means._non_persistent_buffers_set or (means.second == 1).all()
    assert ("No checkpoint holds the buffer" in caplog.text) is not bool(is_kept)


def test_what_an_optimizer_keeps_goes_on_as_it_lay_in_memory(tmp_path):
    """An orthogonal matrix lies along columns: along rows, products with it may have other bits."""

    def found(*stops, **options):
        for epochs in (*stops, 3):
            run, _, optimizer = begin(make_optimizer=Preconditioned, **options)
            for _ in run.epochs(epochs):
                for batch in run.batches(dataset()):
                    train_step(run, batch, optimizer)
                if stops:
                    run.save(wait=True)
            own = optimizer.wrapped
            fingerprint = run.fingerprint()
            run.close()
        kept = [state for p, state in own.state.items() if isinstance(p, torch.Tensor)]
        strides = [(each["basis"].stride(), each["queue"].maxlen) for each in kept if "basis" in each]
        named = own.state["steps"], own.state["tensor"], own.state[0]
        return fingerprint, strides, *named, own.param_groups[0]["kept_as"]

    expected = found()
    assert expected[1][0][0][0] == 1, "along its columns"
    assert found(1, directory=tmp_path, resume="auto") == expected


@pytest.mark.parametrize("kind", [Wrapping, Shared, Counting])
def test_an_optimizer_that_keeps_nothing_elsewhere_is_resumed(kind, tmp_path, caplog):
    def made(params, *_, **__):
        return kind(params, lr=0.1) if kind is Counting else kind(params)

    saved(tmp_path, make_optimizer=made)
    assert "No checkpoint holds" not in caplog.text
    run, *_ = begin(directory=tmp_path, resume="auto", make_optimizer=made)
    assert run.position.step == 1


@pytest.mark.parametrize("name", torch.optim.__all__)
def test_numbers_that_torch_keeps_for_this_process_are_none_of_them(name):
    kind = getattr(torch.optim, name, None)
    if not isinstance(kind, type) or kind is torch.optim.Optimizer:
        pytest.skip("not an optimizer")
    sparse = name == "SparseAdam"
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = kind([weight], lr=0.1)

    def held():
        found = Values({"optimizer 0": optimizer}).found
        return {place: value for place, value in found.items() if value != ["left out"]}

    before = held()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        weight.grad = torch.ones(4, 4).to_sparse() if sparse else torch.ones(4, 4)
        optimizer.step(lambda: weight.sum().detach())
        schedule.step()
    assert held() == before


@pytest.mark.fault("K6")
def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    saved(tmp_path)
    with pytest.raises(CheckpointMismatch, match=r"4\.weight"):
        begin(nn.Sequential(*network()[:4]), directory=tmp_path, resume="auto")


def test_a_checkpoint_of_other_schedulers_or_optimizers_is_refused(tmp_path):
    saved(tmp_path)
    with pytest.raises(CheckpointMismatch, match="optimizers"):
        begin(directory=tmp_path, resume="auto", make_optimizer=torch.optim.AdamW)
    with pytest.raises(CheckpointMismatch, match="0 schedulers"):
        begin(
            directory=tmp_path,
            resume="auto",
            make_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        )


def cosine(steps):
    return lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def test_settings_that_the_checkpoint_would_replace_are_refused(tmp_path):
    """torch's load_state_dict takes the learning rate and T_max of the checkpoint, and says nothing."""
    saved(tmp_path, make_scheduler=cosine(9))
    *_, scheduler = begin(directory=tmp_path, resume="auto", make_scheduler=cosine(9))
    assert scheduler.T_max == 9
    with pytest.raises(CheckpointMismatch, match=r"T_max of scheduler 0: 9 in the checkpoint's run, 12 here"):
        begin(directory=tmp_path, resume="auto", make_scheduler=cosine(12))
    for settings in ({"lr": 0.05}, {"make_optimizer": partial(torch.optim.SGD, weight_decay=0.5)}):
        with pytest.raises(CheckpointMismatch, match=r"(?s)of optimizer 0, group 0: .* weights\.path"):
            begin(directory=tmp_path, resume="auto", make_scheduler=cosine(9), **settings)
    begin(
        directory=tmp_path,
        resume="auto",
        make_scheduler=cosine(9),
        make_optimizer=partial(torch.optim.SGD, foreach=None, fused=None),
    )


def test_what_follows_from_another_setting_of_a_scheduler_is_not_shown_beside_it(tmp_path):
    def one_cycle(steps):
        return lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)

    saved(tmp_path, make_scheduler=one_cycle(90))
    with pytest.raises(CheckpointMismatch, match="total_steps of scheduler 0: 90 in") as caught:
        begin(directory=tmp_path, resume="auto", make_scheduler=one_cycle(120))
    assert "_schedule_phases" not in str(caught.value)


def test_settings_that_a_script_changes_after_prepare_stay_over_a_restart(tmp_path):
    run, _, optimizer = begin(directory=tmp_path)
    optimizer.param_groups[0]["lr"] = 0.25
    train_step(run, next(iter(run.batches(dataset()))), optimizer)
    run.save()
    _, _, optimizer = begin(directory=tmp_path, resume="auto")
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["progress"].pop("extra"),
        lambda record: record["progress"]["position"].update(step=-1),
        lambda record: record["progress"]["position"].update(step="1"),
        lambda record: record["progress"]["position"].update(course=1),
        lambda record: record.update(optimizers={"main": []}),
        lambda record: record["optimizers"]["0"].pop("state"),
    ],
)
@pytest.mark.fault("K3")
def test_a_record_that_is_none_of_a_run_is_refused_however_well_it_is_sealed(tmp_path, change):
    saved(tmp_path)
    path = read_newest(tmp_path).path
    record = json.loads((path / RECORD).read_bytes())
    change(record)
    (path / RECORD).write_text(json.dumps(record))
    (path / MANIFEST).write_bytes(manifest_of(path, 1))
    with pytest.raises(CheckpointError, match="Use another"):
        begin(directory=tmp_path, resume="auto")


def test_skipped_steps_are_counted_over_a_stop(tmp_path):
    options = {"directory": tmp_path, "precision": "fp16", "loss_scale": 2.0**60}
    run, _, optimizer = begin(**options)
    train_step(run, next(iter(run.batches(dataset()))), optimizer)
    assert run.skipped_steps == 1
    run.save(wait=True)
    run, *_ = begin(**options, resume="auto")
    assert run.skipped_steps == 1


class Scale(nn.Module):
    """Keeps a number as extra state, others as an attribute and in a buffer that no ``state_dict`` has."""

    scale = 1.0

    def __init__(self):
        super().__init__()
        self.rate = 1.0
        self.register_buffer("sums", torch.ones(2), persistent=False)

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


def test_what_a_module_beside_the_model_keeps_goes_on(tmp_path):
    options = {"global_batch": 8, "micro_batches": 2, "directory": tmp_path}
    for scale, resume in ((0.5, None), (1.0, "auto")):
        run = lockstep.init(**options, resume=resume)
        _, beside = run.prepare(network(), nn.Sequential(Scale()))
        beside[0].scale *= scale
        beside[0].rate *= scale
        beside[0].sums.mul_(scale)
        assert (beside[0].scale, beside[0].rate, beside[0].sums.tolist()) == (0.5, 0.5, [0.5, 0.5])
        run.save(wait=True)
        run.close()
