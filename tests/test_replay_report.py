"""The report of a replay."""

import dataclasses
from pathlib import Path

from lockstep.config.components import Component
from lockstep.config.job import DataConfig, JobConfig, TrainingConfig
from lockstep.core.plan import Share
from lockstep.job.run_folder import Start
from lockstep.replay import GradientComparison, Origin, ReplayReport, _is_missing, describe
from lockstep.trainer.gradient_record import GradientDigest, GradientRecord

DIGESTS = {f"layer.{number}": f"{number:064x}" for number in range(8)}
MINE = GradientDigest.of(DIGESTS)
OTHERS = GradientDigest.of(dict.fromkeys(DIGESTS, "f" * 64))
ONE_OTHER = GradientDigest.of({**DIGESTS, "layer.3": "f" * 64})


INTERLEAVED = [Share(holders=6, holder=rank, rounds=True) for rank in range(6)]
STAGES = [Share(holders=2, holder=rank // 2) for rank in range(4)]


def report(
    compared,
    *,
    earlier=(),
    record=None,
    micro_batch=None,
    level="A",
    samples=(3, 1, 4),
    shares=INTERLEAVED,
    is_missing=False,
):
    part = Component(target="torch.nn:Identity")
    job = JobConfig(model=part, data=DataConfig(train=part), optimizer=part)
    start = Start(step=0, strategy="fsdp", shares=shares, level=level, device="cpu", context={}, job=job)
    return ReplayReport(
        folder=Path("runs/digits-001"),
        origin=Origin(start=start, step=12, checkpoint=Path("runs/digits-001/step-00000012")),
        epoch=1,
        position=5,
        leaves=8,
        micro_batch=micro_batch,
        is_missing=is_missing,
        samples=samples,
        loss=1.5,
        norm=2.25,
        compared=compared,
        earlier=earlier,
        record=record,
    )


def compared(recorded, step=17, **more):
    return GradientComparison(step=step, gradient=MINE, recorded=recorded, **more)


def last_line(found):
    return describe(found).splitlines()[-1]


def test_equal_bits_are_a_match():
    found = report(compared(MINE))
    assert not found.differs
    assert last_line(found) == "record    matches: the gradient has the bits that were recorded"


def test_the_place_the_samples_and_the_numbers_are_told():
    lines = describe(report(compared(MINE), micro_batch=5)).splitlines()
    assert lines[:6] == [
        "run       runs/digits-001, trained with fsdp on 6",
        "step      17, micro-batch 5 of rank 5 (step 5 of epoch 2)",
        "from      step-00000012, 5 steps before",
        "samples   3, 1, 4",
        "loss      1.5",
        "norm      2.25 (of the sum of the losses, not of their mean)",
    ]
    assert "\nnorm      2.25\n" in describe(report(compared(MINE)))
    assert lines[6] == f"digest    {MINE.digest}"
    assert len(describe(report(compared(MINE), samples=range(10_000)))) < 1000


def test_a_micro_batch_whose_targets_are_all_ignored_has_no_loss():
    """It was nan, as if the step were at fault."""
    nothing = dataclasses.replace(report(compared(MINE), micro_batch=5), loss=float("nan"), norm=0.0)
    assert "\nloss      none: no target counts\nnorm      0 (" in describe(nothing)
    assert "\nloss      nan\n" in describe(dataclasses.replace(nothing, norm=float("nan")))


def test_the_ranks_that_computed_a_micro_batch_are_told():
    for shares, k, ranks in (
        (INTERLEAVED, 7, "rank 1"),
        (STAGES, 3, "ranks 0, 1"),
        (STAGES, 4, "ranks 2, 3"),
    ):
        told = describe(report(compared(MINE), micro_batch=k, shares=shares))
        assert f"micro-batch {k} of {ranks} (" in told


def test_a_difference_names_the_first_parameters_and_counts_the_others():
    found = report(compared(OTHERS))
    assert found.differs
    assert last_line(found) == (
        "record    differs: layer.0, layer.1, layer.2, layer.3, layer.4 and 3 more (8 of 8 parameters)"
    )
    assert "differs: layer.3 (1 of 8 parameters)" in last_line(report(compared(ONE_OTHER)))


def test_a_difference_tells_the_micro_batches_and_both_losses():
    line = last_line(report(compared(ONE_OTHER, micro_batches=[2, 5], loss=(1.5).hex(), recorded_loss=(1.25).hex())))
    assert line.endswith("parameters), in micro-batches 2, 5; so does the loss, 1.5 here and 1.25 there")


def test_another_loss_or_micro_batch_is_no_match_where_the_whole_gradient_is():
    """It was said to match, with exit status 0."""
    loss = report(compared(MINE, loss=(1.5).hex(), recorded_loss=(1.25).hex()))
    parts = report(compared(MINE, micro_batches=[2]))
    whole = report(compared(GradientDigest("0" * 64, MINE.parameters)))
    assert loss.differs and parts.differs and whole.differs
    same = "record    differs: the gradient of the step has the recorded bits"
    assert last_line(loss) == f"{same}; the loss differs, 1.5 here and 1.25 there"
    assert last_line(parts) == f"{same}, but others are recorded in micro-batches 2"
    assert last_line(whole) == "record    differs: the digest of the whole gradient"


def test_a_step_on_the_way_that_differs_is_what_is_said():
    found = report(compared(MINE), earlier=[compared(MINE, step=12), compared(ONE_OTHER, step=14)])
    assert found.differs
    assert last_line(found) == "record    differs already at step 14: layer.3 (1 of 8 parameters)"


def test_what_was_not_recorded_is_no_difference_and_says_how_to_record_it():
    found = report(compared(None), earlier=[compared(MINE, step=15)])
    assert not found.differs
    assert last_line(found) == (
        "record    was not recorded; train with --set training.gradients_every=1 to record it "
        "(step 15, the last recorded one before it, matches)"
    )
    record = GradientRecord(step=17, loss=(1.5).hex(), norm=2.25, gradient=MINE)
    line = last_line(report(compared(None), record=record, micro_batch=1))
    assert "training.record_micro_batches=true" in line


def test_a_level_that_promises_no_bits_is_named():
    assert "promises level B with these settings" in last_line(report(compared(None), level="B"))


def test_a_record_that_is_gone_is_told_from_one_that_was_never_made():
    """A line that was deleted or is torn was said to be "not recorded"."""
    every, records = TrainingConfig(gradients_every=2).record_every, {0: None, 4: None, 9: None}
    assert [step for step in range(12) if _is_missing(step, records, every)] == [2, 6, 8]
    assert not _is_missing(2, {}, every)
    assert not _is_missing(2, records, TrainingConfig(gradients_every=0).record_every)
    assert "is missing: gradients.jsonl has later steps" in last_line(report(compared(None), is_missing=True))
