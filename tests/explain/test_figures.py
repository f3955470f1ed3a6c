"""The figures of the documentation are what the command writes."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.explain.figures import __file__ as figures_file
from tests.explain.figures import figures

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", figures())
def test_the_figure_in_the_docs_is_the_one_that_is_written(name):
    assert (DOCS / "figures" / name).read_text(encoding="utf-8") == figures()[name], "write them anew: make figures"


@pytest.mark.slow
def test_the_script_writes_them(tmp_path):
    subprocess.run([sys.executable, figures_file, tmp_path], check=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == figures()
