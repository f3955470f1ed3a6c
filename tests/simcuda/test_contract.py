"""Every strategy trains on simulated devices: one fingerprint, no race, and no wait of the host in a step."""

import pytest
from tests.simcuda.layouts import LAYOUTS, LEVEL_B, WIDER, functions_of, require

MODELS = ("perceptron", "convolutions", "decoder", "lstm")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("layout", "model"),
    # the axis ``tensor`` splits no LSTM
    [(layout, model) for layout in LAYOUTS for model in MODELS if model != "lstm" or layout not in LEVEL_B],
)
def test_every_layout_is_equal_to_one_device(trained, layout, model, precision):
    (reference,) = trained("single", model, precision=precision)
    require(trained(layout, model, precision=precision), reference, layout, precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", WIDER)
def test_every_number_of_devices_is_equal_to_one(trained, layout, precision):
    (reference,) = trained("single", "convolutions", precision=precision)
    require(trained(layout, "convolutions", precision=precision), reference, layout, precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        *(("sync_batch_norm", f"ddp {ranks}") for ranks in (2, 3, 4)),
        *(("shards", layout) for layout in ("ddp 2", "tensor 2", "tensor 4", "data x tensor")),
    ],
)
def test_other_recipes_are_equal_to_one_device(trained, recipe, layout, precision):
    """BatchNorm over the batch does not let the host wait, and split layers have equal bits where shards are given."""
    options = {"sync_batch_norm": {"sync_batch_norm": True}, "shards": {"tensor": {"shards": 4}}}[recipe]
    (reference,) = trained("single", "convolutions", precision=precision, **options)
    in_shards = recipe == "shards"
    require([reference], reference, "single", precision, in_shards=in_shards)
    found = trained(layout, "convolutions", precision=precision, **options)
    require(found, reference, layout, precision, in_shards=in_shards)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp 2", "ddp 3", "ddp 4", "data x pipeline"])
@pytest.mark.parametrize("reduce", ["ring", "bf16", "powersgd"])
def test_other_reducers_do_not_wait_and_do_not_race(trained, reduce, layout):
    (reference,) = trained("single", "convolutions")
    found = trained(layout, "convolutions", reduce=reduce)
    assert len({each.fingerprint for each in found}) == 1
    require(found, reference, layout, bound=0.02)


@pytest.mark.slow
def test_torchs_own_mixed_precision_does_not_wait_and_does_not_race(trained):
    (reference,) = trained("single", "decoder", precision="bf16")
    found = trained("fsdp 2", "decoder", fsdp={"mixed_precision": "bf16"})
    require(found, reference, "fsdp 2", bound=0.02)


@pytest.mark.slow
def test_an_asynchronous_server_waits_for_what_it_sends(trained):
    """Level C. Pushes and pulls are messages of the host, so each is copied from the device and to it."""
    options = {"parameter_server": {"mode": "asynchronous"}, "micro_batches": 2}
    for each in trained("parameter_server 3", "convolutions", **options):
        assert each.races == {}
        waits = {"as_bytes", "from_bytes", "add", "backward", "_finish", "_require_finite", "_note_late_changes"}
        assert functions_of(each.waits).keys() <= waits
        assert functions_of(each.waits).get("_note_late_changes", 0) <= 6 < len(each.losses), "of three steps"
        assert each.losses[-1] < each.losses[0] * 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "places"),
    [
        ("ddp 2", {"lockstep/core/fingerprint.py"}),
        ("fsdp 2", {"lockstep/core/fingerprint.py"}),
        ("pipeline 2", {"lockstep/core/fingerprint.py", "lockstep/strategies/loop_writes.py"}),
    ],
)
def test_a_comparison_of_the_ranks_reads_once_in_each_place(trained, layout, places):
    """One sum for each tensor; where no rank has all of them, also what the loop has written to."""
    found = trained(layout, "convolutions", fingerprint_every=1)
    for each in found:
        reads = dict.fromkeys(places, 0)
        for (_, where), count in each.waits.items():
            reads[where.partition(":")[0]] += count
        assert reads == dict.fromkeys(places, each.steps - 1)  # between the steps that are observed
