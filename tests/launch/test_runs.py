import json
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from lockstep.cli import main
from lockstep.errors import EXIT_CONFIG, ConfigError
from lockstep.launch.runs import choose_run, end_processes, find_runs, run_directory, write_note
from lockstep.runtime.process_handle import ProcessHandle

NO_ROOM = SimpleNamespace(f_bavail=10, f_frsize=4096, f_favail=1000, f_files=1000)


@pytest.mark.fault("X4")
def test_only_the_owner_may_enter_and_nothing_stays(tmp_path):
    with run_directory(tmp_path) as directory:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        (directory / "heartbeat-000").write_bytes(b"x")
    assert list(tmp_path.iterdir()) == []


def test_runs_of_the_same_moment_leave_each_other_alone(tmp_path):
    with run_directory(tmp_path) as first:
        with run_directory(tmp_path) as second:
            assert first != second
            assert first.exists()
        assert first.exists()


def test_a_folder_whose_lock_is_free_is_removed_and_others_stay(tmp_path):
    abandoned, foreign = tmp_path / "lockstep-run-dead", tmp_path / "lockstep-run-new"
    abandoned.mkdir()
    (abandoned / "lock").touch()
    foreign.mkdir()  # no lock yet: another launcher is just making it
    with run_directory(tmp_path):
        assert not abandoned.exists()
        assert foreign.exists()


@pytest.mark.fault("M2")
def test_a_folder_stays_while_a_process_of_its_run_is_left(tmp_path):
    abandoned = tmp_path / "lockstep-run-dead"
    abandoned.mkdir()
    (abandoned / "lock").touch()
    environment = {"LOCKSTEP_RUN_DIRECTORY": str(abandoned)}
    with subprocess.Popen(["cat"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as left:
        left.stdin.write(b"ready\n")
        left.stdin.flush()
        left.stdout.readline()  # /proc shows its environment only when it has begun to run
        with run_directory(tmp_path):
            assert abandoned.exists()
        left.kill()
    with run_directory(tmp_path):
        assert not abandoned.exists()


@pytest.mark.fault("T3")
def test_a_full_folder_is_passed_over_in_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    room = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda base: NO_ROOM if base == tmp_path else room(base))
    with run_directory(ranks=range(2)) as directory:
        assert directory.parent != tmp_path
    told = f"lockstep: {tmp_path} has no room left, so the files of the run are in {directory.parent}.\n"
    assert capsys.readouterr().err == told


@pytest.mark.fault("T3")
def test_files_that_find_no_room_are_refused_before_a_rank_starts_and_nothing_stays(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        why = pytest.raises(ConfigError, match="set XDG_RUNTIME_DIR to a folder with")
        with why, run_directory(tmp_path, ranks=range(2)):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    target = tmp_path / "elsewhere"
    target.touch()
    folder = tmp_path / "lockstep-run-odd"
    folder.mkdir()
    (folder / "lock").symlink_to(target)
    with run_directory(tmp_path):
        assert folder.exists()


def test_it_lies_in_the_runtime_folder_of_the_user_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with run_directory() as directory:
        assert directory.parent == tmp_path
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "absent"))
    with run_directory() as directory:
        assert os.access(directory, os.W_OK)


def test_a_runtime_folder_that_is_too_deep_for_sockets_is_not_used(tmp_path, monkeypatch):
    deep = tmp_path / "deep" / ("x" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with run_directory() as directory:
        assert directory.parent != deep
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(directory / "listener-12345678"))


