"""Strategy tensor on real ranks: who holds what, equal bits, checkpoints, and what is refused."""

import io
import logging
import tempfile
from copy import deepcopy
from functools import partial

import pytest
import torch
from tests.ranks import run_ranks
from tests.strategies.tensor.tensor_jobs import JOBS
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.core.fingerprint import digest_tensor, digest_tensors
from lockstep.errors import ConfigError, ReplicaError
from lockstep.run import Run, RunOptions
from lockstep.runtime import Callback
from lockstep.runtime.lazy_compiler import postpone_compiler

pytestmark = pytest.mark.timeout(180)
TENSOR = {"strategy": "tensor", "seed": 3, "threads": 1, "global_batch": 16, "micro_batches": 8}


class TwoLayers(nn.Module):
    """A perceptron that is no chain, so that only a plan says how it is split."""

    def __init__(self, width=12, between=None):
        super().__init__()
        self.first, self.second = nn.Linear(6, width), nn.Linear(width, 4)
        self.between = between or nn.Identity()

    def forward(self, x):
        return self.second(self.between(self.first(x).relu()))


def rows(count=64):
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.arange(count) % 4)


def start(world, model, optimizer=torch.optim.AdamW, **options):
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    run = Run(RunOptions.of(**{**TENSOR, **options}), world)
    _, optimizer = run.prepare(model, optimizer(model.parameters(), lr=0.01))
    return run, optimizer


def steps(run, optimizer, data, epochs=1):
    for _ in run.epochs(epochs):
        for batch in run.batches(data):
            run.backward(batch, nn.CrossEntropyLoss())
            yield
            optimizer.step()
            optimizer.zero_grad()


def holdings(world):
    """Of each rank: sizes of parameters and optimizer state, digests of replicated gradients and of the output."""
    postpone_compiler()
    job = JOBS["channels"](torch.float32)
    run, optimizer = start(world, job.model)
    replicated = []
    for _ in steps(run, optimizer, job.data):
        cuts = run.strategy._shards
        replicated.append({n: digest_tensor(p.grad) for n, p in run.strategy.trainable().items() if n not in cuts})
    sizes = {name: tuple(p.shape) for name, p in run.strategy.trainable().items()}
    momentum = sum(state["exp_avg"].numel() for state in optimizer.wrapped.state.values())
    run.close()
    return sizes, momentum, replicated


def test_layers_and_their_optimizer_state_are_shared_out_and_the_rest_has_equal_bits():
    held = run_ranks(holdings, 3, timeout=120)
    whole = JOBS["channels"](torch.float32).model
    names = [name for name, p in whole.named_parameters() if held[0][0][name] != tuple(p.shape)]
    assert {"2.weight", "3.weight", "6.weight", "12.weight", "12.bias", "15.weight"} == set(names) - {"3.bias"}
    assert sum(p.numel() for p in whole.parameters()) > 2.5 * held[0][1]
    for sizes, momentum, replicated in held[1:]:
        assert (sizes, momentum) == held[0][:2]
        assert replicated == held[0][2], "gradients of whole parameters drift apart"


def write_and_read(world, directory, epochs, options):
    """Trains up to ``epochs`` epochs from the newest checkpoint, and saves. Gives the whole state and momenta."""
    postpone_compiler()
    job = JOBS["heads"](torch.float64)
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    run = Run(RunOptions.of(**{**TENSOR, **job.options, **options}, directory=directory, resume="auto"), world)
    _, optimizer = run.prepare(job.model, job.optimizer)
    for _ in run.epochs(epochs):
        for batch in run.batches(job.data):
            run.backward(batch, job.loss)
            run.clip_gradients(0.3)
            optimizer.step()
            optimizer.zero_grad()
    run.save()
    state = run.require_prepared().state.capture(run.fingerprint(), keep=world.is_main)
    found = {name: tensor.clone() for name, tensor in {**state.model, **state.optimizer}.items()}
    run.close()
    return found if world.is_main else {}


