"""The pages of the site that are generated from the source: the public API and the command line.

Needs no MkDocs, so that a test compares the pages with the source where only Lockstep is installed.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

from lockstep.cli.command_line import _COMMANDS, _parser

SOURCE = Path(__file__).parents[2] / "src"
MODULES = {
    "lockstep": "Runs of your own loop",
    "lockstep.errors": "Errors and exit codes",
    "lockstep.data": "Data sets and transforms",
    "lockstep.models": "Models and weights",
    "lockstep.reduce": "Sums of gradients",
    "lockstep.verify": "Records of any loop",
    "lockstep.integrations.accelerate": "In place of Accelerate",
    "lockstep.integrations.lightning": "In place of Lightning's Trainer",
    "lockstep.integrations.transformers": "In place of Transformers' Trainer",
    "lockstep.integrations.ray": "On Ray",
}
"""The modules that users import from, each with the title of its page."""
INTEGRATIONS = {
    "lockstep.integrations.accelerate": ["Accelerator"],
    "lockstep.integrations.lightning": ["LightningTrainer"],
    "lockstep.integrations.transformers": ["TransformersTrainer"],
    "lockstep.integrations.ray": ["LockstepTrainer"],
}
"""Names that scripts import from modules without ``__all__``."""


def pages() -> dict[str, str]:
    """The generated pages, as {path below ``docs``: Markdown}."""
    return {
        **{f"reference/{module}.md": api_page(module) for module in MODULES},
        "reference/command-line.md": command_line_page(),
    }


def public_names(module: str) -> list[str]:
    """The public names of a module, which is not imported: its ``__all__``, or the classes and constants of a file."""
    if module in INTEGRATIONS:
        return INTEGRATIONS[module]
    path = SOURCE.joinpath(*module.split("."))
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    body = ast.parse(file.read_text()).body
    assigned = {
        node.targets[0].id: node.value
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    if "__all__" in assigned:
        return list(ast.literal_eval(assigned["__all__"]))
    classes = [node.name for node in body if isinstance(node, ast.ClassDef)]
    return [name for name in [*classes, *assigned] if not name.startswith("_")]


def api_page(module: str) -> str:
    """One heading for each public name, under which mkdocstrings writes the signature and the docstring."""
    errors = public_names("lockstep.errors")
    names = sorted(public_names(module), key=lambda name: module == "lockstep" and name in errors)
    blocks = [f"::: {module}.{name}\n" for name in names]
    return "\n".join([f"# {MODULES[module]}\n", f"`{module}`\n", *blocks])


def command_line_page() -> str:
    """Every command with its usage and its arguments, as ``--help`` shows them."""
    parts = ["# Command line\n", "`lockstep COMMAND --help` prints the same.\n"]
    for name in _COMMANDS:
        parts += _command(_subparsers(_parser([name]))[name], 2)
    return "\n".join(parts)


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def _command(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    """The section of a command, and one below it for each command of its own."""
    parser.formatter_class = _formatter
    usage = parser.format_usage().removeprefix("usage: ").rstrip()
    yield f"{'#' * level} {parser.prog}\n"
    if parser.description:
        yield f"{_cell(parser.description)}\n"
    yield f"```\n{usage}\n```\n"
    rows = [row for action in parser._actions for row in _row(parser, action)]
    if rows:
        yield "\n".join(["| argument | what it does |", "|---|---|", *rows, ""])
    for below in _subparsers(parser).values():
        yield from _command(below, level + 1)


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, width=78)


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> Iterator[str]:
    """The line of an argument; none for those that help leaves out, and for help itself."""
    if action.help is argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction | argparse._HelpAction):
        return
    formatter = _formatter(parser.prog)
    told = _cell(formatter._expand_help(action)) if action.help else ""
    yield f"| `{_cell(formatter._format_action_invocation(action), code=True)}` | {told} |"


def _cell(text: str, *, code: bool = False) -> str:
    """Text for a cell of a table."""
    line = " ".join(text.split()).replace("|", "\\|")
    return line if code else line.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
