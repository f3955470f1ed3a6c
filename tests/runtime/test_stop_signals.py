"""Signals to a process of its own: each test is one."""

import signal
import subprocess
import sys

import pytest

from lockstep.runtime.stop_signals import stop_signals_held

PROGRAM = """
import os, signal, sys
from lockstep.runtime import stop_signals
from lockstep.runtime.control import Control
control = Control()
stop_signals.install(control, alone={alone})
os.kill(os.getpid(), {first})
print(control.reason.name, flush=True)
{then}
"""


def run(first, then="", alone=False):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first=int(first), then=then, alone=alone)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGINT, "INTERRUPTED"),
        (signal.SIGTERM, "PREEMPTED"),
        (signal.SIGUSR1, "PREEMPTED"),
        (signal.SIGUSR2, "PREEMPTED"),
        (signal.SIGHUP, "PREEMPTED"),
    ],
)
def test_each_signal_becomes_a_reason_and_ends_nothing(number, reason):
    done = run(number)
    assert (done.returncode, done.stdout) == (0, f"{reason}\n")


def test_sigterm_from_a_supervisor_that_ends_the_run_unwinds_the_rank():
    done = run(
        signal.SIGTERM,
        "control.ending = True\ntry:\n    os.kill(os.getpid(), signal.SIGTERM)\nfinally:\n    print('closed')",
    )
    assert (done.returncode, done.stdout) == (143, "PREEMPTED\nclosed\n")


def test_sigterm_in_a_destructor_unwinds_the_rank_afterwards_and_prints_nothing():
    """Python printed "Exception ignored in ...", and the rank went on until it was killed."""
    done = run(
        signal.SIGTERM,
        "class Work:\n    def __del__(self):\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "control.ending = True\ntry:\n    Work()\n    signal.pause()\nfinally:\n    print('closed')",
    )
    assert (done.returncode, done.stdout, done.stderr) == (143, "PREEMPTED\nclosed\n", "")


@pytest.mark.parametrize(("second", "code"), [("SIGTERM", 143), ("SIGINT", -signal.SIGINT)])
def test_without_a_supervisor_the_second_signal_ends_the_process(second, code):
    assert run(signal.SIGTERM, f"os.kill(os.getpid(), signal.{second})", alone=True).returncode == code


def test_a_forked_child_answers_to_signals_as_before():
    done = run(
        signal.SIGUSR1,
        "child = os.fork()\n"
        "if child == 0:\n    signal.pause()\n"
        "os.kill(child, signal.SIGTERM)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))",
    )
    assert done.stdout == "PREEMPTED\n-15\n"


def test_an_ignored_signal_stays_ignored():
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + PROGRAM
    done = subprocess.run(
        [sys.executable, "-c", program.format(first=int(signal.SIGHUP), then="", alone=False)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stdout == "NONE\n"


def test_stop_signals_are_blocked_within_the_block_only():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with stop_signals_held():
        assert {signal.SIGTERM, signal.SIGINT} <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
