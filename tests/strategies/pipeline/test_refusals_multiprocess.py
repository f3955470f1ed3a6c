"""Refusals of a pipeline: each ends in one sentence, before the first step, and what it holds is what it says."""

import io
import logging
import re
from functools import partial

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from lockstep.config.strategy_options import PipelineOptions
from lockstep.errors import ConfigError
from lockstep.models import transformer
from lockstep.run import Run, RunOptions
from lockstep.strategies.absent import AbsentParameter

pytestmark = pytest.mark.timeout(120)


def test_micro_batches_that_do_not_fill_the_pipeline_are_refused_with_a_number_that_does():
    one_by_one, interleaved = PipelineOptions(), PipelineOptions(schedule="interleaved")
    one_by_one.check_micro_batches(8, 2, 4)
    interleaved.check_micro_batches(8, 2, 2)
    with pytest.raises(ConfigError, match=r"4 stages is not filled by micro_batches=6 over 2.*micro_batches=8"):
        one_by_one.check_micro_batches(6, 2, 4)
    with pytest.raises(ConfigError, match=r"rounds of 3.*multiple of 3, for example micro_batches=9"):
        interleaved.check_micro_batches(8, 1, 3)


def test_only_the_interleaved_schedule_has_several_stages_per_rank():
    assert PipelineOptions().stages_of_a_rank == 1
    assert PipelineOptions(schedule="interleaved").stages_of_a_rank == 2
    assert PipelineOptions(schedule="interleaved", stages_per_rank=3).stages_of_a_rank == 3
    with pytest.raises(ConfigError, match=r"stages_per_rank=2 needs schedule 'interleaved'"):
        PipelineOptions(stages_per_rank=2)
    with pytest.raises(ConfigError, match=r"'1f2b' is not known. Did you mean '1f1b'"):
        PipelineOptions(schedule="1f2b")


def options(**given):
    return RunOptions.of(**{"global_batch": 8, "micro_batches": 4, "threads": 1, "strategy": "pipeline", **given})


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 300), nn.ReLU(), nn.Linear(300, 4), nn.Linear(4, 2))


def rows():
    return TensorDataset(torch.arange(96.0).view(24, 4) / 96, torch.arange(24) % 2)


class OwnDraws(nn.Module):
    """Draws in its own forward, so it cannot be opened."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(nn.functional.dropout(self.first(x), 0.1))


SHALLOW = {"last": False}


class Skips(nn.Module):
    """Calls one layer more if an attribute says so."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.is_deep, self.inner.is_left_out = True, False

    def forward(self, x):
        x = self.first(x)
        is_deep = self.is_deep and not self.inner.is_left_out and not SHALLOW["last"]
        return self.last(self.inner(x) if is_deep else x)


class Growing(nn.Module):
    """Gives another shape in every call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x.repeat(1, self.calls)


class Views(nn.Module):
    """Gives a tensor and a part of it."""

    def forward(self, x):
        return x, x[:, :2]


class Changes(nn.Module):
    """Changes the one, and reads the other."""

    def forward(self, given):
        whole, part = given
        whole.mul_(2.0)
        return whole + part.sum(1, keepdim=True)


class Shared(nn.Module):
    """Sets something for the modules that come after it, or reads it."""

    def __init__(self, kept, sets):
        super().__init__()
        self.kept, self.sets = kept, sets

    def forward(self, x):
        if self.sets is True or (self.sets == "in evaluation" and not self.training):
            self.kept["scale"] = x.mean()
        return x * self.kept.get("scale", 1.0)


class Noting(nn.Module):
    """A chain that keeps something for the loss."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.features = nn.Linear(4, 4), nn.Linear(4, 2), None

    def forward(self, x):
        self.features = self.first(x)
        return self.last(self.features)


