"""The table of compared layouts, and its JSON."""

import json

from tests.verify.traces import changed, level_b, scaled, trace

from lockstep.verify import Comparison, Trace, compare
from lockstep.verify.report import as_json, table


def test_the_table_compares_with_what_one_device_does_when_its_inputs_change():
    for sensitivity, said in (
        (0.2, "this model enlarges rounding that much"),
        (0.02, "does not explain it"),
    ):
        text = table([compare(trace(), trace(memory=[1]), 0.0), level_b(0.5, sensitivity)])
        assert "differs by 5.0e-01, more than the bound of level B, 0.001" in text
        assert f"by one unit in the last place differs by up to {sensitivity:.1e}" in text
        assert said in text


def test_a_layout_that_did_not_run_is_not_broken():
    refused = Trace("pipeline on 2", "pipeline", 2, "", refused="The model is no chain.")
    assert not compare(trace(), refused, 0.0).is_broken


def test_the_table_counts_equal_layouts_and_names_the_differences():
    equal, other = compare(trace(), trace(), 0.0), compare(trace(), changed(scaled(0.5)), 0.5)
    refused = Comparison(Trace("fsdp on 2", "fsdp", 2, "", refused="It has one parameter."), "")
    for each in (equal, other):
        each.trace.memory = [2**20]
    lines = table([equal, other, equal, refused]).splitlines()
    assert lines[1].split()[:6] == ["ddp", "on", "2", "A", "equal", "bits"]
    assert "ddp on 2 differs since step 1, 'w': gradients are scaled differently" in lines[6]
    assert lines[7] == "fsdp on 2 did not run: It has one parameter."
    assert lines[8].startswith("1 of 2 other layouts have the bits of one device after each of 3 steps")
    assert table([equal, refused]).splitlines()[-1].startswith("No other layout was compared. The loss of")


def test_a_layout_without_bits_that_ends_in_the_same_parameters_does_not_differ_by_nothing():
    """It was said to differ by 0.0e+00."""
    other = changed(scaled(1.0 + 1e-7))
    other.level, other.memory = "C", [2**20]
    text = table([compare(trace(), trace(memory=[1]), 0.0), compare(trace(), other, 0.0)])
    assert text.splitlines()[2].split()[3:8] == ["C", "equal", "at", "the", "end"]


def test_the_table_says_that_further_runs_of_a_script_were_not_compared():
    text = table([compare(trace(), trace(memory=[1], further_runs=2), 0.0)])
    assert "The script begins 3 runs with lockstep.init; the first alone was compared." in text


def test_the_table_says_how_many_steps_were_made():
    """A script may end before the number of steps that was asked for."""
    short = trace(memory=[1])
    short.steps = short.steps[:1]
    (last,) = table([compare(short, short, 0.0)] * 2).splitlines()[-1:]
    said = "1 of 1 other layout has the bits of one device after the only step, whose loss is "
    assert last.startswith(said)


def test_what_a_resumed_run_warns_of_is_shown_and_what_every_run_warns_of_is_not():
    reference, same = trace(memory=[1], warnings=["slow"]), trace(memory=[1], warnings=["odd"])
    resumed = trace(memory=[1], warnings=["slow", "lost"], label="1, then 2").since(1)
    compared = [compare(reference.since(each.first), each, 0.0) for each in (reference, same, resumed)]
    lines = table(compared).splitlines()
    assert lines[5] == "1, then 2: lost"
    assert "slow" not in "".join(lines) and "odd" not in "".join(lines)


def test_a_refusal_while_it_trains_is_a_finding_and_one_before_is_none():
    said = "The forward pass keeps 'calls'. Set checks='off'."
    equal = compare(trace(), trace(memory=[1]), 0.0)
    refused = compare(trace(), Trace("ddp on 2", "ddp", 2, "", refused=said, in_training=True), 0.0)
    assert refused.is_broken
    lines = table([equal, refused]).splitlines()
    assert lines[2].split() == ["ddp", "on", "2", "refused"]
    assert lines[4] == f"ddp on 2: refused while it trained: {said}"
    assert lines[5].startswith("0 of 1 other layout has the bits of one device")
    assert json.loads(as_json([equal, refused]))[1]["cause"] == "refused"
    alone = table([refused])
    assert said in alone and alone.endswith("No layout was compared.")