@pytest.mark.fault("M2")
def test_a_run_of_another_process_namespace_is_not_signalled(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with run_directory() as directory, subprocess.Popen(["sleep", "60"]) as bystander:
        write_note(directory, "their-run", ["lockstep"], tmp_path, 1)
        note = json.loads((directory / "run.json").read_text())
        place, _, start = note["identity"].split("-")
        elsewhere = f"{place[:8]}00000000-{bystander.pid}-{start}"
        note.update(supervisor=bystander.pid, identity=elsewhere)
        (directory / "run.json").write_text(json.dumps(note))
        assert main(["stop", "their-run"]) == 2
        assert "was started in another process namespace" in capsys.readouterr().err
        assert main(["stop", "their-run", "--now"]) == 2
        note["identity"] = f"{place}-{bystander.pid}-1"  # here, but its process id is another process's by now
        (directory / "run.json").write_text(json.dumps(note))
        assert main(["stop", "their-run"]) == 0
        assert bystander.poll() is None
        bystander.kill()


def test_a_run_is_found_by_the_folder_of_its_job(tmp_path, monkeypatch):
    """``lockstep stop runs/digits-001`` matched no run, and ``lockstep stacks`` neither."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with run_directory() as directory, run_directory() as other:
        write_note(directory, "one", [], tmp_path / "runs" / "digits-001" / "ranks", 1)
        write_note(other, "two", [], tmp_path / "runs" / "digits-002" / "ranks", 1)
        assert choose_run("runs/digits-002/").run_id == "two"
        with pytest.raises(ConfigError, match=r"No run matches 'runs/digits-003'"):
            choose_run("runs/digits-003")


@pytest.mark.fault("T6")
def test_a_note_of_any_content_is_no_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with run_directory() as directory:
        write_note(directory, "some-run", [], tmp_path, 1)
        odd = json.dumps({**json.loads((directory / "run.json").read_text()), "identity": "1-\ud800-x"})
        for text in ("", "[" * 60_000, "{}", "null", '{"run_id": 1}', odd):
            (directory / "run.json").write_text(text)
            assert directory not in [run.directory for run in find_runs()]


@pytest.mark.parametrize("how", ["mount -t tmpfs none /proc", "umount -l /proc"])
def test_where_proc_is_missing_a_sentence_says_so(tmp_path, how):
    """A traceback of psutil came, or the limit of open files alone was blamed."""
    allowed = shutil.which("unshare") and subprocess.run(["unshare", "-m", "true"], capture_output=True)
    if not allowed or allowed.returncode:
        pytest.skip("this user may not take /proc away in a namespace of its own")
    with run_directory(tmp_path) as directory:
        write_note(directory, "seen", ["lockstep"], tmp_path, 1)
        script = f"{how} && exec {sys.executable} -m lockstep ps"
        words, own = ["unshare", "-m", "sh", "-c", script], {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        found = subprocess.run(words, capture_output=True, text=True, env=own)
    assert found.returncode == EXIT_CONFIG, found.stderr
    assert found.stderr.startswith("lockstep: Processes cannot be seen: ") and "Mount /proc" in found.stderr


@pytest.mark.fault("T7")
def test_the_end_of_a_process_is_seen_with_many_descriptors_open():
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, former[1]))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, former)
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        with subprocess.Popen(["sleep", "60"]) as child:
            handle = stack.enter_context(ProcessHandle(child.pid))
            assert not handle.has_ended(0.0)
            child.kill()
            assert handle.has_ended(5.0)


@pytest.mark.fault("T7")
def test_all_processes_of_a_run_end_with_few_descriptors(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    with run_directory() as directory, ExitStack() as stack:
        write_note(directory, "of-few", ["lockstep"], tmp_path, 1)
        (run,) = [each for each in find_runs() if each.run_id == "of-few"]
        left = [
            stack.enter_context(subprocess.Popen(["sleep", "60"], env={"LOCKSTEP_RUN_ID": "of-few"})) for _ in range(8)
        ]
        free = [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]  # others may lie between them
        for each in free:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, former[1]))
        try:
            assert end_processes(run) == 8
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(free), former[1]))
            with pytest.raises(ConfigError, match="ulimit -n"):
                end_processes(run)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, former)
        assert all(each.wait() == -signal.SIGTERM for each in left)