class Recomputed(nn.Module):
    """Computes a part again in the backward pass, by what the forward pass has set."""

    def __init__(self):
        super().__init__()
        self.inner, self.gate = nn.Linear(4, 4), None

    def gated(self, x):
        return self.inner(x).tanh() * self.gate

    def forward(self, x):
        self.gate = x[:, :1].detach()
        return checkpoint(self.gated, x, use_reentrant=False)


class Seen(nn.Module):
    """Scales the gradient by what the last forward pass has seen."""

    def forward(self, x):
        self.seen = x.detach()
        return torch.tanh(x)


def scaled_by_seen():
    module = Seen()
    module.register_full_backward_hook(lambda module, given, found: (given[0] * module.seen,))
    return nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 4), nn.Linear(4, 2))


def shared(kept, sets=True):
    return nn.Sequential(nn.Linear(4, 4), Shared(kept, sets), nn.Linear(4, 4), Shared(kept, False), nn.Linear(4, 2))


class Auxiliary(nn.Module):
    """Keeps a part of the loss, as a mixture of experts does."""

    def __init__(self):
        super().__init__()
        self.gate, self.aux = nn.Linear(4, 4), 0.0

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        self.aux = weights.mean(0).square().sum()
        return x * weights


def auxiliary():
    return nn.Sequential(nn.Linear(4, 4), Auxiliary(), nn.Linear(4, 4), Auxiliary(), nn.Linear(4, 2))


class Opaque(nn.Module):
    """Gives something that cannot be sent."""

    def forward(self, x):
        return {1, 2}


