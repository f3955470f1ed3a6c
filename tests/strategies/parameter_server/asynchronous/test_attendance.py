"""Who has come to which meeting, without a process."""

import math

from lockstep.strategies.parameter_server.asynchronous.attendance import Attendance


def test_all_wait_at_a_meeting_until_it_is_over():
    attendance = Attendance()
    assert not attendance.all_wait([1, 2])
    attendance.come(1, 1)
    assert not attendance.all_wait([1, 2])
    attendance.come(2, 1)
    assert attendance.all_wait([1, 2])
    assert attendance.begin() == 1
    attendance.end()
    assert not attendance.all_wait([1, 2]), "the first meeting is over: they go on"
    attendance.come(1, 2)
    attendance.come(2, math.inf)
    assert attendance.all_wait([1, 2])


def test_a_worker_is_awaited_while_the_server_is_at_a_meeting_to_which_it_has_not_come():
    """The picture of the module."""
    attendance = Attendance()
    attendance.held = 3
    for worker in (1, 2):
        attendance.come(worker, 3)
    assert [attendance.is_awaited(worker) for worker in (1, 2)] == [False, False], "the server is at none"
    attendance.begin()
    attendance.come(1, 4)
    assert [attendance.is_awaited(worker) for worker in (1, 2)] == [False, True]
    attendance.end()
    attendance.begin()
    assert [attendance.is_awaited(worker) for worker in (1, 2)] == [True, True], "the farewell waits for all"
