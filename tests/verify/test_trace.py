"""The file of a trace."""

from tests.verify.traces import trace

from lockstep.verify import Trace
from lockstep.verify.trace import keep_refusal, refusal


def test_a_trace_survives_being_written(tmp_path):
    trace().write(tmp_path / "trace.json")
    assert Trace.read(tmp_path / "trace.json") == trace()


def test_the_part_from_a_step_on_begins_with_the_values_before_it():
    later = trace(steps=4).since(2)
    assert (later.first, [each.step for each in later.steps]) == (2, [2, 3])
    assert later.start == {"w": "p1", "b": "q1", "mean": "m1"}
    assert later.since(3).start == {"w": "p2", "b": "q2", "mean": "m2"}
    assert trace().since(0) == trace()


def test_the_part_from_a_step_on_is_right_where_the_loop_skips_steps():
    """A loop that skips a bad batch was said to differ once it was stopped and resumed."""
    skipping = trace(steps=5)
    del skipping.steps[1]
    assert [each.step for each in skipping.since(3).steps] == [3, 4]
    assert skipping.since(3).start["w"] == "p2"
    assert skipping.since(2).start["w"] == "p0"


def test_a_refusal_is_kept_in_every_locale_with_names_of_any_bytes(tmp_path):
    keep_refusal(tmp_path, 0, "the class caf\udce9, Größe")
    assert refusal(tmp_path) == "the class caf\udce9, Größe"
