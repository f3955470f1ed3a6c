"""Whole training scripts: one with every usual mistake, and the same one without them."""

import re
from pathlib import Path

from lockstep.lint import check_file

SCRIPTS = Path(__file__).parent / "scripts"


def test_every_mistake_of_the_broken_script_is_found_at_its_line():
    path = SCRIPTS / "broken.txt"
    marked = {
        (line, number)
        for line, text in enumerate(path.read_text().splitlines(), start=1)
        for number in re.findall(r"LS\d{3}", text.partition("  # ")[2])
    }
    assert {(finding.line, finding.rule) for finding in check_file(str(path))} == marked
    assert len(marked) >= 24


def test_the_mended_script_has_no_finding():
    assert [finding.text() for finding in check_file(str(SCRIPTS / "mended.txt"))] == []


def test_the_examples_of_this_repository_have_no_finding():
    examples = sorted((Path(__file__).parents[2] / "examples").rglob("*.py"))
    assert examples
    assert [finding.text() for path in examples for finding in check_file(str(path))] == []
