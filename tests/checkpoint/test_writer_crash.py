"""Real processes killed with SIGKILL while they write: what can be read afterwards is always whole."""

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.checkpoint import clean, committed, read, read_newest, write

_SIZE = 300_000


@pytest.fixture
def writer(tmp_path):
    """The helper process, as a function from a command to its answer, and the folder it writes to."""
    directory = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("crashing_writer.py")), str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask(command):
        process.stdin.write(command + "\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    assert process.stdout.readline().strip() == "ready"
    yield ask, directory
    process.stdin.close()
    process.stdout.close()
    process.wait()


def hidden_entries(directory):
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


@pytest.mark.fault("K1")
@pytest.mark.slow
def test_thirty_kills_at_random_moments_always_leave_a_complete_checkpoint(writer, state_of, shown):
    ask, directory = writer
    began = time.monotonic()
    write(directory, state_of(0, _SIZE), step=0)
    longest = min(0.25, max(0.03, 3 * (time.monotonic() - began)))
    moments, newest, seen_partial = random.Random(0), 0, 0
    for _ in range(30):
        child = int(ask(f"loop {newest + 1}"))
        select.select([], [], [], moments.uniform(0.0, longest))
        os.kill(child, signal.SIGKILL)
        ask(f"wait {child}")
        seen_partial += bool(hidden_entries(directory))
        clean(directory)
        assert hidden_entries(directory) == []
        restored = read_newest(directory)
        assert restored.path == committed(directory)[-1]
        assert shown(restored.state) >= newest
        newest = shown(restored.state)
    assert newest > 0, "no save ever finished: the moments test nothing"
    assert seen_partial > 0, "no kill ever came during a save: the moments test nothing"


@pytest.mark.fault("K1", "K4")
def test_a_kill_before_every_single_file_operation_leaves_the_old_or_the_new(writer, state_of, shown):
    ask, directory = writer
    write(directory, state_of(1), step=1)
    outcomes, number = [], 0
    while not outcomes or outcomes[-1] != "finished":
        number += 1
        outcomes.append(ask(f"until 2 {number}"))
        restored = read_newest(directory)
        assert shown(restored.state) in (1, 2)
        clean(directory)
        assert hidden_entries(directory) == []
        assert all(shown(read(path)) in (1, 2) for path in committed(directory))
        if shown(restored.state) == 2:
            for path in committed(directory):
                if path.name.startswith("step-00000002"):
                    path.rename(directory.parent / f"done-{number}")
            write(directory, state_of(1), step=1, keep=1)
    assert len(outcomes) > 15
    assert set(outcomes[:-1]) == {"killed"}
