"""The report at the end of a run; no process needed."""

import signal

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.outcome import RankEnd, judge, report
from lockstep.runtime.control import StopReason
from lockstep.runtime.error_record import log_file, read_record, record_of, write_record
from lockstep.runtime.heartbeat import Beat, Membership


def beat(step=812, phase="forward"):
    return Beat(
        phase=phase,
        epoch=1,
        step=step,
        micro_batch=0,
        time=0.0,
        pid=1,
        membership=Membership.JOINED,
        samples=tuple(range(20)),
    )


def end(rank, code, **settings):
    return RankEnd(rank=rank, code=code, time=10.0 + rank, **{"pid": 100 + rank, "beat": beat(), **settings})


def failure(rank, error):
    try:
        raise error
    except Exception as caught:
        return end(rank, 4, record=record_of(caught, rank=rank, beat=beat()))


def lines(ends, logs, reason=StopReason.NONE):
    return report(judge(ends, reason), ends, reason, logs)


def test_a_good_run_says_nothing(tmp_path):
    assert lines([end(0, 0), end(1, 0)], tmp_path) == []


@pytest.mark.parametrize(("found", "place"), [(beat(812), " at step 812"), (beat(0), " at step 0"), (beat(-1), "")])
def test_a_rank_that_left_is_named_with_its_step(tmp_path, found, place):
    shown = lines([end(0, 143, ended_by_us=True), end(1, 0, beat=found)], tmp_path)
    assert shown[0] == f"rank 1 left{place} while the others continued (pid 101, exit code 0)."


def test_many_ranks_that_ended_alike_share_a_line(tmp_path):
    ends = [end(rank, 143, ended_by_us=True) for rank in range(64) if rank != 17]
    shown = lines([*ends, end(17, -signal.SIGKILL)], tmp_path)
    assert shown[0] == (
        "rank 17 killed by SIGKILL, step 812, forward, samples 0, 1, 2, 3, 4, 5, 6, 7 and 12 more (pid 117)"
    )
    assert shown[1] == "  ranks 0-16, 18-63: stopped after it"
    assert shown[2:] == [f"Logs: {tmp_path}"]


def test_ranks_that_waited_for_a_refused_one_name_it(tmp_path):
    refused = failure(1, ConfigError("The loss reads 'x'."))
    waiting = [failure(rank, RuntimeError("Connection closed by peer [::1]:9")) for rank in (0, 2)]
    shown = lines([waiting[0], refused, waiting[1]], tmp_path)
    assert shown[0] == "ConfigError: The loss reads 'x'."
    assert "  ranks 0, 2: disconnected by the ConfigError of rank 1" in shown


def test_samples_are_shown_but_not_all_of_them(tmp_path):
    shown = lines([failure(0, ValueError("no"))], tmp_path)
    assert "samples 0, 1, 2, 3, 4, 5, 6, 7 and 12 more" in shown[0]


@pytest.mark.fault("P14")
def test_a_device_without_memory_is_told_with_the_settings_that_need_less(tmp_path):
    # Torch.cuda's own is told by its name: no torch here
    kind = type("OutOfMemoryError", (RuntimeError,), {})
    shown = lines([failure(0, kind("CUDA out of memory. Tried to allocate 2.00 GiB."))], tmp_path)
    told = next(line for line in shown if "need less memory" in line)
    assert "micro_batches" in told
    assert "fsdp" in told
    assert shown.index(told) == len(shown) - 2


def test_a_rank_that_waited_too_long_is_told_that_the_cause_is_in_another(tmp_path):
    """The rank that had waited was blamed, with gloo's words."""
    shown = lines([failure(0, RuntimeError("[unbound_buffer.cc:129] Timed out waiting 2000ms for send"))], tmp_path)
    assert "It waited for another rank" in shown[-2] and "run.timeout" in shown[-2]


