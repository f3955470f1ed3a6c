"""Number formats: what the forward pass computes in, and where the loss scale starts."""

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn

from lockstep.config.options import RunOptions
from lockstep.config.strategy_options import PRECISIONS
from lockstep.core.fingerprint import digest_tensor
from lockstep.errors import ConfigError
from lockstep.models import lstm
from lockstep.numerics.precision import Precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_forward_pass_computes_in_the_format_and_parameters_stay(name, dtype):
    layer, precision = nn.Linear(4, 4), Precision(name, CPU)
    with precision.forward():
        assert layer(torch.ones(2, 4)).dtype is dtype
    assert layer(torch.ones(2, 4)).dtype is torch.float32
    assert layer.weight.dtype is torch.float32


def test_only_fp16_scales_the_loss():
    scaled = [name for name in ("fp32", "bf16", "fp16") if Precision(name, CPU).scaler is not None]
    assert scaled == ["fp16"]


@pytest.mark.parametrize("dtype", [torch.cfloat, torch.float16])
def test_fp16_refuses_gradients_that_torch_does_not_unscale_by_name(dtype):
    model = nn.ParameterDict({"plain": torch.ones(2), "odd": torch.ones(2, dtype=dtype)})
    Precision("bf16", CPU).prepare(model)
    with pytest.raises(ConfigError, match=r"fp16 .* 'odd' .* Use precision bf16"):
        Precision("fp16", CPU).prepare(model)
    model["odd"].requires_grad_(False)
    Precision("fp16", CPU).prepare(model)


@pytest.mark.parametrize(("rows", "scale"), [(1, 2**16), (2, 2**15), (13, 2**12), (16, 2**12), (17, 2**11)])
def test_a_sum_over_many_rows_starts_from_a_smaller_scale(rows, scale):
    assert Precision("fp16", CPU, rows).scaler.get_scale() == scale


def test_the_loss_scale_starts_grows_and_backs_off_as_the_options_say():
    options = RunOptions(
        global_batch=8,
        precision="fp16",
        loss_scale=64.0,
        loss_scale_growth_factor=4.0,
        loss_scale_backoff_factor=0.25,
        loss_scale_growth_interval=2,
    )
    scaler = Precision.of(options, CPU).scaler
    weight = nn.Parameter(torch.ones(1))
    optimizer, scales = torch.optim.SGD([weight], lr=0.1), []
    for gradient in (1.0, 1.0, float("inf"), 1.0):
        weight.grad = torch.tensor([gradient])
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [64.0, 256.0, 64.0, 64.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_scale": 0.0}, "loss_scale should be more than 0 and is 0"),
        ({"loss_scale_growth_factor": 1.0}, "loss_scale_growth_factor should be more than 1 and is 1"),
        (
            {"loss_scale_backoff_factor": 1.0},
            "loss_scale_backoff_factor should be above 0 and below 1 and is 1",
        ),
        ({"loss_scale_growth_interval": 0}, "loss_scale_growth_interval should be at least 1 and is 0"),
    ],
)
def test_options_of_the_loss_scale_that_cannot_work_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        RunOptions(global_batch=8, precision="fp16", **options)


def test_unknown_and_impossible_formats_are_refused():
    with pytest.raises(ConfigError, match=r"precision 'fp61' is not known. Did you mean 'fp16'\?"):
        Precision("fp61", CPU)
    with pytest.raises(ConfigError, match="'tf32' exists on CUDA devices only"):
        Precision("tf32", CPU)
    assert set(PRECISIONS) == {"fp32", "tf32", "bf16", "fp16"}


def test_settings_of_the_backend_stay_on_a_thread_of_a_cpu(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    Precision("fp32", CPU).configure_backend()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_an_lstm_is_trained_in_every_format(name):
    """oneDNN cannot train one in fp16: "could not create a primitive descriptor"."""
    model, precision = lstm(num_classes=2, in_features=3, hidden_size=4, num_layers=2), Precision(name, CPU)
    precision.prepare(model)
    with precision.forward():
        loss = model(torch.randn(5, 6, 3)).float().square().sum()
    loss.backward()
    assert torch.backends.mkldnn.enabled
    assert all(bool((parameter.grad != 0).any()) for parameter in model.parameters())


def gradients_of_rows(world):
    """How many sums come out of the same rows of a table, and whether a checkpoint without the setting is continued."""
    torch.set_num_threads(2)
    precision = Precision("fp32", CPU)
    precision.configure_backend()
    precision.restored_settings = {"torch.are_deterministic_algorithms_enabled()": "False"}
    precision.require_settings()
    table, rows = torch.zeros(50, 16, requires_grad=True), torch.arange(20_000) % 7
    upstream = torch.sin(torch.arange(320_000.0)).view(20_000, 16)
    found = {digest_tensor(torch.autograd.grad(table[rows], table, upstream)[0]) for _ in range(10)}
    assert not torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(False)
    with pytest.raises(ConfigError, match=r"are_deterministic_algorithms_enabled\(\) was True after lockstep.init"):
        precision.require_settings()
    return len(found)


def test_the_gradient_of_a_table_is_added_up_in_one_order_by_several_threads():
    """A model with a table of position biases was refused, since each backward pass had other bits."""
    assert run_ranks(gradients_of_rows, 1) == [1]


def test_a_failing_lstm_leaves_onednn_as_it_was():
    model = nn.Sequential(nn.LSTM(3, 4))
    Precision("fp16", CPU).prepare(model)
    with pytest.raises(RuntimeError):
        model(torch.randn(5, 2, 7))
    assert torch.backends.mkldnn.enabled
