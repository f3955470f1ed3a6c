"""Runs whose terminal, disk or descriptors are gone, and the processes that their ranks have started."""

import os
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from tests.launch.command import COMMAND, wait_until


def run_in_shell(command, script, redirections, *, devices="cpu:1"):
    """The exit code of ``lockstep run SCRIPT`` with these redirections."""
    places = {"TMPDIR": str(command.folder / "tmp"), "XDG_RUNTIME_DIR": str(command.folder / "runtime")}
    for place in places.values():
        Path(place).mkdir()
    words = [*COMMAND, "--devices", devices, script]
    shell = f'exec "$@" {redirections}'
    return subprocess.run(["bash", "-c", shell, "bash", *map(str, words)], env={**os.environ, **places}).returncode


@pytest.mark.fault("T1")
def test_a_run_whose_output_is_closed_ends_well_and_its_output_is_in_the_log_folder(command):
    """As ``lockstep run ... | true``."""
    script = command.folder / "talks.py"
    script.write_text("import sys\nfor n in range(100):\n    print('line', n)\nprint('done', file=sys.stderr)\n")
    assert run_in_shell(command, script, "&> >(true)") == 0
    (kept,) = (command.folder / "tmp").glob("lockstep-logs-*/terminal.log")
    assert kept.read_text().endswith("line 98\nline 99\ndone\n")


@pytest.mark.slow
@pytest.mark.fault("T1")
def test_a_failure_with_both_outputs_closed_is_told_in_the_log_folder(command):
    script = command.folder / "fails.py"
    script.write_text("print('so far')\nraise ValueError('the reason')\n")
    assert run_in_shell(command, script, ">&- 2>&-") == 4
    (kept,) = (command.folder / "tmp").glob("lockstep-logs-*/report.txt")
    assert "rank 0 failed first" in kept.read_text()
    assert "ValueError: the reason" in kept.read_text()


@pytest.mark.fault("T2")
def test_a_failure_without_a_disk_and_without_descriptors_is_told(command):
    script = command.folder / "poor.py"
    script.write_text(
        "import resource, shutil, sys\n"
        "from lockstep.errors import DataError\n"
        "shutil.rmtree(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "raise DataError('photo 12 is torn')\n"
    )
    logs = command.folder / "logs"
    code, lines = command.start(script, logs, devices="cpu:1", options=["--logs", logs]).end()
    assert code == 3, lines
    assert lines[0] == "DataError: photo 12 is torn"
    assert "could not be written" in lines[1]


@pytest.mark.slow
@pytest.mark.fault("T2")
def test_a_killed_rank_is_named_by_a_launcher_without_descriptors(command):
    command.loop()
    ranks = command.wait_for_mark("running", 3)
    resource.prlimit(command.process.pid, resource.RLIMIT_NOFILE, (3, 3))
    os.kill(int(ranks[1]), signal.SIGKILL)
    code, lines = command.end()
    assert code == 4, lines
    assert lines[0].startswith("rank 1 killed by SIGKILL")
    command.wait_until_nothing_runs()


@pytest.mark.slow
@pytest.mark.fault("T6")
def test_a_run_goes_on_where_its_files_are_overwritten_and_removed(command):
    """User code that writes past its memory may do the one; a cleaner of temporary folders does the other."""
    command.loop()
    ranks = command.wait_for_mark("running", 3)
    directory = next((command.folder / "runtime").iterdir())
    for path in (path for path in directory.iterdir() if path.stat().st_size > 100):
        with path.open("r+b") as file:
            file.write(b"\xfe" * 3)
    shutil.rmtree(directory)
    os.kill(int(ranks[1]), signal.SIGKILL)
    code, lines = command.end()
    assert code == 4, lines
    assert lines[0].startswith("rank 1 killed by SIGKILL")
    command.wait_until_nothing_runs()


STARTS = """
import os, pathlib, subprocess, sys, time
if os.environ["RANK"] == "1":
    for number, (bare, alone) in enumerate([(False, False), (True, False), (False, True)]):
        child = subprocess.Popen(["sleep", "600"], env={} if bare else None, start_new_session=alone)
        pathlib.Path(sys.argv[1], f"child-{number}.new").write_text(str(child.pid))
        pathlib.Path(sys.argv[1], f"child-{number}.new").rename(pathlib.Path(sys.argv[1], f"child-{number}"))
time.sleep(600)
"""


@pytest.mark.fault("P3")
@pytest.mark.parametrize(
    "who", ["launcher", *(pytest.param(each, marks=pytest.mark.slow) for each in ("fork server", "stopped"))]
)
def test_what_ranks_have_started_ends_with_a_killed_launcher_or_fork_server(command, who):
    script = command.folder / "starts.py"
    script.write_text(STARTS)
    command.start(script, command.marks, devices="cpu:2")
    children = [int(pid) for pid in command.wait_for_mark("child", 3).values()]
    server = command.parent_of(command.parent_of(children[0]))
    assert all(map(runs, children))
    if who == "stopped":
        os.kill(server, signal.SIGSTOP)
    os.kill(server if who == "fork server" else command.process.pid, signal.SIGKILL)
    command.process.wait(10)
    wait_until(lambda: not any(map(runs, children)), 2.0, "children to end")
    command.wait_until_nothing_runs(2.0)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_three_ctrl_c_end_a_run_whose_fork_server_is_stopped(command):
    command.loop()
    ranks = command.wait_for_mark("running", 3)
    os.kill(command.parent_of(int(ranks[0])), signal.SIGSTOP)
    for rank in ranks.values():
        os.kill(int(rank), signal.SIGSTOP)
    for _ in range(3):
        command.signal(signal.SIGINT)
        wait_until(lambda: not has_pending(command.process.pid), 5, "the signal to be taken")
    code, _ = command.end(10)
    assert code == 130
    command.wait_until_nothing_runs()


@pytest.mark.slow
@pytest.mark.fault("P12")
def test_a_stopped_fork_server_whose_ranks_have_ended_is_not_waited_for(command):
    command.loop(steps=1500, options=("--stall-limit", "1"))
    ranks = command.wait_for_mark("running", 3)
    server = command.parent_of(int(ranks[0]))
    os.kill(server, signal.SIGSTOP)
    code, lines = command.end()
    assert code == 4
    told = f"lockstep: all ranks have ended, and their parent process (pid {server}) is stopped by a signal."
    assert lines[0] == told
    command.wait_until_nothing_runs()


def has_pending(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return any(int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd")))


@pytest.mark.fault("P6")
def test_a_stop_signal_to_the_fork_server_alone_stops_the_run_with_a_checkpoint(command):
    command.loop()
    ranks = command.wait_for_mark("running", 3)
    os.kill(command.parent_of(int(ranks[0])), signal.SIGTERM)
    code, lines = command.end()
    steps = command.wait_for_mark("saved", 3)
    assert len(set(steps.values())) == 1
    assert (code, lines) == (75, [f"Preempted: 3 ranks stopped at step {steps[0]}. Exit code 75."])
