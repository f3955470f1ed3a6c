"""``lockstep``: finds the command, and says a mistake in one sentence."""

import contextlib
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from lockstep.cli import command_line
from lockstep.errors import DataError


def test_the_versions_are_told(command):
    status, output, _ = command("--version")
    assert status == 0
    packages = re.escape(f"torch {version('torch')}, Python {platform.python_version()}")
    assert re.fullmatch(rf"lockstep 0\.\S+ \(commit \S+, {packages}\)\n", output)


@pytest.mark.parametrize("arguments", [("train", "digits"), ("run", __file__)])
def test_a_folder_that_was_deleted_is_told_before_anything_starts(command, tmp_path, arguments):
    """torch ends a process there with a message about MKL, and the job was a traceback."""
    gone = tmp_path / "gone"
    gone.mkdir()
    with contextlib.chdir(gone.parent):
        os.chdir(gone)
        gone.rmdir()
        status, output, errors = command(*arguments)
        found = command("ps")
    assert (status, output) == (2, "")
    assert errors == "lockstep: The current folder of this shell was deleted. Change to one that exists (cd).\n"
    assert found[0] == 0


def test_the_commit_of_a_wheel_comes_from_its_record_else_from_the_checkout_else_is_unknown(tmp_path, monkeypatch):
    package = tmp_path / "src" / "lockstep"
    (package / "cli").mkdir(parents=True)
    monkeypatch.setattr(command_line, "__file__", str(package / "cli" / "command_line.py"))
    assert command_line._commit() == "unknown"
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    assert command_line._commit() == "unknown", "a checkout without a commit"
    author = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run(["git", "-C", str(tmp_path), *author, "commit", "-q", "--allow-empty", "-m", "m"], check=True)
    found = command_line._commit()
    assert re.fullmatch(r"[0-9a-f]{12}", found)
    (package / "commit.txt").write_text("0123456789ab\n")
    assert command_line._commit() == "0123456789ab"


@pytest.mark.parametrize("name", [(), *((name,) for name in command_line._COMMANDS)])
def test_help_ends_well(command, name):
    status, output, errors = command(*name, "--help")
    assert (status, errors) == (0, "")
    assert output.startswith(" ".join(("usage: lockstep", *name)))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "The following arguments are required: COMMAND."),
        (("trian",), "'trian' is not a command of 'lockstep'. Did you mean 'train'?"),
        (("profile",), "'profile' is not a command of 'lockstep'. Use 'lockstep train JOB --profile'. See"),
        (
            ("train", "--epohcs", "3"),
            "--epohcs is not an argument of 'lockstep train'. Did you mean '--epochs'?",
        ),
        (("train", "--epohcs=3"), "Did you mean '--epochs'?"),
        (("scale", "digits", "--strategy", "ddp"), "Did you mean '--strategies'?"),
        (("train", "digits", "--seed", "1"), "It is a setting of the job: --set training.seed=..."),
        (
            ("explain", "pipeline", "--ranks", "3"),
            "--ranks is not an argument of 'lockstep explain pipeline'. See",
        ),
        (("train", "digits", "--dat", "x"), "Did you mean '--data'?"),
        (
            ("run", "--nproc_per_node=2", "x.py"),
            "--nproc_per_node is not an argument of 'lockstep run'. Use --devices.",
        ),
        (("run", "-np", "2", "x.py"), "-np is not an argument of 'lockstep run'. Use --devices."),
        (("run", "--strategy", "fsdp", "x.py"), "The script gives it: lockstep.init(strategy=...)."),
        (("train", "digits", "--num-machines", "2"), "Use --nnodes."),
        (("lint", "-n", "2", "x.py"), "-n is not an argument of 'lockstep lint'."),
        (("train", "digits", "more"), "more is not an argument of 'lockstep train'."),
        (("train", "digits", "--max-steps", "9"), "It is a setting of the job: --set training.max_steps=..."),
        (("train", "digits", "--lr", "0.1"), "Use --set optimizer.lr=..."),
        (("train", "digits", "--batch-size", "64"), "Use --set training.global_batch=..."),
        (("train", "digits", "--output", "x"), "Use --set run.directory=..."),
        (("train", "digits", "--amp"), "Use --precision."),
        (("train", "--epochs"), "expected one argument."),
        (
            ("report", "x" * 300),  # Python 3.14 takes the path for one that does not exist
            "File name too long." if sys.version_info < (3, 14) else "There is no run folder",
        ),
        (("new", "~no-such-user/x", "--yes"), "there is no such home folder"),
        (("slurm", "digits", "--output", "absent/job.sh"), "the folder 'absent' does not exist"),
        (("slurm", "digits", "--output", "x" * 300), "longer than one can be"),
        (("slurm", "digits", "--gpus-per-node", "-1"), "--gpus-per-node is -1, and must be at least 0."),
        (("slurm", "digits", "--gpus-per-node", "9" * 25), "at most 65,536 devices"),
        (("slurm", "digits", "--nodes", "9" * 25), "and must be at most 65,536."),
        (("slurm", "digits", "--nodes", "60000", "--tasks-per-node", "4000"), "at most 65,536 devices"),
        (("train", "digits", "--dry-run", "--nnodes", "9" * 25), "is more than 65,536 hosts"),
        (("train", "digits", "--dry-run", "--devices", "cpu:100000"), "at most 4096 processes of a host"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_two(command, arguments, expected):
    status, output, errors = command(*arguments)
    assert (status, output) == (2, "")
    assert errors.startswith("lockstep: ")
    assert errors.count("\n") == 1
    assert expected in errors


def test_the_local_rank_of_torchs_former_launcher_is_what_its_variable_says(command, monkeypatch):
    """``python -m torch.distributed.launch -m lockstep train`` puts it before the command."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert command("--local-rank=1", "explain", "--help")[0] == 0
    status, output, errors = command("--local-rank=0", "train", "--dry-run")
    assert (status, output) == (2, "")
    assert "--local-rank 0 was given, and LOCAL_RANK is 1" in errors


def test_an_error_decides_its_exit_status_and_an_interrupt_is_130(command, monkeypatch):
    class Failing:
        error: BaseException = DataError("the photo x.jpg ends early.")

        @staticmethod
        def add_arguments(parser):
            pass

        @staticmethod
        def main(arguments):
            raise Failing.error

    monkeypatch.setattr(command_line.importlib, "import_module", lambda name: Failing)
    assert command("train")[::2] == (3, "lockstep: the photo x.jpg ends early.\n")
    Failing.error = KeyboardInterrupt()
    assert command("train")[::2] == (130, "")
    Failing.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        command("train")


@pytest.mark.fault("K2")
def test_output_to_a_full_disk_is_a_sentence():
    """It was a traceback with exit status 1, which is that of ``lint`` for findings."""
    line = [sys.executable, "-m", "lockstep", "--version"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 3
    assert ended.stderr == "lockstep: the output could not be written: No space left on device.\n"


@pytest.mark.fault("T7")
def test_too_few_open_files_are_a_sentence(tmp_path):
    command = [sys.executable, "-m", "lockstep", "train", "digits", "--set", f"run.directory={tmp_path}"]
    limited = ["bash", "-c", 'ulimit -n 14; "$@"', "bash", *command, "--devices", "cpu:1"]
    ended = subprocess.run(limited, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr == "lockstep: Too many open files. Raise the limit of this shell (ulimit -n).\n"


def test_only_the_module_of_the_command_is_imported():
    code = (
        "import sys; from lockstep.cli import main; main(['run', '--help']);"
        "assert 'lockstep.cli.train' not in sys.modules, 'train'; assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
