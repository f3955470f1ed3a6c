"""Configurations of VS Code's debugger for a script or a job, and how they are merged into its settings files.

    one rank in this process     launch   the program itself, without a launcher
    rank R of N                  attach   to the address at which the started run says that rank R waits
    a running rank               attach   to the address that `lockstep debug --attach` printed

The second needs a task that starts the run and tells the editor when the rank waits.

A settings file is JSON with comments and trailing commas. ``merge`` finds an entry by its name, replaces it or appends
it, and leaves every other character of the file as it is. An entry with a comment in it is never replaced.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SOURCE_SUFFIXES
from pathlib import Path, PurePath
from typing import Any

from lockstep.core.atomic import file_aside
from lockstep.errors import ConfigError
from lockstep.launch.debugger import DEFAULT_PORT
from lockstep.text import plural

_COMMON = {"type": "debugpy", "justMyCode": True, "subProcess": False}
_WORKSPACE = "${workspaceFolder}"
_ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""Makes ``lockstep train`` train in its own process, and a script of torchrun's open a process group of one."""
_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING_COMMA = re.compile(r'"(?:[^"\\\n]|\\.)*"|,(?=\s*[\]}])')
_SPACE = re.compile(r"\s*")
_MOST_DEPTH = 64
_INDENT = "    "
_LARGEST = 1 << 20
_START = '{\n    "version": "%s",\n    "%s": []\n}\n'

Entry = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class DebugPlan:
    """The script or job to debug, and the rank of it."""

    target: str
    """A script (``.py``) relative to the folder that the editor opens, or a job of ``lockstep train``."""
    arguments: tuple[str, ...] = ()
    devices: str = "2"
    """As in ``--devices``."""
    rank: int = 0
    port: int = DEFAULT_PORT

    @property
    def is_script(self) -> bool:
        """True for a script, False for a job."""
        return PurePath(self.target).suffix in SOURCE_SUFFIXES

    @property
    def name(self) -> str:
        """The name of the target in the configurations."""
        return PurePath(self.target).name

    @property
    def of_ranks(self) -> str:
        """The name of the configuration and of the task with several ranks."""
        return f"Lockstep: {self.name}, rank {self.rank} of --devices {self.devices}"


def launch_entries(plan: DebugPlan) -> list[dict[str, Any]]:
    """The entries of ``configurations`` in ``launch.json``."""
    address = {"host": "127.0.0.1", "port": plan.port}
    attach = {"request": "attach", "connect": address, **_COMMON}
    running = "Lockstep: rank that 'lockstep debug --attach' has asked"
    program: dict[str, Any] = {"program": f"{_WORKSPACE}/{plan.target}", "args": list(plan.arguments)}
    if not plan.is_script:
        program = {"module": "lockstep", "args": ["train", plan.target, *plan.arguments]}
    alone = {"name": f"Lockstep: {plan.name}, one rank in this process", "request": "launch", **program}
    return [
        {**alone, "env": dict(_ALONE), "console": "integratedTerminal", "cwd": _WORKSPACE, **_COMMON},
        {"name": plan.of_ranks, **attach, "preLaunchTask": plan.of_ranks},
        {"name": running, **attach},
    ]


def task_entries(plan: DebugPlan) -> list[dict[str, Any]]:
    """The entries of ``tasks`` in ``tasks.json``: the run whose rank waits for the debugger."""
    started = ["--devices", plan.devices, "--debug-rank", str(plan.rank), "--debug-port", str(plan.port)]
    target = [plan.target, *plan.arguments]
    words = ["run", *started, *target] if plan.is_script else ["train", *target, *started]
    return [
        {
            "label": plan.of_ranks,
            "type": "process",
            "command": "${command:python.interpreterPath}",
            "args": ["-m", "lockstep", *words],
            "options": {"cwd": _WORKSPACE},
            "isBackground": True,
            "problemMatcher": {
                "pattern": {"regexp": "^lockstep: ((?!rank).*)$", "kind": "file", "file": 1, "message": 1},
                "background": {
                    "activeOnStart": True,
                    "beginsPattern": "^lockstep: starts",
                    "endsPattern": "^lockstep: (rank \\d+ waits for a debugger at|(?!rank))",
                },
            },
        }
    ]


def merge_into(path: Path, key: str, label: str, entries: Sequence[Entry], version: str) -> bool:
    """Writes entries into an array of a settings file, which is created with its folder where it does not exist.

    Args:
        path: the file.
        key: the array, such as ``configurations``.
        label: the member that names an entry, such as ``name``.
        entries: each with its label.
        version: the version of the format, for a new file.

    Returns:
        True if the file changed.

    Raises:
        ConfigError: the file cannot be read or merged, or a comment would be lost. It is unchanged then.
    """
    text = _read(path) or _START % (version, key)
    try:
        merged = merge(text, key, label, entries)
    except ValueError as error:
        raise ConfigError(
            f"Cannot add {plural(len(entries), 'configuration')} to {path}: {error}. Nothing was changed. "
            "Fix the file or move it away."
        ) from error
    if path.exists() and merged == text:
        return False
    _write(path, merged)
    return True


