import torch
from torch import nn

from lockstep.config.options import RunOptions
from lockstep.numerics.initial_values import InitialValues
from lockstep.numerics.precision import Precision
from lockstep.run.prepare import Parts, prepare_model
from lockstep.strategies.ddp import Single

CPU = torch.device("cpu")


def prepared(model, *optimizers):
    options = RunOptions(global_batch=8, strategy="single")
    return prepare_model(
        Parts.of(model, optimizers, InitialValues(0)), options, Single(CPU, 8), Precision("fp32", CPU), CPU
    )


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


def test_a_tied_parameter_is_known_under_its_further_name():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert prepared(model).aliases == {"1.weight": "0.weight"}


def test_a_buffer_that_is_none_is_not_missing_in_the_fingerprint():
    """InstanceNorm has three, as BatchNorm without running statistics."""
    found = prepared(
        nn.Sequential(nn.InstanceNorm2d(3, affine=True), nn.BatchNorm2d(3, track_running_stats=False))
    )
    assert found.with_all_buffers({}) == {}
