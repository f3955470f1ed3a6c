"""Writes a benchmark's RESULTS.md: claim, command, tables, machine, date."""

from __future__ import annotations

import datetime
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.commands import HERE
from harness.machine import facts

LEGEND = "Numbers are `median (quartiles; minimum–maximum)`; ratios are taken within each alternation."
"""Says how to read the numbers of ``Spread.text``."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(path: Path, *, title: str, claim: str, sections: Sequence[str], command: str = "") -> None:
    """Writes the report beside the benchmark and prints it; ``command`` is by default that of this process."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    machine = "\n".join(f"- {fact}" for fact in [*facts(), f"measured on {today}"])
    text = "\n\n".join(
        [
            f"# {title}",
            claim,
            f"    {command or _command()}",
            *sections,
            f"## Machine\n\n{machine}",
        ]
    )
    path.write_text(text + "\n")
    print(text)


def _command() -> str:
    script = Path(sys.argv[0]).resolve().relative_to(HERE.parent)
    return shlex.join(["python", str(script), *sys.argv[1:]])
