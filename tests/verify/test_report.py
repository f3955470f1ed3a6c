"""The comparison of layouts, and its table."""

from tests.verify.traces import changed, scaled, trace

from lockstep.verify import Comparison, Trace, compare
from lockstep.verify.report import table


def test_a_layout_that_did_not_keep_level_a_is_broken_and_one_of_level_b_is_not():
    other = changed(scaled(1.0 + 1e-7))
    assert compare(trace(), other, 1e-7).is_broken
    other.level = "B"
    found = compare(trace(), other, 1e-7)
    assert (found.reached, found.is_broken) == ("B", False)


def test_a_layout_that_did_not_run_is_not_broken():
    refused = Trace("pipeline on 2", "pipeline", 2, "", refused="The model is no chain.")
    assert not compare(trace(), refused, 0.0).is_broken


def test_the_table_counts_equal_layouts_and_names_the_differences():
    equal, other = compare(trace(), trace(), 0.0), compare(trace(), changed(scaled(0.5)), 0.5)
    refused = Comparison(Trace("fsdp on 2", "fsdp", 2, "", refused="It has one parameter."), "")
    for each in (equal, other):
        each.trace.memory = [2**20]
    lines = table([equal, other, refused], steps=3).splitlines()
    assert lines[1].split()[:6] == ["ddp", "on", "2", "A", "equal", "bits"]
    assert "ddp on 2 differs since step 1, 'w': gradients are scaled differently" in lines[5]
    assert lines[6] == "fsdp on 2 did not run: It has one parameter."
    assert lines[7].startswith("1 of 2 layouts have the bits of one device after each of 3 steps")
