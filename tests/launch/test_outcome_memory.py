"""A rank that runs out of memory: the report says that it was the OOM killer, in a memory cgroup of the test's own."""

import os
import re
import signal
from pathlib import Path

import pytest

from lockstep.launch import outcome
from lockstep.launch.outcome import MemoryWatch, oom_kills

LIMIT = 700 << 20
SCRIPT = """\
import os, time
from pathlib import Path
import torch
from lockstep.launch import Heartbeat
from lockstep.core.world import World

world = World.from_environment()
Heartbeat.open(world).mark("forward", epoch=0, step=3)
if world.rank == 1:
    held = []
    while True:
        held.append(torch.ones(4 << 20))
        time.sleep(0.01)
time.sleep(600)
"""


@pytest.fixture
def cgroup():
    """A memory cgroup below this process's own, limited; skipped where none can be made."""
    own = [line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line]
    folder = Path(f"/sys/fs/cgroup/memory{own[0] if own else '/'}", f"lockstep-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error.strerror}")
    try:
        (folder / "memory.limit_in_bytes").write_text(str(LIMIT))
        yield folder
    finally:
        folder.rmdir()


@pytest.mark.slow
@pytest.mark.fault("P13")
def test_a_rank_that_the_oom_killer_ends_is_named_with_its_memory(command, cgroup):
    (command.folder / "hungry.py").write_text(SCRIPT)
    inside = cgroup / "cgroup.procs"
    own = cgroup.parent / "cgroup.procs"
    inside.write_text(str(os.getpid()))
    try:
        command.start(command.folder / "hungry.py", devices="cpu:2")
    finally:
        own.write_text(str(os.getpid()))
    code, lines = command.end()
    assert code == 4
    assert re.match(
        "rank 1 killed by the OOM killer, which ends a process when memory runs out; it last held "
        r"\d+ MB, step 3, forward",
        lines[0],
    )
    command.wait_until_nothing_runs()


@pytest.mark.parametrize(
    ("cgroup_line", "file", "text"),
    [
        ("4:memory:/job", "memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
        ("0::/job", "job/memory.events", "low 0\noom 4\noom_kill 3\noom_group_kill 0\n"),
    ],
    ids=["cgroup v1", "cgroup v2"],
)
def test_kills_are_counted_for_the_cgroup_in_both_versions(tmp_path, monkeypatch, cgroup_line, file, text):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    monkeypatch.setattr(outcome, "_CGROUPS", tmp_path)
    plain = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path: cgroup_line if str(path) == "/proc/self/cgroup" else plain(path)
    )
    assert oom_kills() == 3


@pytest.mark.fault("P13")
def test_only_a_sigkill_with_a_risen_count_is_the_oom_killers(monkeypatch):
    counts = iter([7, 7, 8])
    monkeypatch.setattr(outcome, "oom_kills", lambda: next(counts))
    watch = MemoryWatch()
    watch.look({2: os.getpid()})
    assert watch.killer_of(2, -signal.SIGTERM) == ""
    assert watch.killer_of(2, -signal.SIGKILL) == ""
    assert watch.killer_of(2, -signal.SIGKILL).startswith(
        "the OOM killer, which ends a process when memory runs out; it last held "
    )


def test_of_a_process_that_could_not_be_looked_at_no_memory_is_told(monkeypatch):
    counts = iter([0, 1])
    monkeypatch.setattr(outcome, "oom_kills", lambda: next(counts))
    watch = MemoryWatch()
    watch.look({0: 2**22 + 1})  # beyond the highest number a process can have
    assert watch.killer_of(0, -signal.SIGKILL) == "the OOM killer, which ends a process when memory runs out"
