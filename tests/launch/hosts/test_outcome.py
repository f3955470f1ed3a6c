"""The outcome of a run on several hosts, from what all hosts say; no process needed."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tests.launch.hosts.test_outcome_messages import BEAT, END, RECORD

from lockstep.config.checks import from_plain
from lockstep.launch.hosts.outcome import RunOutcome, decide_outcome
from lockstep.runtime.control import StopReason

NONE, INTERRUPTED, PREEMPTED = StopReason.NONE, StopReason.INTERRUPTED, StopReason.PREEMPTED
LOST = {1: "host 1 (fb) has sent nothing for 13 s"}


def end(rank, code=0, **settings):
    return replace(END, rank=rank, code=code, record=None, **settings)


def victim(rank):
    record = replace(RECORD, rank=rank, message="Connection closed by peer [10.0.0.2]", time=60.0)
    return replace(END, rank=rank, record=record)


def ended(ends, reason=NONE, **said):
    return decide_outcome(ends, reason, **{"lost": {}, "logs": Path("logs"), **said})


def test_a_run_that_ended_well_says_nothing():
    assert ended([end(0), end(1)]) == RunOutcome(code=0)


def test_the_rank_that_failed_first_is_the_cause_wherever_it_ran():
    own = replace(END, rank=3, host="fb", logs="/logs/fb")
    found = ended([victim(0), own])
    assert found.code == 4
    assert found.lines[0] == "rank 3 failed first, step 7, reduce, samples 4, 5 (host fb, pid 12):"
    assert found.lines[-1] == "Logs: /logs/fb on fb"
    assert found.lost_at is None  # it would fail again


def test_a_lost_host_is_the_cause_of_what_its_loss_did_to_others():
    found = ended([victim(0), end(1, -15, ended_by_us=True)], lost=LOST)
    assert found == RunOutcome(
        code=4,
        lines=(f"{LOST[1]}.", "The 2 ranks of the other hosts ended after it."),
        lost=(1,),
        lost_at=7,
    )


def test_an_error_of_a_rank_is_the_cause_although_a_host_was_lost_after_it():
    found = ended([replace(END, rank=0), victim(1)], lost=LOST)
    assert found.lines[0].startswith("rank 0 failed first")
    assert found.lines[-1] == f"{LOST[1]}."
    assert (found.lost, found.lost_at) == ((1,), None)


def test_without_node_0_nobody_goes_on():
    found = ended([victim(1)], lost={0: "host 0 (fa) has closed the connection"})
    assert (found.code, found.lost, found.lost_at) == (4, (0,), None)


@pytest.mark.parametrize("reason", [INTERRUPTED, PREEMPTED])
def test_a_stop_that_was_asked_for_stays_one_although_a_host_went_meanwhile(reason):
    found = ended([end(0, int(reason))], reason, lost=LOST)
    assert found.code == int(reason)
    assert found.lines[0] == f"{LOST[1]}."
    assert found.lost_at is None


def test_a_killed_rank_is_a_loss_after_which_the_run_may_go_on():
    assert ended([victim(0), end(1, -9)]).lost_at == 7


def test_a_host_that_could_start_no_rank_is_the_cause():
    found = ended([victim(0)], faults=[(2, ("No rank was started, because importing torch failed:", "..."))])
    assert (found.code, found.lost_at) == (2, None)
    assert found.lines[0].startswith("No rank was started")


def test_a_stall_is_reported_as_one():
    found = ended([end(0, -15, ended_by_us=True)], stall=["Stalled, ..."])
    assert (found.code, found.lines) == (5, ("Stalled, ...",))


def test_every_host_reads_the_end_as_node_0_wrote_it():
    final = RunOutcome(code=4, lines=("one", "two"), lost=(1, 3), lost_at=BEAT.step)
    assert from_plain(RunOutcome, json.loads(json.dumps(asdict(final)))) == final
    assert final.has_failed
    assert not RunOutcome(code=75).has_failed
