"""The flags that a supervisor and its ranks share."""

from contextlib import closing

import pytest

from lockstep.runtime.control import Control, Stopped, StopReason, control_file


def test_flags_are_seen_through_the_file_by_another_process_that_maps_it(tmp_path):
    with closing(Control(tmp_path)) as supervisor, closing(Control(tmp_path)) as rank:
        assert rank.reason is StopReason.NONE
        supervisor.request_stop(StopReason.PREEMPTED)
        rank.polled = True
        supervisor.ending = True
        assert (rank.reason, supervisor.polled, rank.ending) == (StopReason.PREEMPTED, True, True)


def test_an_interrupt_overrides_a_preemption_and_not_the_other_way_round():
    with closing(Control()) as control:
        control.request_stop(StopReason.PREEMPTED)
        control.request_stop(StopReason.INTERRUPTED)
        control.request_stop(StopReason.PREEMPTED)
        assert control.reason is StopReason.INTERRUPTED


@pytest.mark.fault("T6")
def test_a_page_of_any_bytes_asks_for_nothing(tmp_path):
    with closing(Control(tmp_path)) as control:
        control_file(tmp_path).write_bytes(b"\xfe" * 4096)
        assert control.reason is StopReason.NONE
        control.request_stop(StopReason.PREEMPTED)
        assert control.reason is StopReason.PREEMPTED


def test_the_exit_code_of_a_stopped_rank_is_its_reason():
    assert Stopped(StopReason.PREEMPTED).code == 75
