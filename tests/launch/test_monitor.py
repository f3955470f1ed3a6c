"""When a run is ended because ranks have left it or want to; no process needed."""

import signal
import time
from dataclasses import replace

import pytest
from tests.launch.test_outcome import beat, end

from lockstep.launch.monitor import EarlyExitDetector, TerminationSchedule
from lockstep.runtime.heartbeat import Membership

LEAVING = replace(beat(Membership.LEAVING), phase="end")


def look(folder, ends=(), beats=(), limit=60.0, *, elsewhere=False):
    return EarlyExitDetector(folder, limit).look(ends, {}, beats, elsewhere=elsewhere)


def test_a_rank_that_left_the_group_for_good_is_given_two_seconds_of_company(tmp_path):
    now = time.monotonic()
    assert look(tmp_path, [end(1, 0, now)], [beat()]) is None
    assert look(tmp_path, [end(1, 0, now - 2.5)], [beat()]) == (0.0, 3.0)
    agreed = end(1, 0, now - 2.5, beat=beat(Membership.FINISHED))
    assert look(tmp_path, [agreed], [beat()]) is None


def test_a_rank_that_still_computes_alone_may_go_on_while_others_wait_to_leave(tmp_path):
    assert look(tmp_path, beats=[LEAVING, beat()]) is None
    assert look(tmp_path, beats=[LEAVING, beat()], limit=0.0) is None


@pytest.mark.parametrize("beats, elsewhere", [([LEAVING, beat()], False), ([beat()], True)])
def test_it_may_do_so_for_the_stall_limit_only(tmp_path, beats, elsewhere):
    assert look(tmp_path, beats=beats, limit=1e-9, elsewhere=elsewhere) == (0.0, 1.0)


def test_nobody_is_ended_where_nobody_leaves_or_all_do(tmp_path):
    assert look(tmp_path, beats=[beat(), beat()], limit=1e-9) is None
    assert look(tmp_path, beats=[LEAVING, LEAVING], limit=1e-9) is None
    at_work = replace(beat(), time=time.monotonic())
    assert look(tmp_path, beats=[LEAVING, at_work], limit=1e-9) is None


def test_a_suspension_takes_nothing_of_the_time_until_a_signal():
    schedule = TerminationSchedule()
    schedule.within(3.0, 4.0)
    due = schedule.next_due
    schedule.delay(7.0)
    assert schedule.next_due == due + 7.0
    schedule.within(0.0, 60.0)
    assert schedule.take_due() == [signal.SIGTERM]
    assert schedule.next_due == pytest.approx(due + 8.0, abs=0.1)
