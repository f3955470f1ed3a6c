"""Models with parameters and buffers out of the ordinary: the bits of one device in every layout, or one sentence."""

import functools
import re

import pytest
import torch
from tests.sameness.layouts import LAYOUTS, outcomes, require_ends
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import TensorDataset

from lockstep.run import Run, RunOptions

pytestmark = pytest.mark.timeout(180)


def rows(count=20):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.arange(count) % 3)


def tokens(count=20):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(11, (count, 4), generator=generator), torch.arange(count) % 3)


def train(world, settings, first, data=None, *, optimizer=None, average=None, part=None, loss=None, **options):
    """Two steps, the second of them ragged, of a model that begins with ``first`` and has eight features after it.

    ``average`` is made of the model, or of its part of that number.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*first(), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    recipe = {"global_batch": 12, "micro_batches": 6, "seed": 3, "threads": 1}
    run = Run(RunOptions.of(**{**recipe, **options, **settings}), world)
    own = (optimizer or functools.partial(torch.optim.SGD, lr=0.1))(model.parameters())
    averages = [average(model if part is None else model[part])] if average else []
    model, own, *averages = run.prepare(model, own, *averages)
    found = {}
    for batch in run.batches(data or rows()):
        found[f"loss {batch.plan.step}"] = run.backward(batch, loss or nn.CrossEntropyLoss())
        found[f"norm {batch.plan.step}"] = run.clip_gradients(0.5)
        own.step()
        own.zero_grad()
        for each in averages:
            each.update_parameters(model if part is None else model[part])
    for each in averages:
        found |= dict(each.module.state_dict())
        if part is None:
            score = run.evaluate(data or rows(), lambda output, _: output.sum(1), model=each)
            found |= {"average": torch.tensor(score)}
    found |= {name: tensor.clone() for name, tensor in run.state_dict().items()}
    fingerprint = run.fingerprint()
    run.close()
    found = {name: tensor.detach() for name, tensor in found.items()} if world.is_main else {}
    return {**found, fingerprint: torch.zeros(1)}


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8, dtype=torch.complex64) * 0.3)

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).abs()


def complex_weight(world, settings):
    return train(world, settings, lambda: [Complex()])


class Empty(nn.Linear):
    def __init__(self):
        super().__init__(6, 8)
        self.no_rows, self.no_columns = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(3, 0))

    def forward(self, x):
        return super().forward(x) + self.no_rows.sum() + self.no_columns.sum()


def empty_weights(world, settings):
    return train(world, settings, lambda: [Empty()])


def no_features(world, settings):
    return train(world, settings, lambda: [nn.Linear(6, 0), nn.Linear(0, 8)])


class Embedded(nn.Embedding):
    def __init__(self):
        super().__init__(11, 8, sparse=True)

    def forward(self, x):
        return super().forward(x).mean(1)


def sparse_embedding(world, settings):
    return train(world, settings, lambda: [Embedded()], tokens())


def sparse_embedding_adam(world, settings):
    return train(
        world,
        settings,
        lambda: [Embedded()],
        tokens(),
        optimizer=functools.partial(torch.optim.Adam, lr=0.01),
    )


def sparse_bag(world, settings):
    return train(world, settings, lambda: [nn.EmbeddingBag(11, 8, sparse=True)], tokens())


def spectral(world, settings):
    return train(world, settings, lambda: [parametrizations.spectral_norm(nn.Linear(6, 8))])


def spectral_of_old(world, settings):
    return train(world, settings, lambda: [nn.utils.spectral_norm(nn.Linear(6, 8), n_power_iterations=2)])


class Calls(nn.Linear):
    """Counts its calls, in place, and what it has seen, by a new tensor."""

    def __init__(self):
        super().__init__(6, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int32))

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.seen = self.seen + torch.stack([x.gt(0).sum(), x.gt(1).sum(), x.lt(0).sum()]).int()
        return super().forward(x)


def counters(world, settings):
    found = train(world, settings, lambda: [Calls()], running_buffers=("*calls", "0.seen"))
    if "0.calls" in found:
        assert found["0.calls"].item() == 10 and found["0.seen"][[0, 2]].sum().item() == 120
    return found


def counters_beside_batch_norm(world, settings):
    return train(world, settings, lambda: [Calls(), nn.BatchNorm1d(8)], running_buffers=("*calls", "0.seen"))


class Extra(nn.Linear):
    def __init__(self):
        super().__init__(6, 8)

    def get_extra_state(self):
        return {"unit": "mm", "scale": torch.ones(2)}

    def set_extra_state(self, state):
        raise AssertionError("nothing was resumed")


def extra_state(world, settings):
    return train(world, settings, lambda: [Extra()])


def transposed(world, settings):
    layer = nn.Linear(6, 8)
    layer.weight = nn.Parameter(torch.linspace(-1, 1, 48).view(6, 8).t())
    return train(world, settings, lambda: [layer])


def channels_last(world, settings):
    """Convolution weights in channels-last order, of a model that was converted by hand."""
    layers = [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.Conv2d(4, 8, (1, 2)), nn.Flatten()]
    return train(world, settings, lambda: [each.to(memory_format=torch.channels_last) for each in layers])


def average(world, settings):
    return train(world, settings, lambda: [nn.Linear(6, 8), nn.BatchNorm1d(8)], average=AveragedModel)


def moving_average_with_buffers(world, settings):
    ema = functools.partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    return train(world, settings, lambda: [nn.Linear(6, 8), nn.BatchNorm1d(8)], average=ema)


def average_of_a_part(world, settings):
    """Of a block whose shapes the block before it has: the average was of that one, where no process holds all."""

    def blocks():
        return [nn.Linear(6, 8), *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2))]

    return train(world, settings, blocks, average=AveragedModel, part=2)


class Workspace(nn.Linear):
    """Computes into memory that it keeps, which gets the size of each micro-batch."""

    def __init__(self):
        super().__init__(6, 8)
        self.register_buffer("work", torch.empty(0), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            self.work.resize_(0)
            torch.mul(x, 0.5, out=self.work)
        return super().forward(x + self.work.clone())


def workspace(world, settings):
    return train(world, settings, lambda: [Workspace()])


EQUAL = (
    workspace,
    complex_weight,
    empty_weights,
    no_features,
    sparse_embedding,
    sparse_embedding_adam,
    sparse_bag,
    spectral,
    spectral_of_old,
    counters,
    counters_beside_batch_norm,
    extra_state,
    transposed,
    channels_last,
    average,
    moving_average_with_buffers,
    average_of_a_part,
)
REFUSED = {
    ("complex_weight", "server"): "stores values of one number type, and the model has 2",
    ("complex_weight", "servers"): "stores values of one number type, and the model has 2",
    (
        "transposed",
        "fsdp-pipeline",
    ): r"'0.weight' of shape \(8, 6\) is stored with strides \(1, 8\).*contiguous",
    ("channels_last", "fsdp-pipeline"): "is stored in channels-last order",
}
"""Cases that a layout refuses, and how."""


@functools.cache
def alone():
    return outcomes(EQUAL, "single")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("single", "tensor")])
def test_odd_models_have_the_bits_of_one_device(layout):
    for program, expected, found in zip(EQUAL, alone(), outcomes(EQUAL, layout)):
        assert not expected.fault and not expected.refusal, (program.__name__, expected)
        refusal = REFUSED.get((program.__name__, layout), "")
        assert not found.fault and re.search(refusal, found.refusal), (program.__name__, found)
        if not refusal:
            assert found == expected, f"{program.__name__}, {layout}"


def lazy(world, settings):
    return train(world, settings, lambda: [nn.LazyLinear(8)])


def lazy_batch_norm(world, settings):
    return train(world, settings, lambda: [nn.Linear(6, 8), nn.LazyBatchNorm1d()])


def one_row(world, settings):
    return train(world, {**settings, "micro_batches": 12}, lambda: [nn.Linear(6, 8), nn.BatchNorm1d(8)])


def one_row_without_statistics(world, settings):
    run = Run(RunOptions.of(global_batch=4, micro_batches=2, threads=1, **settings), world)
    layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))
    run.prepare(layers, torch.optim.SGD(layers.parameters(), lr=0.1))
    return run.evaluate(TensorDataset(torch.ones(5, 6), torch.arange(5) % 3), nn.functional.cross_entropy)


class Expanded(nn.Linear):
    def __init__(self):
        super().__init__(6, 8)
        self.bias = nn.Parameter(torch.zeros(1).expand(8))


def expanded(world, settings):
    return train(world, settings, lambda: [Expanded()])


class Quantised(nn.Linear):
    """Has a weight of a class that keeps its values in two tensors, as libraries that quantise do."""

    def __init__(self):
        super().__init__(6, 8)
        halves = self.weight.detach().clone(), self.weight.detach().clone()
        self.weight = nn.Parameter(TwoTensor(*halves), requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.a, self.bias)


def quantised(world, settings):
    return train(world, settings, lambda: [Quantised()])


def sparse_adam(world, settings):
    return train(world, settings, lambda: [Embedded()], tokens(), optimizer=torch.optim.SparseAdam)


def undeclared_counter(world, settings):
    return train(world, settings, lambda: [Calls()])


class Observed(nn.Linear):
    """Has a range that is empty at first and is resized in the first call, as observers of quantization do."""

    def __init__(self):
        super().__init__(6, 8)
        self.register_buffer("range", torch.empty(0))

    def forward(self, x):
        if not self.range.numel():
            self.range.resize_(2).copy_(torch.stack([*x.detach().aminmax()]))
        return super().forward(x)


def observed(world, settings):
    return train(world, settings, lambda: [Observed()])


class Flag(nn.Linear):
    def __init__(self):
        super().__init__(6, 8)
        self.register_buffer("begun", torch.zeros((), dtype=torch.bool))

    def forward(self, x):
        self.begun.fill_(True)
        return super().forward(x)


def flag(world, settings):
    return train(world, settings, lambda: [Flag()])


def declared_flag(world, settings):
    return train(world, settings, lambda: [Flag()], running_buffers=("0.begun",))


REFUSALS = {
    lazy: r"'0.weight' of LazyLinear has no shape before the first forward pass.*model\(example_input\)",
    lazy_batch_norm: "'1.weight' of LazyBatchNorm1d has no shape before the first forward pass",
    expanded: r"The elements of the parameter '0.bias' share memory.*clone\(\)",
    sparse_adam: r"SparseAdam\) steps from sparse gradients alone.*Use torch.optim.Adam",
    declared_flag: "running_buffers names '0.begun', which holds truth values",
    undeclared_counter: r"changes the buffer '0.calls'.*If it counts.*running_buffers=\['0.calls'\]",
    observed: "changes the buffer '0.range'",
    flag: "changes the buffer '0.begun'.*Change it outside of the forward pass",
}


@pytest.mark.parametrize("layout", ["single", "ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_what_cannot_be_trained_is_refused_on_every_rank(layout):
    for sentence, found in zip(REFUSALS.values(), outcomes(tuple(REFUSALS), layout)):
        assert not found.fault and re.search(sentence, found.refusal), found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "server"])
def test_a_quantised_weight_is_refused_where_parameters_are_shared_out(layout):
    """An error of torch came out of run.prepare; in one process, and of a replica in each, it is trained."""
    one, each = outcomes((quantised,), "single"), outcomes((quantised,), "ddp")
    require_ends((quantised,), one, each, "ddp", {})
    (found,) = outcomes((quantised,), layout)
    assert re.search("'0.weight' is a TwoTensor, which keeps its values in tensors of its own.*'ddp'", found.refusal)


@pytest.mark.parametrize("layout", ["single", "dp"])
def test_batch_norm_of_one_row_names_the_recipe(layout):
    (found,) = outcomes((one_row,), layout)
    said = "BatchNorm '1' got one value of each channel.*micro_batches=12 a micro-batch has one row"
    assert re.search(f"{said}. Use micro_batches=6", found.refusal), found


def test_batch_norm_without_statistics_names_the_evaluation():
    (found,) = outcomes((one_row_without_statistics,), "single")
    assert re.search("BatchNorm '1' has no running statistics.*a batch has one row", found.refusal), found
