"""Gradients of micro-batches, taken as backward finishes them and added in the tree's order."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from tests.reduce.exchanges import tree_sum
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.core.plan import BatchShape, SamplePlan
from lockstep.data.batch import Batch, MicroBatch
from lockstep.errors import ConfigError
from lockstep.numerics.precision import all_finite
from lockstep.strategies import Single
from lockstep.strategies.gradients import (
    _PASSES_WATCHED,
    GradientTree,
    Slot,
    _fill_buckets,
    _shaped_like,
)

CPU = torch.device("cpu")


class Mixed(nn.Module):
    """Parameters of three number types, one in channels-last order, one used twice, one never."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(4).to(torch.bfloat16))
        self.twice = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        x = self.conv(x).mean((2, 3)) * self.wide.float() + self.narrow.float()
        return self.twice(self.twice(x).tanh()) + self.empty.sum()


def batch_of(data, size, k):
    plan = SamplePlan(samples=len(data), shape=BatchShape(global_batch=size * k, micro_batches=k), shuffle=False)
    step = plan.step(0, 0)
    return Batch(step, tuple(MicroBatch(n, part, data[part]) for n, part in enumerate(step.indices)))


class SquaredOutputs:
    """The loss of a micro-batch under a model, and its weight."""

    def __init__(self, model):
        self.model = model

    def __call__(self, micro_batch):
        losses = self.model(micro_batch.data).square().sum(1)
        return losses.sum(), torch.tensor(float(len(losses)))

    def exchange(self):
        pass


def by_hand(model, batch):
    """Each micro-batch's gradients alone, folded by the written recursion, divided once."""
    leaves = []
    for micro_batch in batch.micro_batches:
        single = copy.deepcopy(model)
        SquaredOutputs(single)(micro_batch)[0].backward()
        leaves.append({name: parameter.grad for name, parameter in single.named_parameters()})
    weight = torch.tensor(float(batch.plan.samples))
    return {
        name: None if first is None else tree_sum([leaf[name] for leaf in leaves]) / weight
        for name, first in leaves[0].items()
    }


@pytest.mark.parametrize(("rows", "size", "k"), [(16, 2, 8), (15, 2, 8), (9, 2, 8), (6, 1, 6), (2, 2, 8), (7, 7, 1)])
def test_one_device_gives_the_sum_written_by_hand(rows, size, k):
    torch.manual_seed(0)
    model = Mixed()
    batch = batch_of(torch.randn(rows, 3, 5, 5), size, k)
    expected = by_hand(model, batch)
    strategy = Single(CPU, k)
    strategy.setup_model(model)
    for _ in range(_PASSES_WATCHED + 1):  # hooks take the gradients of the first ones, later they are collected
        model.zero_grad()
        result = strategy.backward(batch, SquaredOutputs(model), scale=1.0, stop=0)
        for name, parameter in model.named_parameters():
            if expected[name] is None:
                assert parameter.grad is None, name
            else:
                assert torch.equal(parameter.grad, expected[name]), name
                assert parameter.grad.stride() == parameter.stride(), name
        assert bool(result.finite) and int(result.stop) == 0
        assert len(result.losses) == batch.plan.leaves
    assert not model.conv.weight._post_accumulate_grad_hooks


def without_hooks(model):
    """A strategy that collects the gradients of the model, after its first passes."""
    strategy, batch = Single(CPU, 2), batch_of(torch.randn(4, 3), 2, 2)
    strategy.setup_model(model)
    for _ in range(_PASSES_WATCHED):
        strategy.backward(batch, SquaredOutputs(model), scale=1.0, stop=0)
        model.zero_grad()
    return strategy, batch


@pytest.mark.parametrize("after", [0, _PASSES_WATCHED + 2])
def test_hooks_of_the_user_see_no_gradients_of_other_parameters_in_any_pass(after):
    """Under 'ddp' they see none: what they did to one would be done on one device alone."""
    model, seen = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), []
    strategy, batch = Single(CPU, 2), batch_of(torch.randn(4, 3), 2, 2)
    strategy.setup_model(model)
    for number in range(_PASSES_WATCHED + 6):
        if number == after:
            model[0].weight.register_hook(lambda _: seen.append(model[1].weight.grad))
        strategy.backward(batch, SquaredOutputs(model), scale=1.0, stop=0)
        model.zero_grad()
    assert seen and all(each is None for each in seen)


def raise_in_backward(strategy, batch, model, parameter):
    """A backward pass that raises where it has come to a parameter."""

    def refuse(gradient):
        raise ValueError("from a hook")

    hook = parameter.register_hook(refuse)
    with pytest.raises(ValueError, match="from a hook"):
        strategy.backward(batch, SquaredOutputs(model), scale=1.0, stop=0)
    hook.remove()