@pytest.mark.slow
def test_a_checkpoint_goes_from_any_layout_to_any_other():
    course = [
        (2, {"strategy": "tensor"}),
        (4, {"strategy": "tensor"}),
        (1, {"strategy": "single"}),
        (4, {"strategy": "hybrid", "mesh": "data=2,tensor=2"}),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for epochs, (world, options) in enumerate(course, 1):
            found = run_ranks(write_and_read, world, folder, epochs, {**options, "force_context": True})[0]
    with tempfile.TemporaryDirectory() as folder:
        expected = run_ranks(write_and_read, 1, folder, len(course), {"strategy": "single"})[0]
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        difference = float((found[name].double() - tensor.double()).norm())
        assert difference <= 1e-10 * max(1e-3, float(tensor.double().norm())), name


def given_plan(world, options, epochs=3):
    """Parameters and statistics after a few steps of a model that only a plan can split."""
    postpone_compiler()
    torch.manual_seed(1)
    model = nn.Sequential(nn.BatchNorm1d(6), TwoLayers(between=nn.Dropout(0.2))).double()
    run, optimizer = start(world, model, partial(torch.optim.SGD, momentum=0.9), **options)
    data = TensorDataset(rows().tensors[0].double(), rows().tensors[1])
    for _ in steps(run, optimizer, data, epochs):
        pass
    if run.options.directory is not None:
        run.save()
    found = {name: tensor.clone() for name, tensor in run.strategy.state()}
    run.close()
    return found


def test_a_plan_by_name_patterns_splits_any_model():
    plan = {"plan": ["*first=column", "*between=features", "1.second=row"]}
    expected = run_ranks(given_plan, 1, {"strategy": "single"})[0]
    for found in run_ranks(given_plan, 3, {"tensor": plan}):
        for name, tensor in expected.items():
            assert torch.allclose(found[name], tensor, rtol=1e-10, atol=1e-12), name


def test_a_run_with_a_plan_is_resumed():
    """The whole model that the split one was compared with had the values of the beginning, and the run was refused."""
    options = {"tensor": {"plan": ["*first=column", "*between=features", "1.second=row"]}}
    expected = run_ranks(given_plan, 2, options)[0]
    with tempfile.TemporaryDirectory() as folder:
        for epochs in (1, 3):
            found = run_ranks(given_plan, 2, {**options, "directory": folder, "resume": "auto"}, epochs)[0]
    assert digest_tensors(found) == digest_tensors(expected)


def refusals(world):
    """The sentence in which each mistake ends, by name."""
    postpone_compiler()
    torch.manual_seed(1)  # of other weights, those that dropout treats differently may all be zeroed by relu
    said = {}
    plan = ["first=column", "second=row"]
    cases = {
        "width": (TwoLayers(width=10), {"tensor": {"plan": plan}}),
        "no plan": (TwoLayers(), {}),
        "row alone": (TwoLayers(), {"tensor": {"plan": ["second=row"]}}),
        "norm": (TwoLayers(between=nn.LayerNorm(12)), {"tensor": {"plan": plan}}),
        "mixed": (TwoLayers(between=nn.Softmax(-1)), {"tensor": {"plan": plan}}),
        "dropout": (TwoLayers(between=nn.Dropout(0.3)), {"tensor": {"plan": plan}}),
        "in an evaluation": (TwoLayers(between=InEvaluation()), {"tensor": {"plan": plan}}),
        "with gradients": (TwoLayers(between=WithGradients()), {"tensor": {"plan": plan}}),
        "frozen norm": (Frozen(), {"tensor": {"plan": ["0.first=column", "0.second=row"]}}),
        "ends split": (Split(), {"tensor": {"plan": ["a=column", "b=row", "end=column"]}}),
        "mesh": (TwoLayers(), {"strategy": "hybrid", "mesh": "fsdp=1,tensor=3"}),
        "transformed": (Slopes(), {}),
        "replaced": (chain(), {}),
    }
    for name, (model, options) in cases.items():
        try:
            run, optimizer = start(world, model, **options)
            if name == "replaced":
                model[2] = nn.Linear(12, 4)
            for _ in steps(run, optimizer, rows()):
                pass
            said[name] = ""
        except ConfigError as error:
            said[name] = str(error)
    try:
        start(world, TwoLayers(), Whitening, tensor={"plan": plan})
        said["optimizer"] = ""
    except ConfigError as error:
        said["optimizer"] = str(error)
    return said


class Switched(TwoLayers):
    """Looks at all features if its class says so; counts its calls, and scales each element."""

    normalises, scale, calls, dim = False, 1.0, 0, 0

    def forward(self, x):
        self.calls += 1
        h = self.first(x).relu() * self.scale
        if not self.training or self.dim:
            h = h.softmax(self.dim)
        if self.normalises:
            h = h / (1.0 + h.norm(dim=-1, keepdim=True))
        return self.second(self.between(h).reshape(-1, h.shape[-1]))


def switched_later(world, name, value):
    """The sentence in which a run ends whose loop changes an attribute of a class, or hooks a module, in a step."""
    postpone_compiler()
    model = Switched()
    run, optimizer = start(world, model, tensor={"plan": ["first=column", "second=row"]})
    said = ""
    try:
        for step, _ in enumerate(steps(run, optimizer, rows())):
            if step == 1 and name == "hook":
                model.between.register_forward_hook(lambda module, given, output: output.softmax(-1))
            elif step == 1:
                setattr(Switched, name, value)
                if name == "normalises" and value == "in evaluation":
                    run.evaluate(rows(), nn.CrossEntropyLoss())
    except ConfigError as error:
        said = str(error)
    finally:
        Switched.normalises, Switched.scale, Switched.dim = False, 1.0, 0
    run.close()
    return said


@pytest.mark.parametrize(
    ("name", "value", "function"),
    [
        *(("normalises", True, "norm"), ("normalises", "in evaluation", "norm")),
        *(("hook", None, "softmax"), ("dim", -1, "softmax"), ("scale", 0.5, "")),
    ],
)
def test_a_loop_that_switches_something_on_between_split_layers_is_refused(name, value, function):
    """The run trained another model than the whole one, with exit status 0."""
    sentence = f"gives the split outputs of 'first' to {function!r} now, and it did not in the first step"
    for said in run_ranks(switched_later, 2, name, value):
        assert sentence in said if function else not said, said


def chain():
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))


