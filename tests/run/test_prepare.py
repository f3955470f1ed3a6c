import pytest
import torch
from tests.run.jobs import begin
from torch import nn

from lockstep.config.options import RunOptions
from lockstep.errors import ConfigError
from lockstep.numerics.initial_values import InitialValues
from lockstep.numerics.precision import Precision
from lockstep.run.prepare import Parts, prepare_model
from lockstep.strategies.ddp import Single

CPU = torch.device("cpu")


def prepared(model, *optimizers):
    options = RunOptions(global_batch=8, strategy="single")
    parts = Parts.of(model, optimizers, InitialValues(0))
    return prepare_model(parts, options, Single(CPU, 8), Precision("fp32", CPU))


def test_shapes_and_names_of_the_whole_model_are_kept_without_its_values():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    found = prepared(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    assert found.module is model
    assert {name: tuple(tensor.shape) for name, tensor in found.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in model.state_dict().items()
    }
    assert all(tensor.is_meta for tensor in found.tensors.values())
    assert found.members == [[["0.weight", "0.bias"]]]
    assert found.smallest_micro_batch == 2


def test_an_optimizer_in_the_place_of_the_model_is_refused_with_the_call_to_write():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with pytest.raises(ConfigError, match=r"is of type SGD, which is no model\. Write: model, optimizer = run"):
        prepared(optimizer)


def test_a_tied_parameter_is_known_under_its_further_name():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert prepared(model).aliases == {"1.weight": "0.weight"}


def test_a_buffer_that_is_none_is_not_missing_in_the_fingerprint():
    """InstanceNorm has three, as BatchNorm without running statistics."""
    found = prepared(nn.Sequential(nn.InstanceNorm2d(3, affine=True), nn.BatchNorm2d(3, track_running_stats=False)))
    assert found.with_all_buffers({}) == {}


class OfSamples(torch.optim.SGD):
    """Makes gradients from those of single samples, as the optimizer of Opacus does."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = getattr(parameter, "grad", None)
            if hasattr(parameter, "grad_sample"):
                parameter.grad = parameter.grad_sample.mean(0)
        return super().step(closure)


def test_an_optimizer_of_gradients_of_samples_is_refused_where_the_batch_is_divided():
    """On one process it took the gradients of micro-batches for those of batches, and trained another model."""
    begin(make_optimizer=OfSamples, micro_batches=1)[0].close()
    for how, said in (({}, "8 micro-batches"), ({"strategy": "dp", "dp": {"replicas": 2}}, "'dp'")):
        with pytest.raises(ConfigError, match=rf"OfSamples computes gradients from those of.*{said}"):
            begin(make_optimizer=OfSamples, **how)
