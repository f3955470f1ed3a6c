import errno
import fcntl
import os
import subprocess
import sys
import time

import pytest

from lockstep.core.atomic import clean, file_aside, folder_aside, hidden, remove_folder, sole_use, write_whole


def entry_of_dead_process(path):
    """A hidden name as a process that has ended would have left it."""
    code = (
        "import sys; from pathlib import Path; from lockstep.core.atomic import hidden; "
        "print(hidden(Path(sys.argv[1])))"
    )
    out = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    return path.with_name(out.stdout.strip().rpartition("/")[2])


def test_entries_of_dead_processes_go_and_all_others_stay(tmp_path):
    dead = entry_of_dead_process(tmp_path / "step-00000007")
    dead.mkdir()
    (dead / "model.safetensors").write_bytes(b"half")
    dead_file = entry_of_dead_process(tmp_path / "best.json")
    dead_file.write_bytes(b"half")
    own = hidden(tmp_path / "step-00000008")
    own.mkdir()
    others = [
        ".hidden",
        ".step-1.partial",
        "step-00000001",
        ".step-00000001.abc-1-1-1.partial",
        "notes.partial",
    ]
    for name in others:
        (tmp_path / name).mkdir()
    assert set(clean(tmp_path)) == {dead, dead_file}
    assert {path.name for path in tmp_path.iterdir()} == {*others, own.name}


def test_a_process_that_got_the_pid_of_a_dead_one_is_not_taken_for_it(tmp_path):
    place, pid, start, token = hidden(tmp_path / "x").name.split(".")[2].split("-")
    reused = tmp_path / f".step-00000001.{place}-{pid}-{int(start) - 1}-{token}.partial"
    reused.mkdir()
    assert clean(tmp_path) == [reused]


def test_an_entry_of_another_host_is_removed_only_when_it_is_old(tmp_path):
    fresh = tmp_path / ".step-00000001.0000000000000000-1-1-00000000.partial"
    old = tmp_path / ".step-00000002.0000000000000000-1-1-00000000.partial"
    for path in (fresh, old):
        path.mkdir()
    past = time.time() - 7200
    os.utime(old, (past, past))
    assert clean(tmp_path) == [old]


def test_an_entry_of_another_process_namespace_goes_once_nobody_holds_it(tmp_path):
    """A killed container leaves names whose process ids mean nothing outside of it."""
    with folder_aside(tmp_path / "step-00000001") as aside:
        place = aside.name.split(".")[2].split("-")[0]
        moved = aside.with_name(aside.name.replace(place, place[:8] + "0" * 8))
        aside.rename(moved)
        assert clean(tmp_path) == []
    assert clean(tmp_path) == [moved]
    assert list(tmp_path.iterdir()) == []


def test_a_link_left_behind_is_removed_and_not_followed(tmp_path):
    target = tmp_path / "precious"
    target.mkdir()
    (target / "file").write_text("kept")
    link = entry_of_dead_process(tmp_path / "step-00000001")
    link.symlink_to(target)
    assert clean(tmp_path) == [link]
    assert (target / "file").read_text() == "kept"


def test_cleaning_a_folder_that_does_not_exist_does_nothing(tmp_path):
    assert clean(tmp_path / "none") == []


def test_a_failure_removes_the_hidden_entry_and_leaves_the_old_content(tmp_path):
    path = tmp_path / "file"
    write_whole(path, b"old")
    with pytest.raises(RuntimeError), file_aside(path) as aside:
        aside.write_bytes(b"new")
        raise RuntimeError
    with pytest.raises(RuntimeError), folder_aside(tmp_path / "folder") as aside:
        (aside / "file").write_bytes(b"new")
        raise RuntimeError
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


def test_a_folder_is_removed_whole(tmp_path):
    folder = tmp_path / "step-00000001"
    (folder / "deep").mkdir(parents=True)
    remove_folder(folder)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("T4")
@pytest.mark.parametrize("locks", [True, False])
def test_one_process_has_sole_use_with_and_without_locks(tmp_path, monkeypatch, locks):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "no locks")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", refuse)
    with sole_use(tmp_path / "lock") as found:
        assert found is locks
        with pytest.raises(BlockingIOError), sole_use(tmp_path / "lock"):
            pass
    with pytest.raises(ZeroDivisionError), sole_use(tmp_path / "lock"):
        raise ZeroDivisionError
    with sole_use(tmp_path / "lock"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.fault("T4")
def test_the_owner_that_a_dead_process_left_is_removed_and_one_of_another_host_is_named(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    dead = entry_of_dead_process(tmp_path / "x").name.split(".")[2].rpartition("-")[0]
    (tmp_path / "lock.owner").write_text(f"{dead} this-host")
    with sole_use(tmp_path / "lock"):
        pass
    for text, who in (
        ("0123456789abcdef-12-34 elsewhere", "process 12 on elsewhere"),
        ("", "an unknown host"),
    ):
        (tmp_path / "lock.owner").write_text(text)
        with pytest.raises(BlockingIOError, match=who), sole_use(tmp_path / "lock"):
            pass