REFUSED = {
    "too few micro-batches": (
        layers,
        {"micro_batches": 1},
        r"not filled by micro_batches=1.*micro_batches=2",
    ),
    "another mesh": (
        layers,
        {"strategy": "hybrid", "mesh": "tensor=1,pipeline=2"},
        r"cannot lay out the mesh tensor=1,pipeline=2. Use one like .*data=N,pipeline=N",
    ),
    "tied ends": (
        lambda: transformer(vocabulary_size=9, depth=1, width=8, heads=2, tied=True),
        {},
        r"'head.weight' is also used in 'embed.table'",
    ),
    "own draws": (OwnDraws, {}, r"not a chain of modules.*without drawing random numbers itself"),
    "split": (layers, {"pipeline": {"split": ["relu"]}}, r"'relu', and the model cannot be cut there"),
    "compile": (
        layers,
        {"compile": True},
        r"the model is compiled as one.*Put the layers of each block into",
    ),
    "other shapes": (
        lambda: nn.Sequential(nn.Linear(4, 4), Growing(), nn.AdaptiveAvgPool1d(2)),
        {"pipeline": {"split": ["2"]}},
        r"The tensors after '1', where a stage ends, differ in shape",
    ),
    "no tensors": (
        lambda: nn.Sequential(nn.Linear(4, 4), Opaque(), nn.Linear(4, 2)),
        {"pipeline": {"split": ["2"]}},
        r"ends with '1' returns set, but only tensors",
    ),
    "average": (layers, {"average": True}, r"given a Linear beside the model.*holds no whole model"),
    "declared": (
        layers,
        {"running_buffers": ("ema.*",)},
        r"running_buffers: no buffer of the model matches 'ema.\*'",
    ),
    "both partition": (layers, {"pipeline": {"split": ["2"], "balance": "time"}}, r"Give one of the two"),
    "by time": (
        layers,
        {"pipeline": {"balance": "time"}},
        r"pipeline.balance='time' is measured by lockstep train",
    ),
    "a view and its base": (
        lambda: nn.Sequential(nn.Linear(4, 4), Views(), Changes(), nn.Linear(4, 2)),
        {"pipeline": {"split": ["2"]}},
        r"begins with '2' changes a tensor in place that it is given together with a view of it",
    ),
    "for what is computed again": (
        lambda: nn.Sequential(nn.Linear(4, 4), Recomputed(), nn.Linear(4, 4), nn.Linear(4, 2)),
        {"pipeline": {"split": ["2"]}},
        r"The gradient of '0.weight' of one micro-batch has other bits if the forward pass of another comes before",
    ),
    "for a backward hook": (
        scaled_by_seen,
        {"pipeline": {"split": ["2"]}},
        r"keeps something for the backward pass: for a hook there, or for a part that torch.utils.checkpoint",
    ),
    "for another stage": (
        lambda: shared({}),
        {"pipeline": {"split": ["3"]}},
        r"changes the attribute 'kept' of 3 in the stage that begins with '0', and modules of another stage can read",
    ),
    "for another stage in an evaluation": (
        lambda: shared({}, "in evaluation"),
        {"pipeline": {"split": ["3"]}, "evaluated": True},
        r"changes the attribute 'kept' of 3 in the stage that begins with '0', and modules of another stage can read",
    ),
    "for the loss": (
        Noting,
        {"noted": True},
        r"The loss reads 'model.features', which .* changes in the model. Under a pipeline it runs in another",
    ),
    "for a loss that goes over the modules": (
        auxiliary,
        {"auxiliary": "loss"},
        r"The loss reads 'model.1.aux', which .* changes in the stage that begins with '0'. Under a pipeline it runs",
    ),
    "for a metric": (
        auxiliary,
        {"auxiliary": "metric", "evaluated": True},
        r"The metric, or keep=, reads 'model.1.aux', which .* changes in the stage that begins with '0'",
    ),
    "of a loss for a hook": (
        layers,
        {"set": True},
        r"or the loss changes 'spread' of 'kept' in the stage that begins with '2', and modules of another stage",
    ),
    "loss of the model": (
        layers,
        {"decay": True},
        r"The parameter '0\.weight' is used outside of the forward pass of its module.*'pipeline' rank 0 has its stage",
    ),
    "model in the loss": (
        layers,
        {"again": True},
        r"called in the middle of run.backward, by the loss.*'pipeline' has its stages in several.*torch.cat",
    ),
    "another activation": (
        layers,
        {"replaced": True},
        r"The module '1' of the model was replaced, added or taken out after run.prepare",
    ),
    "another forward": (
        layers,
        {"patched": True},
        r"The forward of 'the model' was replaced after run.prepare, and strategy 'pipeline' calls what is in it",
    ),
    "another way": (
        Skips,
        {"skipped": True},
        r"'is_deep' was changed after run.prepare, and the forward of 'the model' calls other modules now",
    ),
    "another way by a child": (Skips, {"skipped": "inner"}, r"'inner.is_left_out' was changed after"),
    "another way by a variable": (Skips, {"skipped": "file"}, r"'SHALLOW' was changed after"),
    "own forward": (layers, {"forward": True}, r"a forward of your own, which calls the whole model"),
    "derivative by an input": (
        layers,
        {"derived": lambda model, x: torch.autograd.grad(model(x).sum(), x, allow_unused=True)},
        r"torch\.autograd\.grad was called on the output of a model whose stages run in several processes",
    ),
    "transform": (
        layers,
        {"derived": lambda model, x: torch.func.vmap(model)(x.detach())},
        r"called within a transform of torch\.func, .*'ddp' or 'fsdp'",
    ),
    "forward mode": (
        layers,
        {"derived": lambda model, x: forward_mode(model, x.detach())},
        r"called within a transform of torch\.func, .* or in forward mode",
    ),
}


OF_LOOP = (
    "set",
    "auxiliary",
    "forward",
    "average",
    "decay",
    "noted",
    "evaluated",
    "again",
    "replaced",
    "patched",
    "skipped",
    "derived",
)
"""Changes of the loop; all else is an option."""


LATE = (
    "a view and its base",
    "other shapes",
    "no tensors",
    "for another stage",
    "for another stage in an evaluation",
    "for a loss that goes over the modules",
    "for a metric",
    "of a loss for a hook",
    "loss of the model",
    "model in the loss",
    "own forward",
)
"""Found by one rank in its first step, which ends there; all others are found by every rank before it."""