class Split(nn.Module):
    """Its last layer gives logits that a plan may split by mistake."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.end = nn.Linear(6, 12), nn.Linear(12, 6), nn.Linear(6, 12)

    def forward(self, x):
        return self.end(self.b(self.a(x)))


class InEvaluation(nn.Module):
    """Looks at all features in an evaluation."""

    def forward(self, x):
        return x if self.training else x.softmax(-1)


class WithGradients(nn.Module):
    """Looks at all features where gradients are computed."""

    def forward(self, x):
        return x.softmax(-1) if torch.is_grad_enabled() else x


class Frozen(nn.Sequential):
    """Has a BatchNorm in evaluation mode, and one that is trained."""

    def __init__(self):
        super().__init__(TwoLayers(), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
        self[1].eval()


class Slopes(nn.Module):
    """Differentiates its layers by torch.func."""

    def __init__(self):
        super().__init__()
        self.layers = chain()

    def forward(self, x):
        return torch.func.vmap(torch.func.jacrev(self.layers))(x).mean(-1)


class Whitening(torch.optim.SGD):
    """An optimizer whose update of an element depends on all others."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        return super().step(closure)


def test_mistakes_end_in_one_sentence_on_every_rank():
    everyone = run_ranks(refusals, 3, timeout=120)
    expected = {
        "width": "cannot split the 10 heads, features or channels of 'first' over 3 ranks. Use 2 or 5 or 10 ranks",
        "no plan": "found nothing to split in TwoLayers",
        "row alone": "4 for each, and it was given 12",
        "norm": "The model split by tensor.plan fails",
        "mixed": "returns another output than the whole model",
        "dropout": "returns another output than the whole model",
        "in an evaluation": "returns another output than the whole model in an evaluation",
        "with gradients": "returns another output than the whole model (relative",
        "frozen norm": "",
        "ends split": "returns another output than the whole model",
        "mesh": "cannot lay out the mesh",
        "transformed": "calls a layer within torch.func.vmap, grad, vjp, jvp or jacrev, and strategy 'tensor'",
        "replaced": "The module '2' of the model was replaced or taken out after run.prepare",
        "optimizer": "steps the optimizer on parts of parameters, and Whitening",
    }
    for rank, said in enumerate(everyone):
        for name, sentence in expected.items():
            assert sentence in said[name] and bool(sentence) == bool(said[name]), f"rank {rank}, {name}: {said[name]!r}"


