"""Runs the command in this process and in one of its own."""

import subprocess
import sys

import pytest

from lockstep.cli import main


@pytest.fixture
def command(capsys, tmp_path, monkeypatch):
    """``lockstep ARGUMENTS`` in an empty folder: exit status, output, errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status = main(arguments)
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


@pytest.fixture
def process(tmp_path):
    """The same as a real process, from start to exit."""

    def run(*arguments, **options):
        code = "import sys; from lockstep.cli import main; sys.exit(main())"
        return subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path, **options
        )

    return run