def merge(text: str, key: str, label: str, entries: Sequence[Entry]) -> str:
    """Returns the text with the entries in it. Raises ``ValueError`` where they cannot be merged."""
    content = parse(text)
    if not isinstance(content, dict) or not isinstance(content.get(key, []), list):
        raise ValueError(f"it is not an object whose {key!r} is a list")
    if key not in content:
        text = _insert_member(text, key)
    for entry in entries:
        text = _put(text, key, label, entry)
    expected = {**content, key: _merged(content.get(key, []), label, entries)}
    if parse(text) != expected:  # for example two members of one name
        raise ValueError(f"its {key!r} is ambiguous")
    return text


def _merged(present: Sequence[Any], label: str, entries: Sequence[Entry]) -> list[Any]:
    """The content of the array after the merge."""
    new = {entry[label]: dict(entry) for entry in entries}
    return [*[new.pop(_label_of(value, label), value) for value in present], *new.values()]


def _label_of(value: Any, label: str) -> str:
    name = value.get(label) if isinstance(value, dict) else None
    return name if isinstance(name, str) else ""


def _put(text: str, key: str, label: str, entry: Entry) -> str:
    plain = _blank(text)
    array = _items(plain, _after_space(plain, 0))[key]
    present = list(_items(plain, array.begin).values())
    shown = json.dumps(entry, indent=len(_INDENT), ensure_ascii=False).replace("\n", "\n" + 2 * _INDENT)
    for part in present:
        if _label_of(part.value, label) == entry[label]:
            return text if part.value == entry else _replace(text, part, entry[label], shown)
    if present:
        place, inserted = present[-1].end, f",\n{2 * _INDENT}{shown}"
    else:
        place, inserted = array.begin + 1, f"\n{2 * _INDENT}{shown}\n{_INDENT}"
    return text[:place] + inserted + text[place:]


def _replace(text: str, part: JsonSpan, name: str, shown: str) -> str:
    written, meant = (each[part.begin : part.end].replace(",", " ").split() for each in (text, _blank(text)))
    if written != meant:
        raise ValueError(f"the entry {name!r} has a comment in it, which would be lost; rename the entry")
    return text[: part.begin] + shown + text[part.end :]


def _insert_member(text: str, key: str) -> str:
    plain = _blank(text)
    begin = _after_space(plain, 0)
    present = _items(plain, begin)
    place = max((part.end for part in present.values()), default=begin + 1)
    return text[:place] + ("," if present else "") + f'\n{_INDENT}"{key}": []' + text[place:]


def _read(path: Path) -> str:
    """The text of the file; empty where it does not exist or is blank."""
    try:
        if path.stat().st_size > _LARGEST:
            raise ConfigError(f"{path} is larger than 1 MiB, so it is not a settings file. Move it away.")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}. Fix it or move it away.") from error
    return text if text.strip() else ""


def _write(path: Path, text: str) -> None:
    """Replaces the file atomically: after a crash it is the old one or the new one."""
    target = path.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with file_aside(target) as aside:
            aside.write_text(text, encoding="utf-8")
            if target.exists():
                shutil.copymode(target, aside)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. It is unchanged.") from error


@dataclass(frozen=True)
class JsonSpan:
    """A JSON value and the positions of the text that it spans."""

    value: Any
    begin: int
    end: int


def _blank(text: str) -> str:
    """Replaces comments and trailing commas by spaces: plain JSON with unchanged positions."""
    spaced = _TOKEN.sub(lambda token: token[0] if token[0][0] == '"' else re.sub(r"[^\n]", " ", token[0]), text)
    return _TRAILING_COMMA.sub(lambda token: " " if token[0] == "," else token[0], spaced)


def parse(text: str) -> Any:
    """Parses JSON with comments and trailing commas. Raises ``ValueError`` where it cannot."""
    plain = _blank(text)
    if _depth(plain) > _MOST_DEPTH:
        raise ValueError(f"it is nested more than {_MOST_DEPTH} deep")
    return json.loads(plain)


def _items(plain: str, begin: int) -> dict[str | int, JsonSpan]:
    """The members of the object at a position by name, or the elements of the array by number.

    ``plain`` is JSON, as from ``_blank``.
    """
    decode, found = json.JSONDecoder().raw_decode, dict[str | int, JsonSpan]()
    place = _after_space(plain, begin + 1)
    while plain[place] not in "}]":
        name: str | int = len(found)
        if plain[begin] == "{":
            name, place = decode(plain, place)
            place = _after_space(plain, _after_space(plain, place) + 1)
        value, end = decode(plain, place)
        found[name] = JsonSpan(value, place, end)
        place = _after_space(plain, end)
        place = _after_space(plain, place + 1) if plain[place] == "," else place
    return found


def _after_space(plain: str, place: int) -> int:
    found = _SPACE.match(plain, place)
    return place if found is None else found.end()


def _depth(plain: str) -> int:
    depth = deepest = 0
    for mark in re.sub(r'"(?:[^"\\\n]|\\.)*"', "", plain):
        depth += (mark in "[{") - (mark in "]}")
        deepest = max(deepest, depth)
    return deepest
