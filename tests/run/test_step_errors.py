"""Sentences and notes for errors of the user's model and loss; whole programs are in tests/sameness."""

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.core.plan import BatchShape, SamplePlan
from lockstep.data.batch import Batch, MicroBatch
from lockstep.errors import ConfigError
from lockstep.run.step_errors import (
    explain_loss,
    explain_operator,
    no_gradient,
    no_value,
    note_arguments,
    note_data,
    note_gradients_off,
    shown,
)

LOGITS = torch.zeros(2, 3, requires_grad=True)


def test_data_is_shown_by_type_and_shape():
    data = {"ids": torch.zeros(2, 4, dtype=torch.int64), "names": ["a", "b"], "pair": (torch.zeros(2), None)}
    assert shown(data) == "{'ids': int64 [2, 4], 'names': list of 2 str, 'pair': (float32 [2], NoneType)}"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (torch.zeros(2), "target is float32 .* target.long"),
        (torch.zeros(2, 1, dtype=torch.int64), "a column too many"),
        (torch.tensor([1, 3]), "numbered 0 to 2, and the targets are 1 to 3"),
        (torch.tensor([-1, 0]), "the targets are -1 to 0"),
        (torch.zeros(4, dtype=torch.int64), "differ in the number of rows"),
        (("cat", "dog"), "target is tuple of 2 str"),
    ],
)
def test_wrong_classes_are_explained_where_torch_raises(target, said):
    def loss(output, target):
        return F.cross_entropy(output, target)  # called from a function of the user's own

    with pytest.raises(ConfigError, match=said) as refused:
        run(loss, LOGITS, target)
    assert refused.value.__cause__ is not None


def test_binary_losses_are_explained():
    with pytest.raises(ConfigError, match=r"output.squeeze\(1\), target.float\(\)"):
        run(F.binary_cross_entropy_with_logits, torch.zeros(2, 1), torch.zeros(2))
    with pytest.raises(ConfigError, match=r"bool .* has to be floating-point"):
        run(F.binary_cross_entropy_with_logits, torch.zeros(2), torch.zeros(2) > 0)


def test_a_loss_that_is_given_all_the_data_is_told_to_take_its_part():
    """With forward= the message asked for another data set: "let the data set return the number of the class"."""
    data = (torch.zeros(2, 6), torch.tensor([0, 1]))
    with pytest.raises(ConfigError, match=r"forward=.* all the data. .* loss\(output, data\[1\]\)"):
        run(nn.CrossEntropyLoss(), LOGITS, data)
    with pytest.raises(ConfigError, match=r"loss\(output, data\['y'\]\)"):
        run(F.binary_cross_entropy_with_logits, torch.zeros(2), {"x": data[0], "y": data[1]})
    with pytest.raises(AttributeError) as raised:
        run(nn.L1Loss(), LOGITS, data)
    assert "with forward=" in raised.value.__notes__[0].lower()


def test_an_unknown_error_is_the_users_own_with_a_note():
    def loss(output, target):
        raise KeyError("x")

    with pytest.raises(KeyError) as raised:
        run(loss, LOGITS, torch.zeros(2))
    assert (
        "loss(output, target), with the output float32 [2, 3] and the target float32 [2]" in raised.value.__notes__[0]
    )


def run(loss, output, target):
    try:
        loss(output, target)
    except Exception as error:
        explain_loss(error, output, target)
        raise


def test_a_loss_without_a_gradient_tells_whose_fault_it_is():
    assert "without detach(), item()" in str(no_gradient({"logits": LOGITS}))
    assert "neither has the output of the model" in str(no_gradient(LOGITS.detach()))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.5, "without item()"),
        (None, "line with return"),
        ({"total": 1}, "run.backward(batch, lambda output, target: f(output, target)['total'])"),
        ({"accuracy": 1, "loss": 1}, "loss, numbers = run.backward(batch, f, also=['accuracy']) gives"),
        ({"accuracy": 1, "loss": 1}, "For run.evaluate give a function for each: {'loss': lambda"),
        ([1], "not list"),
    ],
)
def test_what_is_no_loss_is_told_by_kind(value, said):
    assert said in str(no_value(value))


def test_the_data_of_a_micro_batch_is_noted_with_a_type_that_the_model_has_not():
    plan = SamplePlan(samples=2, shape=BatchShape(global_batch=2, micro_batches=1)).step(0, 0)
    data = (torch.zeros(2, 6, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))
    error, own = RuntimeError("of torch"), ConfigError("ours")
    for each in (error, own):
        note_data(each, Batch(plan, (MicroBatch(0, np.arange(2), data),)), nn.Linear(6, 2))
    assert not hasattr(own, "__notes__")
    assert re.search(r"float64 and the model float32.*\(float64 \[2, 6\], int64 \[2\]\)", " ".join(error.__notes__))
    mixed = RuntimeError("mat1 and mat2 must have the same dtype, but got Double and Float")
    with pytest.raises(ConfigError, match=r"float64 and the model float32: convert .* \.float\(\)"):
        note_data(mixed, Batch(plan, (MicroBatch(0, np.arange(2), data),)), nn.Linear(6, 2))