@pytest.mark.parametrize("case", [LATE[0], *(pytest.param(each, marks=pytest.mark.slow) for each in LATE[1:])])
def test_what_shows_in_the_first_step_is_refused(case):
    with pytest.raises(ConfigError, match=REFUSED[case][2]):
        run_ranks(one_step, 2, case, timeout=30)


def test_what_cannot_be_is_refused_on_every_rank():
    for found in run_ranks(early_refusals, 2, timeout=60):
        assert list(found) == [case for case in REFUSED if case not in LATE]
        for case, said in found.items():
            assert re.search(REFUSED[case][2], said), (case, said)


def early_refusals(world):
    found = {}
    for case in REFUSED:
        if case not in LATE:
            try:
                one_step(world, case)
                found[case] = "nothing was refused"
            except ConfigError as error:
                found[case] = str(error)
    return found


def forward_mode(model, x):
    with torch.autograd.forward_ad.dual_level():
        return model(x)


def one_step(world, case):
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    make, given, _ = REFUSED[case]
    own = (lambda data: data[0]) if given.get("forward") else None
    run = Run(options(**{name: value for name, value in given.items() if name not in OF_LOOP}), world)
    original = make()
    average = [nn.Linear(1, 1)] if given.get("average") else []
    model, optimizer, *_ = run.prepare(original, torch.optim.SGD(original.parameters(), lr=0.1), *average)
    loss = nn.CrossEntropyLoss()
    if given.get("decay"):
        loss = lambda output, target: output.square().mean() + original[0].weight.square().sum()  # noqa: E731
    metric, kept = loss, {"spread": 1.0}
    if given.get("set"):
        original[0].weight.register_hook(lambda gradient: gradient * kept["spread"])

        def loss(output, target):
            kept["spread"] = float(output.detach().std())
            return nn.functional.cross_entropy(output, target)

    if given.get("auxiliary"):
        plain = loss

        def with_auxiliary(output, target):
            return plain(output, target) + sum(each.aux for each in model.modules() if hasattr(each, "aux"))

        loss, metric = (with_auxiliary, loss) if given["auxiliary"] == "loss" else (loss, with_auxiliary)
    if given.get("noted"):
        loss = lambda output, target: output.square().mean() + model.features.square().mean()  # noqa: E731
    if given.get("again"):
        loss = lambda output, target: output.square().mean() + model(torch.ones(2, 4)).square().mean()  # noqa: E731
    if given.get("replaced"):
        model[1] = nn.GELU()
    if given.get("skipped"):
        model.used = True  # names that its forward does not read, and values that change nothing
        model.is_deep = 1
        model(torch.ones(2, 4))
        if given["skipped"] == "inner":
            model.inner.is_left_out = True
        elif given["skipped"] == "file":
            SHALLOW["last"] = True
        else:
            model.is_deep = False
    if given.get("patched"):
        original.forward = lambda x: 2 * nn.Sequential.forward(original, x)
    if given.get("derived"):
        given["derived"](model, torch.ones(2, 4, requires_grad=True))
    for _ in run.epochs(1):
        for batch in run.batches(rows()):
            run.backward(batch, loss, forward=own)
            optimizer.step()
            if given.get("evaluated"):
                run.evaluate(rows(), metric)
    run.close()


def test_a_loop_that_reads_what_an_opened_forward_would_set_is_told():
    """It read the first value in each step, without a word."""
    said, nothing = run_ranks(reads_what_is_not_set, 2, timeout=30)
    assert "The loop reads the attribute 'features' of the model, which a forward sets. It keeps its value" in said
    assert "The loop reads" not in nothing


def reads_what_is_not_set(world):
    told = io.StringIO()
    logging.getLogger("lockstep").addHandler(logging.StreamHandler(told))
    run, model = Run(options(), world), Noting()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in run.batches(rows()):
        run.backward(batch, nn.CrossEntropyLoss())
        optimizer.step()
        assert model.features is None
    run.close()
    return told.getvalue()


