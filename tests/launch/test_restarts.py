"""When a run is started again, decided from how the attempt before ended; no process needed."""

import os
import signal

import pytest
from tests.launch.test_outcome import end, failed, finished, record, victim

from lockstep.errors import ConfigError
from lockstep.launch.options import Devices, LaunchOptions, parse_devices
from lockstep.launch.outcome import LostRanks, WorldOutcome, judge
from lockstep.launch.restarts import find_lost_ranks, with_restarts
from lockstep.runtime.control import StopReason

LINES = ("rank 1 killed by SIGKILL, step 7, reduce (pid 9)", "Logs: somewhere")


def ended(lost, is_reported=False):
    return WorldOutcome(code=4, lines=LINES, lost=lost, is_reported=is_reported)


def loss(*ends):
    return find_lost_ranks(judge(ends, StopReason.NONE), ends)


def raised(rank, kind, message="no", on_purpose=False):
    fields = vars(record(rank, 1.0, message, on_purpose=on_purpose)) | {"kind": kind}
    return end(rank, 4, record=type(record(0, 0.0))(**fields))


def attempts(steps, options, capsys, ranks=(1,)):
    """Losses at these steps, then a good end: the options of each attempt, the last one's end, what was said."""
    made, ends = [], [ended(LostRanks(ranks=ranks, step=step)) for step in steps] + [ended(None)]

    def attempt(options):
        made.append(options)
        return ends[len(made) - 1]

    last = with_restarts(attempt, options)
    return made, last, capsys.readouterr().err.splitlines()


def options(count=4, **settings):
    return LaunchOptions(devices=parse_devices(f"cpu:{count}"), **settings)


def test_a_killed_rank_is_a_loss_and_its_victims_are_not():
    found = loss(finished(0), end(1, -signal.SIGKILL), victim(2, 9.0), end(3, -15, ended_by_us=True))
    assert found == LostRanks(ranks=(1,), step=7)


@pytest.mark.parametrize(
    "ending",
    [
        failed(1, 1.0),
        end(1, 7),
        raised(1, "FileNotFoundError"),
        raised(1, "NonFiniteError", on_purpose=True),
        raised(1, "AcceleratorError", "CUDA error: device-side assert triggered"),
        raised(1, "OutOfMemoryError", "CUDA out of memory."),
    ],
    ids=["exception", "exit code", "missing file", "NaN", "device-side assert", "GPU memory"],
)
def test_what_would_come_again_is_no_loss(ending):
    assert loss(victim(0, 9.0), ending) is None


@pytest.mark.parametrize(
    "ending",
    [
        end(1, -signal.SIGSEGV),
        raised(1, "RankError", "a data loader worker (pid 5) was killed by SIGKILL.", on_purpose=True),
        raised(1, "AcceleratorError", "CUDA error: uncorrectable ECC error encountered"),
        raised(1, "ConnectionResetError"),
    ],
    ids=["crash", "loader worker", "GPU", "network"],
)
def test_what_may_pass_is_a_loss(ending):
    assert loss(victim(0, 9.0), ending) == LostRanks(ranks=(1,), step=7)


def test_a_connection_that_all_ranks_lost_is_a_loss_of_nobody_else():
    assert loss(victim(0, 9.0), victim(1, 8.0)) == LostRanks(ranks=(1,), step=7)


def test_a_rank_that_left_early_is_not_lost():
    assert loss(end(0, 0), end(1, -15, ended_by_us=True)) is None


def test_each_restart_is_said_in_two_lines_and_keeps_the_run_id(capsys):
    made, last, lines = attempts([3, 9], options(restarts=2, log_directory="logs"), capsys)
    assert last == ended(None)
    assert [each.restart for each in made] == [0, 1, 2]
    assert len({each.run_id for each in made}) == 1
    assert made[0].run_id
    assert [each.log_directory for each in made] == ["logs", "logs/restart-1", "logs/restart-2"]
    assert lines == [
        "rank 1 killed by SIGKILL, step 7, reduce (pid 9). Logs: somewhere",
        "Restart 1 of 2: the same 4 ranks, from the last checkpoint if there is one.",
        "rank 1 killed by SIGKILL, step 7, reduce (pid 9). Logs: somewhere",
        "Restart 2 of 2: the same 4 ranks, from the last checkpoint if there is one.",
    ]


