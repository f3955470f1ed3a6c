"""Writes docs/faults.md from the rows and from the markers of the tests: ``python -m tests.faults.table``."""

import ast
from collections import defaultdict
from pathlib import Path

from tests.faults.matrix import ROWS, SECTIONS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
_HEAD = """\
# Faults, and what becomes of a run

What happens to a run if a process is killed, a disk is full, a file is broken, the network fails or someone attacks it:
one row for each fault, with the result and the tests that prove it. Look here to find out whether a fault that worries
you is handled. What no test shows is said under the table. The tests use real processes, signals and files wherever the
fault has any.

Exit codes: 0 done, 2 configuration, 3 data, 4 a rank failed, 5 the run stood still, 6 not finite, 75 preempted (run it
again, it resumes), 130 interrupted.

`python -m tests.faults.table` writes this page from `tests/faults/matrix.py` and from the markers of the tests; do not
edit it by hand.
"""


def markers(folder=ROOT / "tests"):
    """Row number -> the tests that carry it, as ``(path, function)``, in the order of the files."""
    found = defaultdict(list)
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text()
        for node in ast.parse(text).body if "mark.fault" in text else ():
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for number in sorted(set(_numbers(node))):
                    found[number].append((path.relative_to(ROOT).as_posix(), node.name))
    return dict(found)


def _numbers(function):
    """The rows in the decorators of a test, those of single parameters included."""
    for decorator in function.decorator_list:
        for node in ast.walk(decorator):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
                yield from (argument.value for argument in node.args)


def render(found):
    """The page."""
    parts = [_HEAD]
    for section, rows in SECTIONS.items():
        lines = ["| | fault | result | tested by |", "|---|---|---|---|"]
        for row in rows:
            tests = "<br>".join(_shown(*test) for test in found.get(row.number, ())) or "no test"
            lines.append(f"| {row.number} | {row.fault} | {row.outcome} | {tests} |")
        lines += [f"\n{row.number}: {row.open}." for row in rows if row.open]
        parts.append(f"## {section}\n\n" + "\n".join(lines) + "\n")
    held = sum(row.number in found for row in ROWS)
    closed = sum(row.number in found and not row.open for row in ROWS)
    parts.append(f"Of {len(ROWS)} rows {held} are tested, {closed} of them completely.\n")
    return "\n".join(parts)


def _shown(path, name):
    return f"[{name.removeprefix('test_').replace('_', ' ')}](../{path})"


if __name__ == "__main__":
    PAGE.write_text(render(markers()))