def test_what_a_backward_pass_that_raised_left_behind_is_no_part_of_the_next_step():
    model = nn.Linear(3, 2)
    strategy, batch = without_hooks(model)
    strategy.backward(batch, SquaredOutputs(model), scale=1.0, stop=0)
    expected = model.weight.grad
    model.zero_grad()
    raise_in_backward(strategy, batch, model, model.bias)
    strategy.backward(batch, SquaredOutputs(model), scale=1.0, stop=0)
    assert torch.equal(model.weight.grad, expected)


@pytest.mark.parametrize("is_collecting", [False, True])
def test_a_backward_pass_that_raised_leaves_the_gradients_that_were_there(is_collecting):
    """Of a step that is accumulated: what one micro-batch had left was stepped in their place."""
    model = nn.Linear(3, 2)
    strategy, batch = without_hooks(model)
    if not is_collecting:
        strategy = Single(CPU, 2)
        strategy.setup_model(model)
    strategy.backward(batch, SquaredOutputs(model), scale=1.0, stop=0)
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    raise_in_backward(strategy, batch, model, model.weight)
    strategy.abandon()
    assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())
    strategy.abandon()  # of an error before the next step began
    assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())


def test_a_loss_that_begins_to_compute_gradients_itself_is_refused_by_name():
    model = nn.Linear(3, 2)
    strategy, batch = without_hooks(model)

    def compute(micro_batch):
        model.weight.sum().backward()
        return SquaredOutputs(model)(micro_batch)

    with pytest.raises(ConfigError, match=r"'weight' got two gradients.*must not call backward\(\) itself"):
        strategy.backward(batch, compute, scale=1.0, stop=0)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_gradients_of_micro_batches_that_take_turns_are_added_in_their_order(order):
    """A parameter that one of them does not use gets its zeros in that one's place."""
    torch.manual_seed(0)
    used, model = {0: "ab", 1: "a", 2: "b"}, nn.ParameterDict({"a": torch.ones(3), "b": torch.ones(3)})
    values = {k: torch.randn(3) for k in used}
    tree = GradientTree(dict(model.items()), None)
    tree.begin(0, 3, 3)
    for name in "ba":
        for k in order:
            tree.go_on_with(k)
            if name in used[k]:
                (model[name] * values[k]).sum().backward()
    for k in order:
        tree.go_on_with(k)
        tree.end_micro_batch()
    tree.finish(tree.used(), torch.ones(()))
    for name in "ab":
        leaves = [values[k] if name in used[k] else torch.zeros(3) for k in range(3)]
        assert torch.equal(model[name].grad, tree_sum(leaves))


def test_a_gradient_that_was_there_is_added_to():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    batch, strategy = batch_of(torch.randn(4, 3), 1, 4), Single(CPU, 4)
    strategy.setup_model(model)
    strategy.backward(batch, SquaredOutputs(model), scale=1.0, stop=0)
    gradient = model.weight.grad
    first = gradient.clone()
    strategy.backward(batch, SquaredOutputs(model), scale=1.0, stop=3)
    assert torch.equal(model.weight.grad, first + first)
    assert model.weight.grad is gradient


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_or_loss_that_is_not_finite_is_reported(bad):
    model, data = nn.Linear(3, 2), torch.randn(4, 3)
    data[2, 1] = bad
    strategy = Single(CPU, 4)
    strategy.setup_model(model)
    assert not bool(strategy.backward(batch_of(data, 1, 4), SquaredOutputs(model), scale=1.0, stop=0).finite)


def test_sparse_gradients_are_added_as_dense_ones():
    torch.manual_seed(0)
    model, found = nn.Embedding(5, 3, sparse=True), []
    for layer in (model, nn.Embedding.from_pretrained(model.weight.detach().clone(), freeze=False)):
        strategy = Single(CPU, 2)
        strategy.setup_model(layer)
        batch = batch_of(torch.tensor([0, 1, 1, 3]), 2, 2)
        strategy.backward(batch, SquaredOutputs(layer), scale=1.0, stop=0)
        found.append(layer.weight.grad)
    assert found[0].layout is torch.strided and torch.equal(*found)


def test_re_entrant_checkpointing_of_a_shared_parameter_is_refused_by_name():
    layer = nn.Linear(3, 3)
    strategy = Single(CPU, 2)
    strategy.setup_model(layer)

    def compute(micro_batch):
        x = micro_batch.data.requires_grad_()
        output = layer(checkpoint(layer, x, use_reentrant=True))
        return output.sum(), torch.tensor(float(len(micro_batch)))

    with pytest.raises(ConfigError, match=r"'(weight|bias)' got two gradients.*use_reentrant=False"):
        strategy.backward(batch_of(torch.randn(4, 3), 2, 2), compute, scale=1.0, stop=0)


def test_buckets_hold_one_number_type_each_and_the_last_layers_come_first():
    sizes = [3 << 18, 1 << 18, 1 << 16, 1 << 16]
    parameters = {str(number): nn.Parameter(torch.zeros(size)) for number, size in enumerate(sizes)}
    parameters["double"] = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    parameters["last"] = nn.Parameter(torch.zeros(3))
    slots = [Slot(name, parameter, parameter) for name, parameter in parameters.items()]
    buckets = [[slot.name for slot in members] for members in _fill_buckets(slots)]
    assert [name for names in buckets for name in names] == ["last", "double", "3", "2", "1", "0"]
    assert ["last"] in buckets and ["double"] in buckets


