"""The modules in one process, and their conversion."""

import copy
import pickle

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.numerics.sync_batch_norm import RankRows, convert_sync_batch_norm, gather_moments


class Ranks:
    """Plays the other ranks: gathers the row that is given and those that were written down before."""

    def __init__(self, *others):
        self.others, self.ranks = list(others), 1 + len(others)

    def gather(self, row, name=""):
        return torch.stack([row, *self.others])


def test_conversion_keeps_objects_names_and_options():
    model = nn.Sequential(nn.BatchNorm1d(3, eps=1e-3, momentum=None), nn.ModuleList([nn.BatchNorm3d(2, affine=False)]))
    before, state = dict(model.named_modules()), copy.deepcopy(model.state_dict())
    assert convert_sync_batch_norm(model) is model
    assert dict(model.named_modules()) == before
    assert list(model.state_dict()) == list(state)
    assert isinstance(model[0], nn.BatchNorm1d) and model[0].eps == 1e-3 and model[0].momentum is None
    model.load_state_dict(state)
    convert_sync_batch_norm(model)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.LazyBatchNorm1d(), nn.SyncBatchNorm(3)])
def test_what_is_no_plain_batch_norm_is_refused(model):
    with pytest.raises(ConfigError, match="sync_batch_norm"):
        convert_sync_batch_norm(model)


def test_a_model_that_is_a_batch_norm_itself_is_converted():
    model = nn.BatchNorm2d(3)
    assert convert_sync_batch_norm(model) is model and "rows" in vars(model)


def test_evaluation_is_torchs_bit_for_bit():
    plain = nn.BatchNorm2d(4)
    plain.running_mean.uniform_()
    plain.running_var.uniform_(0.5, 2)
    synced, x = convert_sync_batch_norm(copy.deepcopy(plain)).eval(), torch.randn(3, 4, 5, 5)
    assert torch.equal(synced(x), plain.eval()(x))
    assert torch.equal(synced.running_mean, plain.running_mean)


@pytest.mark.parametrize(
    ("module", "shape"), [(nn.BatchNorm1d, (2, 3, 4, 4)), (nn.BatchNorm2d, (2, 3)), (nn.BatchNorm3d, (2, 3))]
)
def test_inputs_of_other_dimensions_are_refused_as_torch_does(module, shape):
    with pytest.raises(ValueError, match="expected"):
        convert_sync_batch_norm(module(3))(torch.randn(shape))


def test_one_value_per_channel_has_no_variance():
    with pytest.raises(ConfigError, match=r"1 value\(s\) per channel over the whole batch.*drop_last=True"):
        convert_sync_batch_norm(nn.BatchNorm1d(3))(torch.randn(1, 3))


def test_copies_share_the_ranks_and_stored_models_have_none():
    model = convert_sync_batch_norm(nn.Sequential(nn.BatchNorm1d(3)))
    assert copy.deepcopy(model)[0].rows is model[0].rows
    assert pickle.loads(pickle.dumps(model))[0].rows.ranks == 1


def test_rows_that_do_not_count_change_nothing():
    """A rank that only joins is normalised by the others' statistics, and has no gradient."""
    x, spare = torch.randn(6, 3), (torch.randn(4, 3) + 5).requires_grad_()
    whole = gather_moments(x, RankRows(None).gather)
    row = torch.cat([torch.tensor([6.0]), x.mean(0), 6 * x.var(0, correction=0)]).double()
    module = convert_sync_batch_norm(nn.BatchNorm1d(3))
    module.rows, module.counts = Ranks(row), False
    output = module(spare)
    expected = (spare - whole.mean.float()) / (whole.variance.float() + module.eps).sqrt()
    assert torch.allclose(output, expected, atol=1e-6)
    assert torch.allclose(module.running_mean, 0.1 * x.mean(0))
    module.rows.others = [torch.ones(6, dtype=torch.float64)]
    output.square().sum().backward()
    assert not spare.grad.any() and not module.weight.grad.any() and not module.bias.grad.any()


def test_moments_of_ranks_are_those_of_all_rows_without_cancellation():
    """Values near a million with a variance near one: the difference of squares would leave nothing of it."""
    x = torch.randn(30, 2, dtype=torch.float64) + 1e6
    parts = x.split([3, 0, 20, 7])
    rows = []
    for part in parts[1:]:
        row = torch.zeros(5, dtype=torch.float64)
        if len(part):
            row[0], row[1:3], row[3:] = len(part), part.mean(0), len(part) * part.var(0, correction=0)
        rows.append(row)
    moments = gather_moments(parts[0], Ranks(*rows).gather)
    assert torch.allclose(moments.mean, x.mean(0), rtol=1e-14)
    assert torch.allclose(moments.unbiased, x.var(0), rtol=1e-8)
    assert float(moments.count) == 30


def test_gradients_are_those_that_finite_differences_give():
    module = convert_sync_batch_norm(nn.BatchNorm1d(3)).double()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w, b: functional(module, x, w, b), (x, module.weight, module.bias))


def functional(module, x, weight, bias):
    return torch.func.functional_call(module, {"weight": weight, "bias": bias}, (x,))


def test_frozen_parameters_and_inputs_get_no_gradient():
    module, x = convert_sync_batch_norm(nn.BatchNorm1d(3)), torch.randn(5, 3)
    module.weight.requires_grad_(False)
    module(x).square().sum().backward()
    assert module.weight.grad is None and module.bias.grad is not None


def test_a_closed_exchange_says_so():
    rows = RankRows(None)
    rows.ranks = 2
    module = convert_sync_batch_norm(nn.BatchNorm1d(3))
    module.rows = rows
    with pytest.raises(ConfigError, match=r"after its run was closed.*model.eval\(\)"):
        module(torch.randn(4, 3))


@pytest.mark.gpus(1)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_cuda_device_gives_what_torchs_batch_norm_does(dtype, channels_last):
    plain = nn.BatchNorm2d(4).cuda().to(torch.float64 if dtype == torch.float64 else torch.float32)
    synced = convert_sync_batch_norm(copy.deepcopy(plain))
    x = torch.randn(6, 4, 5, 5, device="cuda", dtype=dtype)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    bound = {torch.float32: 1e-5, torch.float64: 1e-10, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    results = []
    for module in (plain, synced):
        given = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        output = module(given)
        output.float().square().mul(torch.linspace(-1, 2, x.numel(), device="cuda").view(x.shape)).sum().backward()
        results.append((output, given.grad, module.weight.grad, module.bias.grad, module.running_var))
    for expected, found in zip(*results):
        assert float((found - expected).abs().max() / expected.abs().max()) < bound
