"""The rank to blame, decided from how the ranks ended; no process needed."""

import signal
from dataclasses import replace

import pytest

from lockstep.launch.outcome import RankEnd, judge
from lockstep.runtime.control import StopReason
from lockstep.runtime.error_record import ErrorRecord
from lockstep.runtime.heartbeat import Beat, Membership

NONE, INTERRUPTED, PREEMPTED = StopReason.NONE, StopReason.INTERRUPTED, StopReason.PREEMPTED


def beat(membership=Membership.JOINED):
    return Beat(phase="reduce", epoch=0, step=7, micro_batch=0, time=0.0, pid=1, membership=membership, samples=())


def record(rank, time, message="no", exit_code=4, on_purpose=False):
    return ErrorRecord(
        rank=rank,
        host="h",
        pid=1,
        phase="reduce",
        epoch=0,
        step=7,
        samples=(),
        kind="RuntimeError",
        message=message,
        on_purpose=on_purpose,
        traceback="",
        shown="",
        time=time,
        exit_code=exit_code,
    )


def end(rank, code, time=10.0, **settings):
    return RankEnd(rank=rank, pid=1, code=code, time=time, **{"beat": beat(), **settings})


def failed(rank, time, message="no", exit_code=4):
    return end(rank, exit_code, time + 1, record=record(rank, time, message, exit_code))


def victim(rank, time):
    return failed(rank, time, "[tcp] Connection closed by peer [127.0.0.1]:9")


def spare(rank, code=-signal.SIGKILL):
    return end(rank, code, beat=beat(Membership.INDEPENDENT))


def test_a_killed_rank_that_the_others_go_on_without_is_no_failure():
    verdict = judge([finished(0), spare(1), finished(2)], NONE)
    assert (verdict.code, verdict.cause) == (0, None)


def test_where_a_spare_rank_was_killed_another_failure_is_still_one():
    verdict = judge([failed(0, time=20.0), spare(1), finished(2)], NONE)
    assert (verdict.code, verdict.cause.rank) == (4, 0)


def test_a_spare_rank_that_raised_has_failed():
    raised = replace(failed(1, time=5.0), beat=beat(Membership.INDEPENDENT))
    assert judge([finished(0), raised], NONE).cause.rank == 1


def finished(rank):
    return end(rank, 0, beat=beat(Membership.FINISHED))


def test_all_good_is_zero():
    assert judge([finished(0), finished(1)], NONE).code == 0


def test_the_earliest_exception_is_the_cause_whoever_exits_first():
    verdict = judge([failed(0, 5.0), failed(1, 4.0), end(2, 143, ended_by_us=True)], NONE)
    assert (verdict.cause.rank, verdict.code) == (1, 4)


def test_a_killed_rank_is_the_cause_even_if_its_victims_are_heard_of_earlier():
    verdict = judge([victim(0, 4.9), victim(1, 4.9), end(2, -signal.SIGKILL, 5.0)], NONE)
    assert (verdict.cause.rank, verdict.code) == (2, 4)


def test_the_code_is_that_of_the_error():
    assert judge([failed(0, 5.0, exit_code=3), victim(1, 5.1)], NONE).code == 3
    assert judge([end(0, 2), end(1, 2)], NONE).code == 2
    assert judge([end(0, 7), finished(1)], NONE).code == 4


def test_a_rank_that_left_is_the_cause_of_its_victims():
    verdict = judge([victim(0, 6.0), end(1, 0, 5.0)], NONE)
    assert verdict.left_early
    assert verdict.cause.rank == 1


def test_a_rank_that_finished_in_agreement_is_not_blamed():
    verdict = judge([finished(0), victim(1, 6.0)], NONE)
    assert (verdict.cause.rank, verdict.left_early) == (1, False)


@pytest.mark.parametrize("membership", Membership)
def test_only_members_that_have_joined_and_not_finished_are_in_the_group(membership):
    is_in = membership in (Membership.JOINED, Membership.LEAVING)
    assert end(1, 0, beat=beat(membership)).was_in_group == is_in
    assert not end(1, 0, beat=None).was_in_group


def test_a_rank_ended_while_it_waited_to_leave_had_left_early():
    waiting = end(1, 143, ended_by_us=True, beat=beat(Membership.LEAVING))
    assert judge([end(0, 143, ended_by_us=True), waiting], NONE).cause is waiting


def test_ranks_that_stop_when_asked_end_the_run_with_the_reason():
    assert judge([end(0, 75), end(1, 75)], PREEMPTED).code == 75
    assert judge([end(0, 130), end(1, 130)], INTERRUPTED).code == 130
    assert judge([end(0, 143, ended_by_us=True), end(1, 75)], PREEMPTED).code == 75


def test_a_run_that_finished_before_it_was_preempted_has_succeeded():
    assert judge([finished(0), finished(1)], PREEMPTED).code == 0
    assert judge([finished(0), finished(1)], INTERRUPTED).code == 130


def test_a_failure_while_stopping_is_not_hidden():
    verdict = judge([failed(0, 5.0, "no space left", 3), end(1, 143, ended_by_us=True)], PREEMPTED)
    assert verdict.cause.rank == 0


def test_a_failure_after_others_have_stopped_is_not_the_cause():
    assert judge([end(0, 75, 5.0), failed(1, 6.0)], PREEMPTED).cause is None


def test_stopping_unasked_is_a_failure():
    assert judge([end(0, 75), finished(1)], NONE).code == 4


def test_a_consequence_is_never_one_of_our_own_errors():
    assert victim(0, 1.0).is_consequence
    assert not replace(victim(0, 1.0), record=record(0, 1.0, "Broken pipe", on_purpose=True)).is_consequence


def test_a_rank_that_waited_to_leave_is_the_cause_although_it_lost_the_others_first():
    """On several hosts those that it left are ended by another supervisor, and it sees their connections close."""
    lost = record(2, 3.0, "Connection closed by peer [10.0.0.1]:1")
    leaver = end(2, code=4, time=3.0, record=lost, beat=beat(Membership.LEAVING))
    verdict = judge([end(0, code=-9, ended_by_us=True), end(1, code=-9, ended_by_us=True), leaver], NONE)
    assert (verdict.code, verdict.cause, verdict.left_early) == (4, leaver, True)


def test_ranks_that_all_waited_to_leave_when_the_network_broke_did_not_leave_early():
    ends = [
        end(rank, code=4, record=record(rank, 3.0, "Connection reset by peer"), beat=beat(Membership.LEAVING))
        for rank in range(2)
    ]
    assert not judge(ends, NONE).left_early
