"""The output of --dry-run: numbers that agree with the sample plan, and a plot of the learning rate."""

import pytest
from torch import nn

from lockstep.job.assemble import sample_plan
from lockstep.job.summary import Facts, describe, plot
from lockstep.text import plural


@pytest.fixture
def text(load):
    def describe_job(*options, samples=1438, model=None, **facts):
        config = load("training.global_batch=64", "training.micro_batches=8", *options)
        plan = sample_plan(config, range(samples), model or nn.Linear(1, 1))
        given = {"plan": plan, "parameters": 12345, "devices": 3, **facts}
        return describe(config, Facts(**given), "runs/work-001")

    return describe_job


def test_steps_and_the_ragged_tail_are_told(text):
    said = text(validation_samples=359)
    assert "3 epochs x 23 steps = 69 optimizer steps; a step is 64 samples = 8 micro-batches x 8." in said
    assert "The last step of an epoch has 30 samples: 3 full micro-batches, one of 6, 4 empty" in said
    assert "12,345 parameters" in said
    assert "1,438 samples; evaluation: 359 samples" in said


def test_numbers_of_one_are_singular(text):
    said = text("training.epochs=1", "training.max_steps=1", samples=65)
    assert "1 epoch x 2 steps = 2 optimizer steps, of which max_steps makes 1; a step is" in said
    assert "The last step of an epoch has 1 sample: one of 1, 7 empty" in said
    assert "over 1 step (" in said


def test_a_full_last_batch_needs_no_word(text):
    assert "The last step" not in text(samples=640)


def test_each_rank_has_its_row_and_every_sample_is_in_one(text):
    rows = [line.split() for line in text().splitlines() if line.startswith("    3  ")]
    assert [row[1] for row in rows] == ["0", "1", "2"]
    assert sum(int(row[-2]) for row in rows) == 64
    assert sum(int(row[-1]) for row in rows) == 30


@pytest.mark.parametrize(("mode", "server"), [("synchronous", "2"), ("asynchronous", "0")])
def test_servers_compute_no_micro_batches(text, mode, server):
    said = text("training.strategy=parameter_server", f"parameter_server.mode={mode}")
    rows = [line.split() for line in said.splitlines() if line.startswith("    3  ")]
    assert [row[1] for row in rows if row[2] == "none:"] == [server]
    assert sum(int(row[-2]) for row in rows if row[2] != "none:") == 64


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        (["strategy=fsdp"], ["0, 2, 4, 6 32 16", "1, 3, 5, 7 32 14"]),
        (["strategy=pipeline"], ["0 to 7 64 30", "0 to 7 64 30"]),
        (["strategy=dp"], ["0 to 7 64 30"]),
        (["strategy=hybrid", "mesh=data=1,layers=2"], ["0 to 7 64 30"]),
        (["strategy=hybrid", "mesh=tensor=1,data=2"], ["0 to 3 32 16", "4 to 7 32 14"]),
    ],
)
def test_ranks_compute_what_their_strategy_gives_them(text, options, rows):
    said = text(*(f"training.{option}" for option in options), devices=2)
    found = [line.split() for line in said.partition("micro-batches k ")[2].splitlines()[1:] if line[:5].strip()]
    shown = [" ".join(row[2:]) for row in found if row[0] == str(len(rows))]
    assert shown[: len(rows)] == rows
    assert f"({plural(len(rows), 'rank')} of 1 thread," in said


def test_dropped_samples_are_told(text, load):
    assert "left out  30 samples per epoch" in text("training.drop_last=true")
    assert "left out  1 sample per epoch, too few for BatchNorm" in text(samples=641, model=nn.BatchNorm1d(1))
    assert "left out" not in text(samples=641)
    assert sample_plan(load(), range(129), nn.BatchNorm1d(1)).steps_per_epoch == 1


def test_the_level_of_equality_is_told(text):
    assert "equality level A (bitwise)" in text()
    assert "equality level B (tolerance)" in text("training.reduce=ring")
    assert "equality level A (bitwise)" in text("training.sync_batch_norm=true")
    assert "equality level B (tolerance)" in text("training.strategy=tensor")
    assert "equality level A (bitwise)" in text("training.strategy=tensor", "tensor.shards=2")
    assert "equality level C (statistical)" in text("training.reduce=powersgd")
    for rounds in ("fsdp.cpu_offload=true", "fsdp.mixed_precision=bf16"):
        assert "equality level B (tolerance)" in text("training.strategy=fsdp", rounds)
    for reduce in ("ordered", "ring"):
        said = text("training.deterministic=false", f"training.reduce={reduce}")
        assert "equality level C (statistical) on CUDA: deterministic = false" in said
    asynchronous = ("training.strategy=parameter_server", "parameter_server.mode=asynchronous")
    assert "equality level C (statistical)" in text(*asynchronous)


def test_the_learning_rate_is_drawn_from_its_first_to_its_last_value(text):
    said = text("schedule.kind=cosine", "schedule.final_factor=0.1", "schedule.warmup_steps=10")
    assert "learning rate over 69 steps (cosine):" in said
    last = next(line for line in said.splitlines() if line.startswith(" " * 12 + "0.01 "))
    assert last.split() == ["0.01", "0.0101"]


def test_a_torch_scheduler_is_named_instead(text):
    assert "by torch.optim.lr_scheduler:StepLR" in text("schedule.target=torch.optim.lr_scheduler:StepLR")


def test_files_are_told(text, tmp_path):
    said = text("checkpoint.every_steps=5", "checkpoint.keep=2", f"checkpoint.resume={tmp_path}")
    assert "runs/work-001/step-*, every 1 epoch, every 5 steps; the last 2 and the best are kept" in said
    assert f"resumes      {tmp_path}" in said


def test_a_plot_reaches_its_scale_and_stands_on_zero():
    lines = plot([0.0, 1.0, 2.0, 4.0], height=4)
    assert [line.partition("|")[2] for line in lines[:4]] == ["   #", "   #", "  ##", " ###"]
    assert lines[0].split()[0] == "4"
    assert plot([0.0], height=2)[0].endswith("|")


def test_a_value_reaches_the_mark_that_is_nearest():
    """It reached the next one above, so that every rate looked higher than it was."""
    assert [line.partition("|")[2] for line in plot([0.1, 2.4, 2.6, 4.0], height=4)[:4]] == [
        *("   #", "  ##", " ###", "####"),
    ]
