"""The figures of the documentation are what the command writes."""

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.explain.figures import figures, main

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", figures())
def test_the_figure_in_the_docs_is_the_one_that_is_written(name):
    assert (DOCS / "figures" / name).read_text(encoding="utf-8") == figures()[name], (
        "write them anew: python -m lockstep.explain.figures"
    )


def test_one_command_writes_them(tmp_path):
    command = [sys.executable, "-m", "lockstep.explain.figures", str(tmp_path / "new")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"Wrote {len(figures())} figures to {tmp_path / 'new'}.\n"
    assert {path.name: path.read_text() for path in (tmp_path / "new").iterdir()} == figures()


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file" / "figures")]) == 2
    assert capsys.readouterr().err.startswith("Cannot write the figures to ")
