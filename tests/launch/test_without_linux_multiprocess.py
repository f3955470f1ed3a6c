"""Runs start, train and end without the system calls that only Linux has."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch.command import wait_until

FOLDER = Path(__file__).parent / "without_linux"
SCRIPT = """
import torch
import lockstep

run = lockstep.init(global_batch=12, micro_batches=6, seed=1)
model, optimizer = run.prepare(model := torch.nn.Linear(3, 3), torch.optim.SGD(model.parameters(), lr=0.5))
data = torch.utils.data.TensorDataset(torch.rand(48, 3), torch.arange(48) % 3)
for epoch in run.epochs({epochs}):
    for batch in run.batches(data):
        run.backward(batch, torch.nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {{epoch}} {{run.world.run_id}}", flush=True)
run.print(run.fingerprint())
"""


@pytest.fixture
def start(tmp_path):
    """Starts a command, with what only Linux has or without."""
    started = []

    def command(*arguments, epochs=2, without=True):
        (tmp_path / "script.py").write_text(SCRIPT.format(epochs=epochs))
        environment = dict(os.environ)
        if without:
            environment["PYTHONPATH"] = os.pathsep.join([str(FOLDER), environment.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield command
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def printed(process):
    told, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    return told.split()[-1]


LAUNCH = ("-m", "lockstep", "run", "--devices", "cpu:2", "script.py")


@pytest.mark.slow
def test_two_ranks_end_in_the_fingerprint_that_they_have_on_linux(start):
    assert printed(start(*LAUNCH)) == printed(start(*LAUNCH, without=False))


@pytest.mark.slow
def test_a_script_without_a_launcher_ends_in_it_too(start):
    assert printed(start("script.py")) == printed(start("script.py", without=False))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interrupted", "a rank killed", "stopped by command", "all but its ranks killed"])
def test_a_run_that_is_ended_leaves_no_process(start, how):
    run = start(*LAUNCH, epochs=100_000)
    word, _, run_id = run.stdout.readline().split()
    assert word == "epoch"
    import psutil

    processes = psutil.Process(run.pid).children(recursive=True)
    ranks = [each for each in processes if not each.children()]
    assert len(ranks) == 2
    if how == "interrupted":
        run.send_signal(signal.SIGINT)
    elif how == "a rank killed":
        ranks[0].kill()
    elif how == "all but its ranks killed":
        run.kill()
        for each in processes:  # and what forked the ranks: nobody is left to end them
            if each not in ranks:
                each.kill()
    else:
        stop = start("-m", "lockstep", "stop", run_id)  # others may run on this host
        assert stop.wait(timeout=60) == 0, stop.stderr.read()
    assert run.wait(timeout=60) != 0
    errors = "" if how == "all but its ranks killed" else run.communicate(timeout=60)[1]
    assert how != "a rank killed" or "killed by SIGKILL" in errors
    wait_until(lambda: not any(each.is_running() for each in processes), 30, "all processes to end")
