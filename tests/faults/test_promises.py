"""docs/promises.md names tests for each promise: they exist, and hold the faults that the promise is about."""

import ast
import re

import pytest
from tests.faults.table import ROOT, markers

FOUR = {
    "no orphan": ("P3", "P9", "N4"),
    "a named culprit in bounded time": ("P1", "P2", "P8", "P10", "P12", "P15", "N1"),
    "no silent divergence": ("C5", "C7", "M3"),
    "verified checkpoints": ("K1", "K3", "K4"),
}


def promises():
    """Promise -> the paths that stand beside it, from both tables of the page."""
    tables = re.findall(
        r"^\| promise \| test \|\n\|[-| ]+\|\n((?:\|.*\|\n)+)",
        (ROOT / "docs" / "promises.md").read_text(),
        re.M,
    )
    rows = [line.strip("| ").rsplit(" | ", 1) for table in tables for line in table.splitlines()]
    return {promise: re.findall(r"`(tests/[^`]*)`", tests) for promise, tests in rows}


@pytest.mark.parametrize(("promise", "paths"), promises().items(), ids=lambda value: str(value)[:40])
def test_every_promise_names_tests_that_exist(promise, paths):
    assert paths, f"no test is named for: {promise}"
    for path in paths:
        place = ROOT / path
        files = [place] if place.is_file() else sorted(place.rglob("test_*.py"))
        tests = [
            node
            for file in files
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        assert tests, f"{path} holds no test"


@pytest.mark.parametrize(("promise", "rows"), FOUR.items(), ids=list(FOUR))
def test_each_of_the_four_promises_is_held_where_the_page_says(promise, rows):
    (paths,) = [paths for text, paths in promises().items() if text.startswith(promise)]
    found = markers()
    for row in rows:
        places = [place for place, _ in found[row]]
        assert any(place.startswith(tuple(paths)) for place in places), f"{row} is held in {places}"