def test_the_data_of_the_micro_batch_that_failed_are_noted():
    """A micro-batch without any pairs of words failed, and the shapes of the first one were shown."""
    plan = SamplePlan(samples=3, shape=BatchShape(global_batch=3, micro_batches=3)).step(0, 0)
    micro_batches = tuple(MicroBatch(k, np.arange(1), (torch.zeros(5 - k, 6),)) for k in range(3))

    def compute(micro_batch):
        return micro_batch.data[0].reshape(5, 6)

    with pytest.raises(RuntimeError, match="invalid for input") as raised:
        try:
            for each in micro_batches:
                compute(each)
        except RuntimeError as error:
            note_data(error, Batch(plan, micro_batches), nn.Linear(6, 2))
            raise
    assert "The data of a micro-batch: (float32 [4, 6])." in raised.value.__notes__


class Tagger(nn.Module):
    def forward(self, tokens, lengths):
        return tokens.split(lengths.tolist(), wrong=1)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            {"tokens": 1, "lengths": 2, "tags": 3},
            "the entries of a micro-batch as keyword arguments. If it takes others, say which: forward=lambda data: "
            "model(tokens=data['tokens'], lengths=data['lengths']); the loss",
        ),
        ((1, 2, 3, 4), "all but the last entry of a micro-batch, the target. If it takes others"),
    ],
)
def test_a_model_that_takes_other_arguments_than_a_batch_has_is_told_of_forward(data, said):
    model = Tagger()
    with pytest.raises(TypeError) as raised:
        model(**data) if isinstance(data, dict) else model(*data[:-1])
    note_arguments(raised.value, data, model)
    assert said in raised.value.__notes__[0]
    with pytest.raises(TypeError, match="wrong") as raised:
        model(torch.zeros(2), torch.ones(2, dtype=torch.int64))  # an error within the forward pass
    note_arguments(raised.value, data, model)
    assert not hasattr(raised.value, "__notes__")


class Unordered(nn.Module):
    """Layers whose CUDA kernels add in no fixed order."""

    def __init__(self):
        super().__init__()
        self.pool, self.wider = nn.AdaptiveAvgPool2d(7), nn.Upsample(scale_factor=2, mode="bilinear")
        self.pad, self.ctc, self.loss = nn.ReflectionPad2d(1), nn.CTCLoss(), nn.CrossEntropyLoss()


@pytest.mark.parametrize(
    ("operator", "layer", "instead"),
    [
        ("adaptive_avg_pool2d_backward_cuda", "'pool' (AdaptiveAvgPool2d)", "nn.AvgPool2d"),
        ("upsample_bilinear2d_backward_out_cuda", "'wider' (Upsample)", "mode='nearest'"),
        ("reflection_pad2d_backward_cuda", "'pad' (ReflectionPad2d)", "nn.ZeroPad2d"),
        ("ctc_loss_backward_gpu", "'ctc' (CTCLoss)", "output.cpu()"),
        ("grid_sampler_2d_backward_cuda", "", "resample in the data set"),
        ("nll_loss2d_forward_out_cuda_template", "'loss' (CrossEntropyLoss)", "flatten(0, -2)"),
    ],
)
def test_an_operator_without_a_fixed_order_is_named_with_its_layer_and_what_to_use(operator, layer, instead):
    error = RuntimeError(
        f"{operator} does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation."
    )
    with pytest.raises(ConfigError) as refused:
        explain_operator(error, Unordered())
    for words in (operator, layer, instead, "deterministic=False", "level C"):
        assert words in str(refused.value)


@pytest.mark.parametrize(("enabled", "is_told"), [(False, True), (True, False)])
def test_gradients_in_a_forward_pass_where_they_are_off_are_told_of_enable_grad(enabled, is_told):
    """As forces in an evaluation, or lengths of paths with ``whole_batch=True``: torch's error was alone."""
    with torch.set_grad_enabled(enabled), pytest.raises(RuntimeError) as raised:
        try:
            torch.autograd.grad(torch.ones(2).sum(), torch.ones(2, requires_grad=True))
        except RuntimeError as error:
            note_gradients_off(error)
            raise
    assert ("forward=torch.enable_grad()" in "".join(getattr(raised.value, "__notes__", ()))) == is_told


@pytest.mark.parametrize("how", ["backward", "evaluate", "predict"])
def test_several_models_without_a_forward_function_are_refused_in_a_sentence(how):
    """It was torch's NotImplementedError: Module [ModuleDict] is missing the required "forward" function."""
    run = lockstep.init(global_batch=4, micro_batches=2)
    models = nn.ModuleDict({"one": nn.Linear(4, 3)})
    run.prepare(models, torch.optim.SGD(models.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(4, 4), torch.arange(4) % 3)
    with pytest.raises(ConfigError, match=r"a ModuleDict, which has no forward\(\) of its own. .* forward=lambda data"):
        if how == "backward":
            run.backward(next(iter(run.batches(data))), F.cross_entropy)
        elif how == "evaluate":
            run.evaluate(data, F.cross_entropy)
        else:
            run.predict(data)
    run.close()
