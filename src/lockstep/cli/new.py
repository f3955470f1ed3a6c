"""``lockstep new``: asks what the data is, and writes a job file and a script that train on it at once."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from contextlib import suppress
from pathlib import Path

from lockstep.cli.command_line import Parser
from lockstep.cli.shared_options import add_options
from lockstep.config.checks import file_path
from lockstep.config.starter import GOALS, KINDS, DataSummary, job_text, kind_of, look_at, script_text
from lockstep.errors import ConfigError, nearest


def add_arguments(parser: Parser) -> None:
    """Declares the command's arguments."""
    add_options(
        parser,
        ("data", "DATA", "", "a folder of photos, a CSV file, text, or x and y in .npz, .pt or .npy"),
        ("--kind", "KIND", "", f"what the data is: {', '.join(KINDS)} (default: what it looks like)"),
        ("--target", "COLUMN", "", "the column of a table that is predicted (default: the last one)"),
        ("--goal", "GOAL", "", "classes or numbers (default: what the target looks like)"),
        ("--epochs", "N", "", "number of passes over the data"),
        ("--name", "NAME", "", "writes NAME.toml and NAME.py (default: from the name of the data)"),
        ("--yes", "", False, "ask nothing: take the default where an option is not given"),
    )


def main(arguments: argparse.Namespace) -> int:
    """Asks, looks at the data, writes both files, and says what was chosen; returns the exit status."""
    asks = not arguments.yes and sys.stdin.isatty()

    def answer(given: str, question: str, default: str) -> str:
        return given or (_ask(question, default) if asks else default)

    place = answer(arguments.data, "Where is your data (a folder or a file)?", "")
    if not place:
        raise ConfigError("Name the folder or the file of your data: lockstep new DATA.")
    if problem := file_path(place):
        raise ConfigError(f"The data {problem}")
    data = Path(place).expanduser()
    kind = _known("--kind", answer(arguments.kind, f"What is it: {', '.join(KINDS)}?", kind_of(data)), KINDS)
    target = arguments.target
    if target and kind != "table":
        raise ConfigError(f"--target names a column of a table, and this is {kind}. Leave it out.")
    if kind == "table":
        target = answer(target, "Which column is predicted (empty: the last one)?", "")
    goal = _known("--goal", arguments.goal, GOALS) if arguments.goal else ""
    found = look_at(data, kind, target=target, goal=goal)
    epochs = _epochs(answer(arguments.epochs, "How many passes over the data?", str(found.epochs)))
    name = answer(arguments.name, "What shall the files be called?", _name_for(data))
    _check_name(name)
    _write(found, name, epochs)
    for line in found.remarks:
        print(f"  {line}")
    print(f"Wrote {name}.toml and {name}.py. Now:")
    print(f"  lockstep train {name}.toml")
    print(f"  python {name}.py")
    return 0


def _ask(question: str, default: str) -> str:
    """Returns what is typed, or the default where nothing is."""
    shown = f"{question} [{default}] " if default else f"{question} "
    with suppress(EOFError):
        return input(shown).strip() or default
    return default


def _known(option: str, given: str, known: tuple[str, ...]) -> str:
    if given not in known:
        raise ConfigError(f"{option} {given!r} is not known.{nearest(given, known)}")
    return given


def _epochs(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"--epochs {text!r} should be a whole number from 1 on.")
    return int(text)


def _name_for(data: Path) -> str:
    """The data's name as one that Python can import, with ``train_`` before it."""
    stem = re.sub(r"\W+", "_", data.resolve().stem, flags=re.ASCII).strip("_").lower()
    return f"train_{stem or 'data'}"


def _check_name(name: str) -> None:
    """Raises ``ConfigError`` for a name that Python cannot import, or that would hide another module."""
    if not name.isidentifier() or not name.isascii():
        raise ConfigError(f"--name {name!r} should be letters, digits and underscores: Python imports {name}.py.")
    if not Path(f"{name}.py").exists() and importlib.util.find_spec(name) is not None:
        raise ConfigError(f"--name {name}: Python has a module of that name already. Choose another.")


def _write(found: DataSummary, name: str, epochs: int) -> None:
    """Writes both files; ``ConfigError`` where one exists, before any is written."""
    try:
        texts = {
            Path(f"{name}.toml"): job_text(found, name, epochs).encode(),
            Path(f"{name}.py"): script_text(found, name, epochs).encode(),
        }
    except UnicodeEncodeError as error:
        raise ConfigError("A name in the path of the data is not in UTF-8, as a job file is. Rename it.") from error
    for path in texts:
        if path.exists() or path.is_symlink():
            raise ConfigError(f"'{path}' exists, and is not written over. Choose another --name.")
    for path, text in texts.items():
        try:
            with path.open("xb") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"'{path}' cannot be written: {error.strerror}.") from error