def drift(world):
    """The message when a whole parameter is changed on one rank alone."""
    postpone_compiler()
    job = JOBS["features"](torch.float32)
    run, optimizer = start(world, job.model)
    if world.rank == 1:
        with torch.no_grad():
            run.strategy.trainable()["10.bias"][0] += 1e-3
    try:
        for _ in steps(run, optimizer, job.data):
            pass
    except ReplicaError as error:
        return str(error)


@pytest.mark.fault("C7")
def test_ranks_that_drift_apart_are_found_in_the_same_step():
    for said in run_ranks(drift, 2):
        assert "differs between ranks that share the model's layers" in said


class Overflow(Callback):
    """Makes the gradient of a part infinite, from the first micro-batch on: hooks from before are refused."""

    def __init__(self, part):
        self.part = part

    def on_micro_batch_begin(self, micro_batch):
        self.part.register_hook(lambda gradient: gradient * torch.inf)


def overflow(world):
    """Steps skipped, and whether parameters moved, after an overflow in one rank's part of a gradient."""
    postpone_compiler()
    job = JOBS["features"](torch.float32)
    run, optimizer = start(world, job.model, precision="fp16")
    trained = run.strategy.trainable()
    before = {name: p.detach().clone() for name, p in trained.items()}
    if world.rank == 1:
        run.add_callback(Overflow(trained["1.weight"]))
    for _ in steps(run, optimizer, TensorDataset(*(tensor[:16] for tensor in job.data.tensors))):
        pass
    moved = [name for name, p in trained.items() if not torch.equal(p, before[name])]
    return run.skipped_steps, moved


def test_an_overflow_in_the_part_of_one_rank_skips_the_step_on_all():
    assert run_ranks(overflow, 2) == [(1, []), (1, [])]


def loop_uses(world):
    """The answers of a split parameter to ordinary code of a loop, by name: a value, or the sentence of a refusal."""
    postpone_compiler()
    torch.manual_seed(1)
    model = TwoLayers()
    weight = model.first.weight
    start_values = weight.detach().clone()
    run, optimizer = start(world, model, partial(torch.optim.SGD), tensor={"plan": ["first=column", "second=row"]})
    found = {"same object": model.first.weight is weight, "shape": tuple(weight.shape)}
    uses = {
        "norm of the gradient": lambda: weight.grad.norm(),
        "value": lambda: weight.detach().abs().max(),
        "dot product": lambda: (weight.grad * weight.grad).sum(),
        "own gradient": lambda: setattr(weight, "grad", torch.ones(12, 6)),
        "copy": lambda: deepcopy(model),
        "pickled": lambda: torch.save(model, io.BytesIO()),
        "autograd.grad": lambda: torch.autograd.grad(model(torch.ones(2, 6)).sum(), weight, allow_unused=True),
    }
    for _ in steps(run, optimizer, TensorDataset(*(tensor[:16] for tensor in rows().tensors))):
        for name, use in uses.items():
            try:
                found[name] = str(use())
            except ConfigError as error:
                found[name] = str(error)
        for parameter in model.parameters():
            parameter.grad.mul_(0.0)
    with torch.no_grad():
        weight.mul_(0.5)
    state = {name: tensor.clone() for name, tensor in run.strategy.state()}
    # After a step by a gradient of zero
    found["halved"] = torch.equal(state["first.weight"], start_values * 0.5)
    run.close()
    return found


def test_a_loop_sees_whole_shapes_and_no_values_of_split_parameters():
    """Sums over a part were taken for those of the whole: two ranks then trained by other numbers."""
    for found in run_ranks(loop_uses, 2):
        assert found.pop("same object") and found.pop("halved")
        assert found.pop("shape") == (12, 6)
        for name, said in found.items():
            if name in ("copy", "pickled"):
                assert "The model was copied or pickled, and under strategy 'tensor'" in said, name
                continue
            assert "'first.weight'" in said and "under strategy 'tensor' each rank has a part of it" in said, name
