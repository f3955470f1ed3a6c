"""The file of a trace."""

from tests.verify.traces import trace

from lockstep.verify import Trace


def test_a_trace_survives_being_written(tmp_path):
    trace().write(tmp_path / "trace.json")
    assert Trace.read(tmp_path / "trace.json") == trace()