def test_a_rank_holds_its_stages_and_gives_the_whole():
    """Parameters, optimizer state and memory are shared out; outputs, state and evaluation are whole on every rank."""
    whole = layers()
    expected = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    for rank, found in enumerate(run_ranks(hold, 2, timeout=60)):
        assert found["held"] == (["0.bias", "0.weight"] if rank == 0 else ["2.bias", "2.weight", "3.bias", "3.weight"])
        assert found["optimized"] == len(found["held"])
        assert found["elsewhere"] == (4 if rank == 0 else 2)
        assert list(found["state"]) == list(expected)
        assert all(torch.equal(found["state"][name], expected[name]) for name in expected)
        assert torch.equal(found["output"], whole(rows().tensors[0][:3]).detach())
        assert torch.equal(found["cast"], in_bf16(whole))
        assert found["momentum"] == {"held": rank == 0, "whole": [300, 4]}
        images, labels = rows().tensors
        assert found["right"] == float((whole(images).argmax(1) == labels).double().mean())


def in_bf16(model):
    with torch.autocast("cpu", torch.bfloat16):
        return model(rows().tensors[0][:3]).detach()


def hold(world):
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    run, original = Run(options(), world), layers()
    own = torch.optim.SGD(original.parameters(), lr=0.1, momentum=0.9)
    model, _ = run.prepare(original, own)
    found = {
        "held": sorted(run.strategy.trainable()),
        "optimized": sum(len(group["params"]) for group in own.param_groups),
        "elsewhere": sum(isinstance(parameter, AbsentParameter) for parameter in original.parameters()),
        "state": {name: tensor.clone() for name, tensor in run.strategy.state()},
        "output": model(rows().tensors[0][:3]).detach(),
        "cast": in_bf16(model),
        "right": run.evaluate(rows(), lambda output, target: output.argmax(1) == target),
    }
    with pytest.raises(ConfigError, match=r"so no process has its graph\. Call run\.backward\(batch, loss_fn\)"):
        model(rows().tensors[0][:3]).sum().backward()
    whole = torch.arange(1200.0).view(300, 4)
    part = run.strategy.local_shard("0.weight", whole)
    given = run.strategy.gather_full("0.weight", part, torch.float32)
    assert torch.equal(given, whole)
    found["momentum"] = {"held": part is not None, "whole": list(given.shape)}
    run.close()
    return found


def freezes_within_an_epoch(world, rank, layer, schedule):
    run = Run(options(pipeline={"schedule": schedule}), world)
    model = layers()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step, batch in enumerate(run.batches(rows())):
        if step == 1 and world.rank == rank:
            model[layer].requires_grad_(False)
        run.backward(batch, nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("rank", "layer"),
    [(0, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(0, 0), (1, 0), (1, 3)])],
)
def test_layers_that_one_rank_freezes_within_an_epoch_are_refused(rank, layer, schedule):
    with pytest.raises(ConfigError, match=r"do not agree on which parameters are trained in this step"):
        run_ranks(freezes_within_an_epoch, 2, rank, layer, schedule, timeout=30)


def calls_with_other_sizes(world):
    run = Run(options(), world)
    model = layers()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    images = rows().tensors[0][:3]
    model(images)
    if world.rank == 0:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(images[:, 1:])
    else:
        model(images[:, 1:])
    for go_on in (partial(model, images), lambda: next(iter(run.batches(rows())))):
        with pytest.raises(ConfigError, match=r"^A call of the model raised RuntimeError .* which was caught\. The"):
            go_on()
    raise ConfigError("all done")


def test_going_on_after_an_error_in_a_call_of_the_model_is_refused_where_other_ranks_wait():
    """The other ranks waited for its output until the run was stalled."""
    with pytest.raises(ConfigError, match="all done"):
        run_ranks(calls_with_other_sizes, 2, timeout=30)
