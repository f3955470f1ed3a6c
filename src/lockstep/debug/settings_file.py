"""Puts entries into an editor's settings file and leaves every other character of it as it is.

An entry is known by its name: one of that name is replaced, a new one comes last. Comments of the user stay; an entry
that would have to be replaced and holds one is refused.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.debug import commented_json
from lockstep.debug.commented_json import Part
from lockstep.errors import ConfigError

_INDENT = "    "
_LARGEST = 1 << 20
_START = '{\n    "version": "%s",\n    "%s": []\n}\n'

Entry = Mapping[str, Any]


def merge_into(path: Path, key: str, label: str, entries: Sequence[Entry], version: str) -> bool:
    """Writes the entries into the array ``key`` of a file, which is made where there is none.

    Args:
        path: of the file; its folder is made too.
        key: of the array, such as ``configurations``.
        label: the member that names an entry, such as ``name``.
        entries: each with its label.
        version: of the format, for a new file.

    Returns:
        Whether the file has changed.

    Raises:
        ConfigError: the file cannot be read, is not such a file, or a comment would be lost. It is untouched then.
    """
    text = _read(path) or _START % (version, key)
    try:
        merged = merge(text, key, label, entries)
    except ValueError as error:
        raise ConfigError(
            f"{path} was to take {len(entries)} configurations and cannot: {error}. Mend it or move it away; nothing "
            "was changed."
        ) from error
    if path.exists() and merged == text:
        return False
    _write(path, merged)
    return True


def merge(text: str, key: str, label: str, entries: Sequence[Entry]) -> str:
    """The text with the entries in it; ``ValueError`` says why there can be none."""
    content = commented_json.parse(text)
    if not isinstance(content, dict) or not isinstance(content.get(key, []), list):
        raise ValueError(f"it is not an object whose {key!r} is a list")
    if key not in content:
        text = _insert_member(text, key)
    for entry in entries:
        text = _put(text, key, label, entry)
    expected = {**content, key: _merged(content.get(key, []), label, entries)}
    if commented_json.parse(text) != expected:  # two members of one name, for one
        raise ValueError(f"its {key!r} cannot be told apart from something else in it")
    return text


def _merged(present: Sequence[Any], label: str, entries: Sequence[Entry]) -> list[Any]:
    """What the array shall hold."""
    new = {entry[label]: dict(entry) for entry in entries}
    kept = [new.pop(_label_of(value, label), value) for value in present]
    return [*kept, *new.values()]


def _label_of(value: Any, label: str) -> str:
    name = value.get(label) if isinstance(value, dict) else None
    return name if isinstance(name, str) else ""


def _put(text: str, key: str, label: str, entry: Entry) -> str:
    array = commented_json.members(text, commented_json.beginning(text))[key]
    present = commented_json.elements(text, array.begin)
    shown = json.dumps(entry, indent=len(_INDENT), ensure_ascii=False).replace("\n", "\n" + 2 * _INDENT)
    for part in present:
        if _label_of(part.value, label) == entry[label]:
            return text if part.value == entry else _replace(text, part, entry[label], shown)
    if present:
        place, inserted = present[-1].end, f",\n{2 * _INDENT}{shown}"
    else:
        place, inserted = array.begin + 1, f"\n{2 * _INDENT}{shown}\n{_INDENT}"
    return text[:place] + inserted + text[place:]


def _replace(text: str, part: Part, name: str, shown: str) -> str:
    plain = commented_json.blank(text)
    written, meant = (_marks(each[part.begin : part.end]) for each in (text, plain))
    if written != meant:
        raise ValueError(
            f"the entry {name!r} holds a comment, which would be lost; give the entry another name"
        )
    return text[: part.begin] + shown + text[part.end :]


def _marks(stretch: str) -> str:
    """All but spaces and commas."""
    return "".join(stretch.replace(",", " ").split())


def _insert_member(text: str, key: str) -> str:
    begin = commented_json.beginning(text)
    present = commented_json.members(text, begin)
    place = max((part.end for part in present.values()), default=begin + 1)
    return text[:place] + ("," if present else "") + f'\n{_INDENT}"{key}": []' + text[place:]


def _read(path: Path) -> str:
    """The text of the file; empty where there is none, or nothing in it."""
    try:
        if path.stat().st_size > _LARGEST:
            raise ConfigError(f"{path} is larger than 1 MiB, which is no settings file. Move it away.")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}. Mend it or move it away.") from error
    return text if text.strip() else ""


def _write(path: Path, text: str) -> None:
    """Replaces the file as a whole; a reader, or a crash, sees the old one or the new one."""
    target = path.resolve()
    temporary = ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(target.stat().st_mode & 0o777 if target.exists() else 0o644)
        Path(temporary).replace(target)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}. It is as it was.") from error
