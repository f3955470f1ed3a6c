"""Writes the course's pages as Jupyter notebooks beside them: ``make notebooks``.

A file of a page becomes a cell that writes it, a command one that runs it, with the page's output; the rest is text.
Both need the programs of the environment that Jupyter was started from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.course.pages import BLOCK, pages

START = "%cd ../code"
"""The folder that files and commands of the pages are named from."""


def notebook(page: str) -> dict[str, Any]:
    """A page as a notebook of format 4.5."""
    cells, end = [_code(START)], 0
    for match in BLOCK.finditer(page):
        cells.append(_text(page[end : match.start()]))
        kind, name, content = match[2], match[3], match[4]
        if kind == "code":
            cells.append(_code(f"%%writefile {name}\n{content.rstrip()}"))
        else:
            cells.append(_code(f"!{name}", output=content.partition("\n")[2]))
        end = match.end()
    cells.append(_text(page[end:]))
    return {
        "cells": [{**cell, "id": f"cell-{number}"} for number, cell in enumerate(cells) if "".join(cell["source"])],
        "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _text(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": source.strip().splitlines(keepends=True)}


def _code(source: str, output: str = "") -> dict[str, Any]:
    stream = {"name": "stdout", "output_type": "stream", "text": output.splitlines(keepends=True)}
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [stream] if output else [],
        "source": source.splitlines(keepends=True),
    }


def write(page: Path) -> Path:
    """Writes a page's notebook beside it; returns its path."""
    path = page.with_suffix(".ipynb")
    content = json.dumps(notebook(page.read_text(encoding="utf-8")), ensure_ascii=False, indent=1)
    path.write_text(f"{content}\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    for language in ("en", "zh"):
        for each in pages(language):
            if each.name[:2].isdigit():
                print(write(each))
