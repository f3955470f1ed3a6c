"""A rank fails, real processes and signals: what the user sees, and that nothing stays."""

import json
import os
import re
import signal

import pytest


def logs_of(command):
    (folder,) = [path for path in (command.folder / "tmp").iterdir() if path.name.startswith("lockstep-logs-")]
    return folder


def test_a_run_that_ends_well_leaves_nothing(command):
    code, lines = command.loop(steps=5).end()
    assert (code, lines, command.stdout) == (0, [], "rank 0 done\n")
    assert command.left_over() == []
    command.wait_until_nothing_runs()


@pytest.mark.fault("P8")
def test_a_failing_rank_is_shown_whole_and_the_others_in_one_line(command):
    code, lines = command.loop("1:6:exception").end()
    assert code == 4
    assert lines[0].startswith("rank 1 failed first, step 6, forward, samples 61 (host ")
    assert lines[1] == "Traceback (most recent call last):"
    assert "ValueError: the loss does not like this batch" in lines
    assert not any("lockstep/launch" in line for line in lines), "the launcher's own frames are not news"
    assert sum(line.startswith("  rank") for line in lines) <= 2
    assert len(lines) <= 20
    assert command.seconds < 10
    command.wait_until_nothing_runs()


def test_the_record_in_the_log_folder_says_who_where_and_why(command):
    command.loop("2:4:exception").end()
    record = json.loads((logs_of(command) / "rank-002.error.json").read_text())
    assert (record["rank"], record["phase"], record["epoch"], record["step"]) == (2, "forward", 0, 4)
    assert (record["samples"], record["kind"]) == ([42], "ValueError")
    assert "loop.run()" in record["traceback"]
    assert "the loss does not like this batch" in (logs_of(command) / "rank-002.log").read_text()


@pytest.mark.fault("P1")
def test_a_killed_rank_is_named_with_its_step_and_phase(command):
    code, lines = command.loop("2:8:killed").end()
    assert code == 4
    assert lines[0].startswith("rank 2 killed by SIGKILL, step 8, forward, samples 82 ")
    assert len(lines) <= 15
    command.wait_until_nothing_runs()


@pytest.mark.fault("P1", "N3")
def test_a_rank_killed_from_outside_ends_all_within_five_seconds(command):
    command.loop()
    victim = int(command.wait_for_mark("running", 3)[1])
    command.start_clock()
    os.kill(victim, signal.SIGKILL)
    code, lines = command.end()
    assert command.seconds < 5
    assert code == 4
    assert lines[0].startswith("rank 1 killed by SIGKILL, step ")


@pytest.mark.slow
def test_a_crash_in_native_code_shows_the_ranks_last_output(command):
    code, lines = command.loop("1:5:segfault").end()
    assert code == 4
    assert lines[0].startswith("rank 1 killed by SIGSEGV, step 5, forward, samples 51 ")
    assert any("faulty_loop.py" in line for line in lines), "faulthandler names the line"


@pytest.mark.slow
def test_an_error_of_ours_is_shown_as_a_sentence_and_keeps_its_exit_code(command):
    code, lines = command.loop("1:5:data_error").end()
    assert code == 3
    assert lines[0] == "DataError: photos/rose/12.jpg is cut off. Remove it or fetch it again."
    assert re.match(r"Raised on rank 1, step 5, forward, samples 51 \(faulty_loop\.py:\d+\)\. Traceback: ", lines[1])
    assert not any(line.startswith("Traceback") for line in lines)


def test_an_error_that_all_ranks_raise_is_shown_once(command):
    code, lines = command.loop("all:5:data_error").end()
    assert code == 3
    assert sum("is cut off" in line for line in lines) == 1
    assert any(line.endswith(": the same error") for line in lines)


@pytest.mark.parametrize("way", [pytest.param("exit_zero", marks=pytest.mark.slow), "leave_loop"])
@pytest.mark.fault("P15")
def test_a_rank_that_leaves_early_is_named(command, way):
    code, lines = command.loop(f"1:2:{way}").end()
    assert code == 4
    assert lines[0].startswith("rank 1 left at step 2 while the others continued")
    command.wait_until_nothing_runs()


AT_THE_END = """\
import torch
import lockstep

run = lockstep.init(global_batch=6, micro_batches=3)
model = run.prepare(torch.nn.Linear(3, 2))
data = torch.utils.data.TensorDataset(torch.ones(12, 3), torch.zeros(12).long())
if run.is_main:
    run.evaluate(data, torch.nn.functional.cross_entropy)
"""


@pytest.mark.slow
def test_a_rank_that_waits_for_those_that_have_come_to_the_end_is_not_left_waiting(command):
    """It waited in run.evaluate until the timeout of 600 s: an evaluation may take long, and nobody looked."""
    (command.folder / "script.py").write_text(AT_THE_END)
    code, lines = command.start(command.folder / "script.py").end()
    assert code == 4
    assert "left while the others continued" in lines[0]
    assert "some ranks only" in lines[1]
    assert command.seconds < 30
    command.wait_until_nothing_runs()


def test_an_exit_status_of_a_script_ends_the_run(command):
    code, lines = command.loop("0:5:exit_seven").end()
    assert code == 4
    assert lines[0].startswith("rank 0 ended with exit code 7, step 5, forward, samples 50 ")
    assert lines[-1] == f"Logs: {logs_of(command)}"


@pytest.mark.fault("P2")
def test_a_rank_killed_while_the_others_wait_for_data_is_noticed(command):
    script = command.folder / "waiting.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "pathlib.Path(sys.argv[1], f'up-{os.environ[\"RANK\"]}-{os.getpid()}').touch()\n"
        "time.sleep(600)\n"
    )
    command.start(script, command.marks)
    (victim,) = [pid for pid in command.wait_for_mark("up", 3) if (command.marks / f"up-2-{pid}").exists()]
    command.start_clock()
    os.kill(victim, signal.SIGKILL)
    code, lines = command.end()
    assert command.seconds < 5
    assert (code, lines[0]) == (4, f"rank 2 killed by SIGKILL, start (pid {victim})")
    command.wait_until_nothing_runs()


@pytest.mark.slow
def test_a_worker_that_a_rank_terminates_stops_nothing(command):
    script = command.folder / "pool.py"
    script.write_text(
        "import multiprocessing, os, signal, sys, time\n"
        "worker = multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,))\n"
        "worker.start()\nworker.terminate()\nworker.join()\n"
        "print(worker.exitcode == -signal.SIGTERM)\n"
    )
    assert command.start(script, devices="cpu:2").end() == (0, [])
    assert command.stdout == "True\n"


@pytest.mark.slow
@pytest.mark.fault("P9")
def test_a_rank_that_ignores_sigterm_is_ended_within_five_seconds(command):
    command.loop("2:4:deaf")
    command.wait_for_mark("deaf")
    other = int(command.wait_for_mark("running", 2)[0])
    command.start_clock()
    os.kill(other, signal.SIGKILL)
    code, lines = command.end()
    assert command.seconds < 5
    assert code == 4
    assert lines[0].startswith("rank 0 killed by SIGKILL")
    command.wait_until_nothing_runs()


def test_a_missing_script_is_a_sentence_and_exit_code_two(command):
    code, lines = command.start("absent.py").end()
    assert code == 2
    assert len(lines) == 1
    assert "absent.py" in lines[0]


@pytest.mark.slow
def test_a_rank_that_works_on_its_own_after_the_last_step_is_waited_for(command):
    code, lines = command.loop("1:3:late", steps=4).end()
    assert (code, lines) == (0, [])
    assert command.stdout == "rank 0 done\n"
