"""Ctrl-C, preemption and sudden deaths, with real signals: who stops when, and that nothing stays."""

import os
import signal
import time

import pytest

PREEMPTION = [
    signal.SIGTERM,
    signal.SIGUSR1,
    pytest.param(signal.SIGUSR2, marks=pytest.mark.slow),
    pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("careless", ["blocks all signals", "ignores SIGCHLD"])
def test_a_run_that_a_careless_program_has_started_ends_as_any_other(command, careless):
    """Both are inherited: the run waited forever for ranks that had ended, or a good one ended with exit status 1."""
    blocked = signal.valid_signals() if careless == "blocks all signals" else ()
    ignored = signal.SIG_IGN if careless == "ignores SIGCHLD" else signal.SIG_DFL
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    former = signal.signal(signal.SIGCHLD, ignored)
    try:
        command.loop(steps=2)
    finally:
        signal.signal(signal.SIGCHLD, former)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert command.end() == (0, [])
    command.wait_until_nothing_runs()


@pytest.mark.fault("P4")
def test_ctrl_c_stops_all_ranks_at_the_same_step(command):
    command.loop()
    command.wait_for_mark("running", 3)
    command.signal(signal.SIGINT)
    code, lines = command.end()
    assert command.seconds < 5
    assert code == 130
    steps = command.wait_for_mark("saved", 3)
    assert len(set(steps.values())) == 1
    assert lines == [f"Interrupted: 3 ranks stopped at step {steps[0]}. Exit code 130."]
    assert command.left_over() == []
    command.wait_until_nothing_runs()


def test_ctrl_c_ends_a_script_that_never_asks_for_the_stop_flag(command):
    script = command.folder / "endless.py"
    script.write_text(
        "import os, sys, time, pathlib\n"
        "try:\n"
        "    pathlib.Path(sys.argv[1], 'up-' + os.environ['RANK']).touch()\n"
        "    time.sleep(600)\n"
        "finally:\n    pathlib.Path(sys.argv[1], 'cleaned-' + os.environ['RANK']).touch()\n"
    )
    command.start(script, command.marks, devices="cpu:2")
    command.wait_for_mark("up", 2)
    command.signal(signal.SIGINT)
    code, lines = command.end()
    assert command.seconds < 5
    assert (code, len(lines)) == (130, 1)
    command.wait_for_mark("cleaned", 2)
    command.wait_until_nothing_runs()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
@pytest.mark.fault("P6")
def test_a_preemption_signal_to_every_process_of_the_run_saves_as_one_to_the_command(command, number):
    """As SLURM and systemd send it: the fork server and the ranks receive it too."""
    command.loop()
    command.wait_for_mark("running", 3)
    for process in command.processes():
        os.kill(process, number)
    code, lines = command.end()
    steps = command.wait_for_mark("saved", 3)
    assert len(set(steps.values())) == 1
    assert (code, lines) == (75, [f"Preempted: 3 ranks stopped at step {steps[0]}. Exit code 75."])


@pytest.mark.slow
def test_a_run_that_was_suspended_for_longer_than_its_stall_limit_continues(command):
    command.loop(options=("--stall-limit", "2"))
    command.wait_for_mark("running", 3)
    processes = [command.process.pid, *(each for each in command.processes() if each != command.process.pid)]
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    time.sleep(3)  # the suspension itself lasts this long
    for process in processes:
        os.kill(process, signal.SIGCONT)
    time.sleep(3)  # past the limit
    command.signal(signal.SIGTERM)
    code, lines = command.end()
    assert (code, len(lines)) == (75, 1), lines


@pytest.mark.slow
@pytest.mark.fault("P4")
def test_ctrl_c_waits_for_a_checkpoint_that_is_being_written(command):
    command.loop("-1:5:slow_save")
    command.wait_for_mark("running", 3)
    command.signal(signal.SIGINT)
    assert command.end()[0] == 130
    assert 5 <= command.seconds < 10
    command.wait_for_mark("saved", 3)


@pytest.mark.fault("P4")
def test_a_second_ctrl_c_ends_at_once(command):
    command.loop("-1:60:slow_save")
    command.wait_for_mark("running", 3)
    command.signal(signal.SIGINT)
    command.wait_for_phase("save")
    command.signal(signal.SIGINT)
    code, lines = command.end()
    assert command.seconds < 2
    assert (code, len(lines)) == (130, 1)
    command.wait_until_nothing_runs()


@pytest.mark.fault("P4")
def test_ctrl_c_while_torch_is_being_imported_ends_at_once(command):
    command.loop()
    command.wait_for_fork_server()
    command.signal(signal.SIGINT)
    code, lines = command.end()
    assert command.seconds < 2
    assert code == 130
    assert len(lines) <= 10
    command.wait_until_nothing_runs()


@pytest.mark.parametrize("number", PREEMPTION)
@pytest.mark.fault("P5", "P6", "M1")
def test_a_preemption_signal_to_the_launcher_saves_on_all_ranks(command, number):
    command.loop()
    command.wait_for_mark("running", 3)
    command.signal(number)
    code, _ = command.end()
    assert code == 75
    assert len(set(command.wait_for_mark("saved", 3).values())) == 1
    command.wait_until_nothing_runs()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR2, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
@pytest.mark.fault("P5", "P6", "M1")
def test_a_signal_to_any_one_rank_stops_all(command, number):
    command.loop()
    ranks = command.wait_for_mark("running", 3)
    os.kill(int(ranks[2]), number)
    code, _ = command.end()
    assert code == (130 if number == signal.SIGINT else 75)
    assert len(set(command.wait_for_mark("saved", 3).values())) == 1


@pytest.mark.slow
@pytest.mark.fault("P5")
def test_ranks_that_do_not_stop_are_ended_after_the_grace(command):
    command.loop("1:4:deaf", options=["--grace", "1"])
    command.wait_for_mark("deaf")
    command.signal(signal.SIGTERM)
    code, lines = command.end()
    assert code == 75
    assert 1 <= command.seconds < 6
    assert "did not stop when asked" in lines[0]
    command.wait_until_nothing_runs()


def test_a_run_that_finishes_in_spite_of_a_preemption_has_succeeded(command):
    script = command.folder / "short.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)\n")
    assert command.start(script, devices="cpu:2").end() == (0, [])


