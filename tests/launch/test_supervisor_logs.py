"""The log folder of a run; no process needed."""

import errno
import tempfile

import pytest

from lockstep.core.world import HostLayout
from lockstep.errors import ConfigError
from lockstep.launch.options import LaunchOptions, parse_devices
from lockstep.launch.runs import run_directories, run_directory
from lockstep.launch.supervisor import open_log_folder


def opened(folder, run_id="one"):
    options = LaunchOptions(devices=parse_devices("cpu:2"), log_directory=str(folder))
    return open_log_folder(options, HostLayout(run_id=run_id, world_size=2))


@pytest.mark.fault("T5")
def test_a_second_run_with_the_same_folder_has_one_of_its_own(tmp_path, capsys):
    with opened(tmp_path / "logs") as first:
        (first.path / "rank-001.log").write_text("of the first")
        with opened(tmp_path / "logs", "two") as second:
            assert second.path == first.path / "two"
        assert (first.path / "rank-001.log").exists()
    told = f"the log folder {first.path} is used by another run, so the logs of this one are in {second.path}."
    assert capsys.readouterr().err == f"lockstep: {told}\n"


@pytest.mark.fault("T5")
def test_files_of_an_earlier_run_go_and_those_that_no_run_made_stay(tmp_path, capsys):
    with opened(tmp_path) as logs:
        (logs.path / "rank-001.error.json").write_text("{}")
        logs.keep(["rank 1 failed"])
        with opened(tmp_path / "restart-1", "one"):
            pass
    with opened(tmp_path, "two") as logs:
        assert logs.path == tmp_path
        assert [each.name for each in tmp_path.iterdir()] == [".lockstep"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rank-001.log").write_text("the user's")
    with opened(tmp_path / "mine", "three") as logs:
        assert logs.path == tmp_path / "mine" / "three"
    assert (tmp_path / "mine" / "rank-001.log").read_text() == "the user's"
    assert "holds other files" in capsys.readouterr().err


def test_a_temporary_folder_stays_only_where_it_says_something():
    for name in ("report.txt", "terminal.log", ""):
        with opened("") as logs:
            if name == "report.txt":
                logs.keep(["rank 1 failed"])
            elif name:
                (logs.path / name).write_text("lost")
        assert logs.path.exists() == bool(name)
        for file in logs.path.glob("*"):
            file.unlink()
        if name:
            logs.path.rmdir()


def test_a_host_without_a_temporary_folder_is_told_so_and_its_runs_are_still_found(tmp_path, monkeypatch):
    def none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    options = LaunchOptions(devices=parse_devices("cpu:2"))
    refused = pytest.raises(ConfigError, match=r"Cannot create the log folder: No usable .* TMPDIR, or --logs")
    with refused, open_log_folder(options, HostLayout(run_id="one", world_size=2)):
        pass
    with run_directory() as directory:
        assert directory in run_directories()


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Cannot create the log folder"), opened(tmp_path / "file"):
        pass