@pytest.mark.fault("T2")
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Resource temporarily unavailable"),  # of gloo
        RuntimeError("can't start new thread"),
        BlockingIOError(11, "Resource temporarily unavailable"),
    ],
)
def test_a_thread_that_cannot_be_started_is_told_with_the_limits(tmp_path, error):
    shown = lines([failure(0, error)], tmp_path)
    assert shown[-2].startswith("A limit on threads and processes is reached. Allow more (ulimit -u")


def test_a_limit_on_open_files_is_told(tmp_path):
    shown = lines([failure(0, RuntimeError("device.cc:186] rv != -1. -1 vs -1. Too many open files"))], tmp_path)
    assert shown[-2] == "A limit on open files is reached. Raise it (ulimit -n)."


def test_different_errors_keep_their_first_line(tmp_path):
    shown = lines([failure(0, ValueError("first")), failure(1, KeyError("second\nthird"))], tmp_path)
    assert "ValueError: first" in shown
    assert any(line == "  rank 1: KeyError: 'second\\nthird'" for line in shown)


def test_more_kinds_of_end_than_fit_are_counted(tmp_path):
    shown = lines([failure(rank, ValueError(f"number {rank}")) for rank in range(40)], tmp_path)
    assert len(shown) < 20
    assert shown[-2] == "  and 31 more kinds"


def test_a_crash_shows_where_it_happened_from_the_ranks_log(tmp_path):
    head = [f"step {number}" for number in range(100)]
    crash = [
        "Fatal Python error: Segmentation fault",
        "",
        "Current thread 0x1:",
        '  File "loss.py", line 3 in f',
    ]
    log_file(tmp_path, 1).write_text("\n".join([*head, *crash, *["Extension modules: a"] * 20]))
    shown = lines([end(1, -signal.SIGSEGV)], tmp_path)
    assert '  |   File "loss.py", line 3 in f' in shown
    assert "torch.tensor(p), x.new_tensor(p)" in shown[-2] and "run.state_dict()" in shown[-2]
    assert len(shown) <= 12


def test_a_record_survives_being_written_and_read(tmp_path):
    record = failure(3, ValueError("no")).record
    write_record(tmp_path, record)
    assert read_record(tmp_path, 3) == record
    assert read_record(tmp_path, 4) is None


def test_stopped_ranks_are_counted(tmp_path):
    stopped = [end(0, 75), end(1, 75)]
    assert lines(stopped, tmp_path, StopReason.PREEMPTED) == ["Preempted: 2 ranks stopped at step 812. Exit code 75."]
    forced = [end(0, 75), end(1, 143, ended_by_us=True)]
    (line,) = lines(forced, tmp_path, StopReason.PREEMPTED)
    assert line == (
        "Preempted at step 812: 1 rank of 2 did not stop when asked and had to be killed. Give more time with --grace, "
        "or run.grace in a job file. What came after the last checkpoint has to be done again."
    )


def test_ranks_that_ctrl_c_has_killed_are_not_said_to_need_another_grace(tmp_path):
    """After Ctrl-C --grace changes nothing; the message told to give more."""
    (line,) = lines([end(0, 130), end(1, 143, ended_by_us=True)], tmp_path, StopReason.INTERRUPTED)
    assert "Give more time" not in line
    assert "After Ctrl-C a step has 3 s to end, after SIGTERM or 'lockstep stop' the time of --grace" in line


def test_an_evaluation_that_outlasts_the_grace_is_named_with_the_remedy(tmp_path):
    forced = [end(rank, 143, ended_by_us=True, beat=beat(phase="evaluate")) for rank in (0, 1)]
    (line,) = lines(forced, tmp_path, StopReason.PREEMPTED)
    assert "An evaluation was going on, which run.evaluate(..., repeatable=True) would have left." in line


def test_ranks_that_had_not_started_are_not_said_to_have_been_killed(tmp_path):
    """Ctrl-C while the fork server imports torch."""
    early = [end(rank, -signal.SIGKILL, pid=0, beat=None, ended_by_us=True) for rank in (0, 1)]
    assert lines(early, tmp_path, StopReason.INTERRUPTED) == ["Interrupted before any rank had started. Exit code 130."]
