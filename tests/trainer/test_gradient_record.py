"""The gradient record of a run, on one rank and on several: the same lines, byte for byte."""

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.config.job import CheckpointConfig, TrainingConfig
from lockstep.core.fingerprint import digest_tensor
from lockstep.core.world import World
from lockstep.errors import ConfigError
from lockstep.loggers import open_loggers
from lockstep.run import Run, RunOptions
from lockstep.trainer import Accuracy, Trainer, TrainingParts
from lockstep.trainer.gradient_record import FILE, GradientDigest, GradientRecorder, read_records


class Net(nn.Module):
    """Has a weight that is used twice, one in every second micro-batch only, and one that never is."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8))
        self.tied = self.body[3]
        self.seldom = nn.Linear(8, 8)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        hidden = self.tied(torch.relu(self.body(x)))
        if x[0, 0] > 0:
            hidden = hidden + self.seldom(hidden)
        return self.head(hidden)


def samples():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(22, 3, generator=generator), torch.randint(0, 2, (22,), generator=generator))


def train(world, folder, *, every, micro_batches=False, epochs=2, resume="", **options):
    """A short training of 3 steps an epoch, the last of them ragged, with checkpoints after steps 2, 3, 4 and 6."""
    run = Run(RunOptions.of(global_batch=8, micro_batches=4, directory=folder, resume=resume, **options), world)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, scheduler = run.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5))
    settings = TrainingConfig(epochs=epochs, clip_norm=0.1)
    parts = TrainingParts(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loss=nn.CrossEntropyLoss(),
        accuracy=Accuracy(),
        training_set=samples(),
        validation_set=None,
        workers=0,
    )
    saving, logger = CheckpointConfig(every_steps=2), open_loggers(world, folder, [])
    trainer = Trainer(run, parts, settings, saving, 10, logger)
    run.add_callback(GradientRecorder(run, folder, every, micro_batches=micro_batches))
    return trainer.fit().fingerprint


@pytest.mark.slow
def test_records_are_taken_at_intervals_and_after_every_checkpoint(tmp_path):
    train(World(), tmp_path, every=5)
    assert list(read_records(tmp_path)) == [0, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_resumed_run_records_its_first_step_and_those_after_it_anew(tmp_path):
    whole = train(World(), tmp_path / "whole", every=4)
    train(World(), tmp_path / "parts", every=4, epochs=1)
    assert train(World(), tmp_path / "parts", every=4, resume="auto") == whole
    assert (tmp_path / "parts" / FILE).read_text() == (tmp_path / "whole" / FILE).read_text()


@pytest.mark.slow
def test_recording_changes_no_bit(tmp_path):
    recorded = train(World(), tmp_path / "all", every=1, micro_batches=True)
    assert recorded == train(World(), tmp_path / "none", every=100)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks", "precision"),
    [("ddp", 3, "fp32"), ("fsdp", 2, "fp16"), ("fsdp", 3, "fp32"), ("parameter_server", 3, "fp16")],
)
def test_every_layout_records_the_same_lines(tmp_path, strategy, ranks, precision):
    train(World(), tmp_path / "single", every=1, micro_batches=True, precision=precision)
    run_ranks(_rank, ranks, tmp_path / strategy, strategy, precision)
    assert (tmp_path / strategy / FILE).read_text() == (tmp_path / "single" / FILE).read_text()


def _rank(world, folder, strategy, precision):
    return train(world, folder, every=1, micro_batches=True, strategy=strategy, precision=precision)


def test_a_micro_batch_has_the_gradient_of_the_sum_of_its_losses(tmp_path):
    seen = {}

    def notice(run, batch):
        model = run.require_prepared().state.parts.model
        for part in batch.micro_batches:
            torch.manual_seed(0)
            inputs, targets = part.data
            loss = nn.functional.cross_entropy(model(inputs), targets, reduction="sum")
            names = {name: p for name, p in model.named_parameters() if p.requires_grad}
            gradients = torch.autograd.grad(loss, list(names.values()), allow_unused=True)
            seen[part.k] = {n: digest_tensor(g) for n, g in zip(names, gradients) if g is not None}

    run = Run(RunOptions.of(global_batch=8, micro_batches=4, strategy="single"), World())
    model, _ = run.prepare(model := nn.Linear(3, 2), torch.optim.SGD(model.parameters(), lr=0.1))
    run.add_callback(GradientRecorder(run, tmp_path, 1, micro_batches=True))
    batch = next(iter(run.batches(samples())))
    notice(run, batch)
    run.backward(batch, nn.CrossEntropyLoss())
    assert read_records(tmp_path)[0].micro_batches == {k: GradientDigest.of(each) for k, each in seen.items()}


def test_where_micro_batches_cannot_be_told_apart_they_are_not_recorded(tmp_path):
    with pytest.raises(ConfigError, match="'dp' computes micro-batches with parts or copies"):
        train(World(), tmp_path, every=1, micro_batches=True, strategy="dp", dp={"replicas": 2})


@pytest.mark.slow
def test_strategy_dp_records_whole_steps(tmp_path):
    for strategy in ("single", "dp"):
        train(World(), tmp_path / strategy, every=1, strategy=strategy)
    assert (tmp_path / "dp" / FILE).read_text() == (tmp_path / "single" / FILE).read_text()
