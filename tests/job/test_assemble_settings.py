"""The settings of a job file train what a loop of torch's own would, on any layout, and a run goes on with them."""

import json
import math
import re
import shutil

import pytest
import safetensors.torch
import torch
from tests.ranks import run_ranks
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lockstep.config.job_file import load_job, parse_set
from lockstep.core.seeding import derive_seed
from lockstep.data import Digits
from lockstep.errors import ConfigError
from lockstep.job.assemble import assemble, build_model, data_to_predict, sample_plan
from lockstep.job.instantiate import importable_from, instantiate

JOB = """\
[model]
target = "own_settings:net"

[data]
workers = 0

[data.train]
target = "lockstep.data:Digits"
split = "validation"

[data.validation]
target = "lockstep.data:Digits"
split = "validation"

[data.collate]
target = "own_settings:halved"
factor = 0.5

[loss]
target = "torch.nn.functional:cross_entropy"
label_smoothing = 0.1

[metrics.top]
target = "own_settings:top"
k = 2

[[callbacks]]
target = "own_settings:Counted"
file = "steps.txt"

[optimizer]
target = "torch.optim:AdamW"
lr = 0.01
weight_decay = 0.1

[parameters]
decay = "matrices"
layer_decay = 0.5

[[parameters.groups]]
names = ["1", "!1.bias"]
weight_decay = 0.3

[schedule]
kind = "cosine"

[training]
epochs = 2
max_steps = 9
global_batch = 64
micro_batches = 4
evaluate_every_steps = 4
ema_decay = 0.9
checkpoint_activations = ["2"]

[checkpoint]
every_steps = 2

[log]
tensorboard = false
progress = false
"""
PARTS = """
import torch
from torch import nn
from lockstep.runtime import Callback


def net():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.0)), nn.Linear(16, 10)
    )


def halved(samples, factor):
    pictures, labels = zip(*samples)
    return torch.stack(list(map(torch.as_tensor, pictures))) * factor, torch.as_tensor(labels)


def none(split):
    return []


def top(output, target, k):
    return (output.topk(k, 1).indices == target[:, None]).any(1)


class Counted(Callback):
    def __init__(self, file):
        self.file = file

    def on_gradients_ready(self, batch, loss):
        with open(self.file, "a") as file:
            file.write(f"{batch.plan.step} ")
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_settings.py").write_text(PARTS)
    (tmp_path / "job.toml").write_text(JOB)

    def load(*sets):
        return load_job("job.toml", [parse_set(each) for each in (f"run.directory={tmp_path}", *sets)])

    return load


def trained(world, config):
    return assemble(config, world).fit().fingerprint


def by_hand(world, config):
    """The same training without Lockstep's loop: weights, their average, and the optimizer's groups."""
    importable_from(config.code)
    data = Digits("validation")
    torch.manual_seed(derive_seed(0, "weights"))
    model = build_model(config)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    first, second, last = model[1], model[2][0], model[3]
    groups = [
        {"params": [first.weight], "lr": 0.0025, "weight_decay": 0.3},
        {"params": [first.bias], "lr": 0.0025, "weight_decay": 0.0},
        {"params": [second.weight], "lr": 0.005},
        {"params": [second.bias], "lr": 0.005, "weight_decay": 0.0},
        {"params": [last.weight], "lr": 0.01},
        {"params": [last.bias], "lr": 0.01, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    plan = sample_plan(config, data, model)
    for number in range(9):
        for group, base in zip(optimizer.param_groups, (0.0025, 0.0025, 0.005, 0.005, 0.01, 0.01)):
            group["lr"] = base * (1 + math.cos(math.pi * number / 9)) / 2
        step = plan.step(*divmod(number, plan.steps_per_epoch))
        pictures, labels = zip(*(data[index] for part in step.indices for index in part.tolist()))
        output = model(torch.stack(list(map(torch.as_tensor, pictures))) * 0.5)
        optimizer.zero_grad()
        cross_entropy(output, torch.as_tensor(labels), label_smoothing=0.1).backward()
        optimizer.step()
        average.update_parameters(model)
    return model.state_dict(), average.module.state_dict()


def test_a_job_is_what_a_loop_of_torch_would_be_and_goes_on_in_another_layout(job, tmp_path):
    config, folder = job("run.name=own"), tmp_path / "own"
    (whole,) = run_ranks(trained, 1, config)
    ((model, average),) = run_ranks(by_hand, 1, config)
    for name, expected in (("model", model), ("average", average)):
        found = safetensors.torch.load_file(folder / f"{name}.safetensors")
        torch.testing.assert_close(found, dict(expected))
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [each["step"] for each in records if "validation_top" in each] == [4, 6, 8, 9]
    assert records[-1]["validation_top"] > records[-1]["validation_accuracy"]
    assert (tmp_path / "steps.txt").read_text().split() == [str(number) for number in range(9)]

    averaged = (folder / "average.safetensors").read_bytes()
    for step in (8, 9):
        shutil.rmtree(folder / f"step-{step:08}")
    others = ("training.strategy=fsdp", "training.checkpoint_activations=[]", "checkpoint.resume=auto")
    assert run_ranks(trained, 2, job("run.name=own", *others)) == [whole] * 2
    assert (folder / "average.safetensors").read_bytes() == averaged


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pipeline", "layers", "parameter_server", "dp"])
def test_every_strategy_has_the_bits_of_one_device(strategy, job):
    (whole,) = run_ranks(trained, 1, job())
    devices = 1 if strategy in ("layers", "dp") else 2
    assert run_ranks(trained, devices, job(f"training.strategy={strategy}", "run.threads=1")) == [whole] * devices


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (("training.max_steps=100",), "Set training.epochs=17, or leave max_steps out"),
        (("schedule.warmup_steps=10",), "the warm-up has 10 steps and the run 9, so it would never end"),
        (('training.checkpoint_activations=["9"]',), "match no module"),
        (('parameters.groups=[{names=["nothing"], lr=1.0}]',), "match no parameter that is trained"),
        (
            (
                "schedule.kind=none",
                "schedule.target=torch.optim.lr_scheduler:OneCycleLR",
                "schedule.max_lr=1.0",
                "schedule.total_steps=9",
            ),
            "gives all parameters one learning rate",
        ),
        (
            (
                "schedule.kind=none",
                "schedule.target=torch.optim.lr_scheduler:OneCycleLR",
                "schedule.max_lr=1.0",
                "schedule.total_steps=5",
            ),
            "OneCycleLR ends after 5 steps, and the run has 9. Give it '{steps}'.",
        ),
    ],
)
def test_settings_without_effect_are_refused(sets, said, job):
    with pytest.raises(ConfigError, match=re.escape(said)):
        run_ranks(trained, 1, job(*sets))


STEPS = (
    "schedule.kind=none",
    "schedule.target=torch.optim.lr_scheduler:StepLR",
    "parameters.layer_decay=none",
)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        pytest.param(
            (*STEPS, "schedule.step_size=0"),
            "StepLR has no learning rate for step 1: ZeroDivisionError",
            marks=pytest.mark.slow,
        ),
        ((*STEPS, "schedule.step_size=1", "schedule.gamma=-1"), "The learning rate of step 1 is -0.0"),
        pytest.param(
            ("optimizer.lr=inf", "parameters.layer_decay=none"),
            "The learning rate of step 0 is inf, and should",
            marks=pytest.mark.slow,
        ),
        (("data.validation.target=own_settings:none",), "data.validation has no samples."),
    ],
)
def test_a_schedule_or_a_data_set_that_means_nothing_is_refused_before_it_is_used(sets, said, job):
    """Arguments of a scheduler ended in a traceback of torch's, a negative rate trained away from the data, and an
    empty validation set was refused after the first epoch."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        run_ranks(trained, 1, job(*sets))


DRAWN = """\
import torch
from lockstep.data import Digits
from torch.utils.data import random_split


class Fixed(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
        self.register_buffer("mask", torch.randn(64), persistent=False)


def part(which):
    return random_split(Digits("validation"), [0.5, 0.5])[which]
"""


def test_what_a_model_and_its_data_draw_when_they_are_made_is_drawn_again_to_predict(job, tmp_path):
    (tmp_path / "drawn.py").write_text(DRAWN)
    sets = ['model={target="drawn:Fixed"}', *(f"data.{name}.split=none" for name in ("train", "validation"))]
    sets += [f"data.train.{each}" for each in ("target=drawn:part", "which=0")]
    config = job(*sets, *(f"data.validation.{each}" for each in ("target=drawn:part", "which=1")))
    importable_from(config.code)
    assert torch.equal(build_model(config).mask, build_model(config).mask)
    parts = []
    for is_training in (True, False):
        torch.manual_seed(3)
        if is_training:
            parts += [instantiate(each) for each in (config.data.train, config.data.validation)]
        else:
            parts.append(data_to_predict(config, config.data.validation))
    assert list(parts[1].indices) == list(parts[2].indices) != list(parts[0].indices)