def test_a_host_whose_restart_another_one_reports_says_nothing(capsys):
    outcomes = iter([ended(LostRanks(ranks=(1,), step=3), is_reported=True), ended(None)])
    with_restarts(lambda options: next(outcomes), options(restarts=2))
    assert capsys.readouterr().err == ""


def test_without_restarts_nothing_is_started_again_and_nothing_said(capsys):
    made, last, lines = attempts([3], options(), capsys)
    assert (len(made), last.lines, lines) == (1, LINES, [])
    assert last.lost is not None


def test_a_run_is_restarted_so_often_and_no_oftener(capsys):
    made, last, _ = attempts([1, 2, 3, 4], options(restarts=2), capsys)
    assert len(made) == 3
    assert last.lines == (*LINES, "Not restarted: all 2 restarts are used up.")


@pytest.mark.parametrize(("first", "second"), [(5, 5), (5, 4), (5, -1), (0, 0)])
def test_a_restart_that_came_no_further_is_the_last(first, second, capsys):
    made, last, _ = attempts([first, second], options(restarts=9), capsys)
    assert len(made) == 2
    assert last.lines == (
        *LINES,
        f"Not restarted: restart 1 got no further than step {first}, so another would not either.",
    )


def test_a_run_without_any_step_is_restarted_once(capsys):
    made, last, _ = attempts([-1, -1], options(restarts=9), capsys)
    assert len(made) == 2
    assert last.lines == (*LINES, "Not restarted: restart 1 got no further, so another would not either.")


def test_the_world_that_is_left_has_the_other_devices(capsys):
    gpus = Devices(kind="cuda", names=("0", "2", "5"))
    wanted = LaunchOptions(devices=gpus, restarts=2, restart_world="remaining")
    made, _, lines = attempts([1, 2], wanted, capsys)
    assert [each.devices.names for each in made] == [("0", "2", "5"), ("0", "5"), ("0",)]
    assert lines[1::2] == [
        "Restart 1 of 2: 2 ranks of 3, from the last checkpoint if there is one.",
        "Restart 2 of 2: 1 rank of 3, from the last checkpoint if there is one.",
    ]


def test_ranks_of_several_devices_lose_them_together(capsys):
    gpus = Devices(kind="cuda", names=("0", "1", "2", "3"), per_rank=2)
    made, _, _ = attempts([1], LaunchOptions(devices=gpus, restarts=1, restart_world="remaining"), capsys)
    assert made[1].devices.names == ("0", "1")


def test_the_world_that_is_left_is_one_that_the_job_fits_on(capsys):
    even = options(4, restarts=1, restart_world="remaining", fits=lambda ranks: ranks % 2 == 0)
    made, _, _ = attempts([1], even, capsys)
    assert made[1].devices.count == 2


def test_where_none_that_is_left_fits_the_same_world_starts_again(capsys):
    made, _, _ = attempts([1], options(1, restarts=1, restart_world="remaining"), capsys)
    assert made[1].devices.count == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_between_two_attempts_is_heeded(number, code, capsys):
    def attempt(options):
        os.kill(os.getpid(), number)
        return ended(LostRanks(ranks=(1,), step=3))

    last = with_restarts(attempt, options(restarts=5))
    assert last.code == code
    assert last.lines == (*LINES, "Not restarted: asked to stop.")
    assert capsys.readouterr().err == ""


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="restarts should be at least 0 and is -1"):
        options(restarts=-1)
    with pytest.raises(ConfigError, match=r"'rest' is not known.*remaining, same"):
        options(restart_world="rest")


def test_the_former_name_of_the_remaining_devices_is_an_alias():
    assert options(restart_world="left") == options(restart_world="remaining")
