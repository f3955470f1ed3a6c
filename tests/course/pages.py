"""Fills the course's pages with its code and what that prints: ``make course-pages``, or ``ARGS="03 04"`` for some.

A page has markers, each before a fenced block: ``<!-- code: 01/by_hand.py -->`` for a file below ``docs/course/code``,
and ``<!-- run: COMMAND -->`` for what a command prints there. ``<!-- run, numbers vary: COMMAND -->`` is for output
whose numbers depend on the machine.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
COURSE = ROOT / "docs" / "course"
CODE = COURSE / "code"
BLOCK = re.compile(r"(<!-- (code|run|run, numbers vary): (.+?) -->\n```\w*\n)(.*?)(```\n)", re.S)


def pages(language: str) -> list[Path]:
    """The pages of one language, in the order of their names."""
    return sorted((COURSE / language).glob("*.md"))


def blocks(text: str) -> list[tuple[str, str, str]]:
    """The marked blocks of a page: kind, file or command, content."""
    return [(match[2], match[3], match[4]) for match in BLOCK.finditer(text)]


@functools.cache
def printed(command: str) -> str:
    """The output of a command in the folder of the course's code, below the command; folders of logs have one name."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        shlex.split(command),
        cwd=CODE,
        env={**os.environ, "PYTHONPATH": path, "PATH": programs, "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    said = re.sub(r"\S*/lockstep-logs-[\w-]+", "/tmp/lockstep-logs", done.stdout)
    return f"$ {command}\n{said}"


def without_numbers(text: str) -> str:
    """The text with one sign for each number and the spaces before it."""
    return re.sub(r" *[-+]?\d[\d.,]*(e[-+]\d+)?", " #", text)


def filled(text: str, run: bool) -> str:
    """The page with the code of its files and, if asked for, with what its commands print now."""

    def content(match: re.Match[str]) -> str:
        if match[2] == "code":
            return match[1] + (CODE / match[3]).read_text(encoding="utf-8") + match[5]
        return match[1] + (printed(match[3]) if run else match[4]) + match[5]

    return BLOCK.sub(content, text)


if __name__ == "__main__":
    # Such as 03 04; without any, all pages
    chapters = tuple(word for word in sys.argv[1:] if word != "--run")
    for page in (*pages("en"), *pages("zh")):
        if page.name.startswith(chapters or ""):
            page.write_text(filled(page.read_text(encoding="utf-8"), run="--run" in sys.argv), encoding="utf-8")
