"""Combinations that BatchNorm over the global batch refuses: one sentence each, that says what would work."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.config.strategy_options import STRATEGIES, SYNC_BATCH_NORM
from lockstep.errors import ConfigError
from lockstep.run import RunOptions


def prepared(model, **options):
    run = lockstep.init(global_batch=8, micro_batches=4, sync_batch_norm=True, **options)
    return run, run.prepare(model)


def first_step(model, loss=F.cross_entropy, data=None, **backward):
    run, model = prepared(model)
    data = data or TensorDataset(torch.randn(8, 6), torch.arange(8) % 3)
    try:
        for batch in run.batches(data):
            run.backward(batch, loss, **backward)
    finally:
        run.close()


def rows(*others):
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), *others, nn.Linear(6, 3))


class Draws(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.2, self.training)


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            nn.Sequential(nn.Linear(6, 3)),
            "needs a model with BatchNorm1d, 2d or 3d, and this model has none. Remove sync_batch_norm",
        ),
        (nn.Sequential(OwnNorm(6)), "cannot convert '0', a OwnNorm, .* Build the model with those"),
        (
            nn.Sequential(nn.BatchNorm2d(3), nn.InstanceNorm2d(3, track_running_stats=True)),
            "the running statistics of '1' would be those of one process's rows",
        ),
    ],
)
def test_models_that_cannot_be_run_so_are_refused(model, said):
    with pytest.raises(ConfigError, match=said):
        prepared(model)


def test_declared_buffers_are_refused():
    with pytest.raises(ConfigError, match=r"running_buffers=\['mean'\] would be those of one process's rows"):
        prepared(rows(), running_buffers=("mean",))


def test_other_draws_than_dropout_modules_are_refused_in_the_first_step():
    with pytest.raises(ConfigError, match=r"in test_fused_forward_refusals.py:\d+ would draw random numbers"):
        first_step(rows(Draws()))


def test_a_loss_that_draws_is_refused():
    with pytest.raises(ConfigError, match=r"in test_fused_forward_refusals.py:\d+ would draw random numbers"):
        first_step(rows(), lambda output, target: F.cross_entropy(output + torch.randn(3), target))


def test_dropout_modules_are_taken():
    first_step(rows(nn.Dropout(0.2)))


def test_a_forward_of_the_user_is_refused():
    model = rows()
    with pytest.raises(ConfigError, match="or use strategy 'ddp' without sync_batch_norm"):
        first_step(model, lambda output, data: output.sum(), forward=lambda data: model(data[0]))


def test_micro_batches_of_different_shapes_are_refused():
    class Padded(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.randn(6, 4 + index // 4), 0

    model = nn.Sequential(nn.BatchNorm1d(6), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    run, model = prepared(model)
    batch = next(iter(run.batches(Padded(), shuffle=False)))
    with pytest.raises(ConfigError, match="Let the collate function pad to one length"):
        run.backward(batch, F.cross_entropy)
    run.close()


def test_compilation_is_refused():
    with pytest.raises(ConfigError, match=r"where compile cannot go. Use one of the two"):
        RunOptions(global_batch=8, sync_batch_norm=True, compile=True)


@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - set(SYNC_BATCH_NORM)))
def test_other_strategies_are_refused(strategy):
    with pytest.raises(ConfigError, match=f"which strategy '{strategy}' does not. Use strategy 'ddp'"):
        RunOptions(global_batch=8, sync_batch_norm=True, strategy=strategy)


def test_powersgd_and_a_changing_scale_are_refused():
    with pytest.raises(ConfigError, match="Use precision bf16 or fp32, or reduce='bf16'"):
        RunOptions(global_batch=8, reduce="powersgd", precision="fp16")
    with pytest.raises(ConfigError, match="powersgd_rank should be at least 1 and is 0"):
        RunOptions(global_batch=8, powersgd_rank=0)