class Memory:
    """Memory of a reducer of one holder."""

    turns = 1

    def __init__(self, shapes):
        self.totals = [torch.zeros(shape.numel, dtype=shape.dtype) for shape in shapes]

    def staging(self, bucket, slot, turn=None):
        return self.totals[bucket]

    def total(self, bucket):
        return self.totals[bucket]


def test_gradients_in_a_bucket_begin_as_in_memory_of_their_own():
    # Products of vectors that begin elsewhere have other bits: Prodigy's step size differed with several processes.
    model = Mixed()
    shapes = GradientTree(dict(model.named_parameters()), None).bucket_shapes
    tree = GradientTree(dict(model.named_parameters()), Memory(shapes))
    tree.connect(1)
    assert {slot.total.data_ptr() % 64 for slot in tree.slots} == {0}
    assert all(shape.numel == sum(map(math.prod, shape.members)) for shape in shapes)


def test_a_gradient_that_autograd_gives_as_a_view_begins_as_in_memory_of_its_own():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(1, 3)), nn.Parameter(torch.randn(3, 3))

        def forward(self, x):
            return x @ torch.cat([self.first, self.second]).t()

    model, strategy = Joined(), Single(CPU, 2)
    strategy.setup_model(model)
    strategy.backward(batch_of(torch.randn(4, 3), 2, 2), SquaredOutputs(model), scale=1.0, stop=0)
    assert {parameter.grad.data_ptr() % 64 for parameter in model.parameters()} == {0}


def test_views_of_flat_memory_have_the_parameter_s_strides():
    flat = torch.arange(48.0)
    for parameter in (
        torch.zeros(2, 3, 2, 4),
        torch.zeros(2, 3, 2, 4).contiguous(memory_format=torch.channels_last),
        torch.zeros(6, 8).t(),
        torch.zeros(4, 1, 12).transpose(0, 2),
    ):
        view = _shaped_like(parameter, flat)
        assert view.shape == parameter.shape and view.stride() == parameter.stride()
        assert sorted(view.flatten().tolist()) == flat.tolist()
    holes = torch.zeros(96)[::2].view(6, 8)
    assert _shaped_like(holes, flat).is_contiguous()


def test_a_tree_that_is_gone_leaves_gradients_to_autograd():
    layer = nn.Linear(2, 2)
    GradientTree(dict(layer.named_parameters()), None)
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("entry", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_a_single_entry_that_is_not_finite_is_seen(kind, entry):
    tensors = [torch.ones(5, dtype=torch.float64), torch.empty(0), torch.ones(3, 4, dtype=kind)]
    assert bool(all_finite(tensors, CPU))
    tensors[2][1, 2] = entry
    assert not bool(all_finite(tensors, CPU))


def test_finite_entries_count_as_finite_though_their_sum_overflows():
    largest = torch.full((4,), torch.finfo(torch.float32).max)
    assert not largest.sum().isfinite()
    assert bool(all_finite([largest, -largest], CPU))
    assert bool(all_finite([], CPU))


class Reused(torch.autograd.Function):
    """Has a buffer for the gradient of the weight, which it writes in every backward pass."""

    @staticmethod
    def forward(ctx, inputs, weight, buffer):
        ctx.save_for_backward(inputs)
        ctx.buffer = buffer
        return inputs @ weight

    @staticmethod
    def backward(ctx, gradient):
        (inputs,) = ctx.saved_tensors
        torch.mm(inputs.t(), gradient, out=ctx.buffer)
        return None, ctx.buffer.view_as(ctx.buffer), None


@pytest.mark.parametrize("collects", [False, True], ids=["hooks", "collected"])
@pytest.mark.parametrize("reused", [False, True])
def test_a_gradient_that_is_written_over_the_one_before_is_refused(reused, collects):
    """One process had other bits than one for each micro-batch, without a word."""
    weight, buffers = nn.Parameter(torch.ones(3, 2)), [torch.zeros(3, 2) for _ in range(10)]
    tree = GradientTree({"weight": weight}, None, may_collect=lambda: collects)
    said = "The gradient of 'weight' was written over that of the micro-batch before"
    steps = _PASSES_WATCHED + 1
    for step in range(steps):
        # With one micro-batch in a step there is nothing that could be written over.
        leaves = 2 if step == steps - 1 else 1
        tree.begin(0, leaves, leaves)
        for k in range(leaves):
            loss = Reused.apply(torch.ones(1, 3), weight, buffers[0 if reused else k]).sum()
            tree.begin_backward()
            with pytest.raises(ConfigError, match=said) if reused and k else nullcontext():
                loss.backward()
                tree.end_micro_batch()
        if leaves == 1:
            tree.finish([1], torch.tensor(1.0))
            weight.grad = None
    assert bool(tree._handles) != collects