@pytest.mark.fault("P3")
def test_a_killed_launcher_leaves_no_process(command):
    command.loop()
    command.wait_for_mark("running", 3)
    assert len(command.processes()) == 5
    command.process.kill()
    command.process.wait()
    command.wait_until_nothing_runs(2.0)


@pytest.mark.fault("P3")
def test_a_killed_launcher_takes_hung_loader_workers_along(command):
    script = command.folder / "loader.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "from torch.utils.data import DataLoader\n"
        "class Stuck:\n"
        "    def __len__(self):\n        return 8\n"
        "    def __getitem__(self, index):\n"
        "        pathlib.Path(sys.argv[1], f'worker-{os.getpid()}').touch()\n"
        "        time.sleep(600)\n"
        "for _ in DataLoader(Stuck(), num_workers=2, multiprocessing_context='fork'):\n    pass\n"
    )
    command.start(script, command.marks, devices="cpu:2")
    command.wait_for_mark("worker", 4)
    command.process.kill()
    command.process.wait()
    command.wait_until_nothing_runs(2.0)


@pytest.mark.fault("M2")
def test_the_next_run_removes_the_folder_of_a_killed_one(command):
    command.loop()
    command.wait_for_mark("running", 3)
    command.process.kill()
    command.process.wait()
    command.wait_until_nothing_runs()
    (abandoned,) = (command.folder / "runtime").iterdir()
    assert command.loop(steps=2).end()[0] == 0
    assert not abandoned.exists()


def test_a_killed_fork_server_ends_the_run(command):
    command.loop()
    ranks = command.wait_for_mark("running", 3)
    os.kill(command.parent_of(int(ranks[0])), signal.SIGKILL)
    code, lines = command.end()
    assert code == 4
    assert lines == ["The process that forks the ranks was killed, and the ranks with it."]
    command.wait_until_nothing_runs()
