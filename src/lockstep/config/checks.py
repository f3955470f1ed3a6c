"""Checks of single settings: each returns what is wrong with a value, or None.

``check_fields`` checks a whole dataclass by the types of its fields, and ``from_plain`` reads one back from JSON so.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import os
import re
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from types import UnionType
from typing import Any

from lockstep.errors import ConfigError, nearest

Check = Callable[[Any], str | None]
KeyPath = tuple[str | int, ...]

_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_DOTTED_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_PLAIN_NAME = re.compile(r"[\w-][\w.-]*")
_DEVICES = re.compile(
    r"auto|(?P<cpu>cpu)(:(?P<processes>\d{1,9}))?|(?P<count>\d{1,9})|(?P<indices>\d{1,9}(,\d{1,9})*,?)"
)
_MOST_PROCESSES = 4096
"""Of a host, as devices or as loader workers."""
LONGEST = 1e9
"""Seconds that torch can wait, whose clock has 63 bits for nanoseconds."""


@dataclass(frozen=True)
class Problem:
    """A problem with the value at one key path."""

    path: KeyPath
    message: str

    @property
    def text(self) -> str:
        """The sentence: the key as the user writes it, then what is wrong."""
        return f"{spell(self.path)} {self.message}" if self.path else self.message


def spell(path: KeyPath) -> str:
    """A key path as it is written after ``--set``."""
    return ".".join(str(part) for part in path)


def refuse(problems: Iterable[Problem]) -> None:
    """Raises one ``ConfigError`` that says all problems, if there are any."""
    if texts := [problem.text for problem in problems]:
        raise ConfigError(" ".join(texts))


def at_least(minimum: float) -> Check:
    """A finite number that is not below ``minimum``."""
    return _finite(lambda value: value >= minimum, f"at least {minimum}")


def more_than(minimum: float) -> Check:
    """A finite number above ``minimum``."""
    return _finite(lambda value: value > minimum, f"more than {minimum}")


def between(low: float, high: float) -> Check:
    """A number above ``low`` and below ``high``."""
    return _finite(lambda value: low < value < high, f"above {low} and below {high}")


def seconds(*, or_none: bool = False) -> Check:
    """A time that a process can wait; 0 too where that stands for none."""
    if or_none:
        return _finite(lambda value: 0 <= value <= LONGEST, f"at least 0 and at most {LONGEST:,.0f}")
    return _finite(lambda value: 0 < value <= LONGEST, f"more than 0 and at most {LONGEST:,.0f}")


def _finite(fits: Callable[[float], bool], words: str) -> Check:
    def check(value: float) -> str | None:
        return None if math.isfinite(value) and fits(value) else f"should be {words} and is {value}."

    return check


def seed(value: int) -> str | None:
    """A seed that 63 bits hold."""
    return None if 0 <= value < 1 << 63 else f"should be at least 0 and below 2^63 and is {value}."


def threads(value: int) -> str | None:
    """A number of threads that a process can start."""
    most = _MOST_PROCESSES
    return None if 1 <= value <= most else f"should be at least 1 and at most {most} and is {value}."


def one_of(*values: str | bool) -> Check:
    """One of the values; the nearest is offered for another name."""
    names = [value for value in values if isinstance(value, str)]

    def check(value: str | bool) -> str | None:
        return None if value in values else f"{value!r} is not known.{nearest(str(value), names)}"

    return check


def import_path(value: str) -> str | None:
    """An import path with a colon between module and name."""
    if _IMPORT_PATH.fullmatch(value):
        return None
    hint = ""
    if _DOTTED_PATH.fullmatch(value):
        module, _, name = value.rpartition(".")
        hint = f" Did you mean '{module}:{name}'?"
    return f"should be an import path like 'package.module:name' and is {value!r}.{hint}"


def plain_name(most: int) -> Check:
    """A name that is a single part of a path and no option: letters, digits, ``-``, ``_`` and ``.``; ``most`` bytes."""

    def check(value: str) -> str | None:
        if not _PLAIN_NAME.fullmatch(value) or value.startswith("-"):
            return f"should be a plain name of letters, digits, '-', '_' and '.' and is {value!r:.200}."
        size = len(value.encode())
        return None if size <= most else f"should have at most {most} bytes and has {size}: {value!r:.60}..."

    return check


def file_path(value: object) -> str | None:
    """A path that a file can have. A boolean, which stands for a place that Lockstep chooses, is one, too."""
    if isinstance(value, bool):
        return None
    if not isinstance(value, str | Path):
        return f"is {value!r:.60}, and no path."
    try:
        name = os.fsencode(value)
    except UnicodeEncodeError:
        name = b"\0"
    if b"\0" in name:
        return f"should be a path and is {str(value)!r:.200}, with a character that no path has."
    if len(name) >= 4096 or max(map(len, name.split(b"/"))) > 255:
        return f"should be a path and is longer than one can be: {str(value)!r:.60}..."
    try:
        Path(value).expanduser()
    except RuntimeError:
        return f"is {str(value)!r}, and there is no such home folder. Write the whole path."
    return None


def unless_empty(check: Check) -> Check:
    """The same check, of a text that may be empty too."""
    return lambda value: None if value == "" else check(value)


def devices(value: int | str) -> str | None:
    """A number of devices, ``auto``, ``cpu``, ``cpu:N`` or a list of device numbers, none twice."""
    found = device_request(value)
    return found if isinstance(found, str) else None


def workers(value: int | str) -> str | None:
    """A number of processes, which may be 0, or ``auto``."""
    if value == "auto" or (isinstance(value, int) and 0 <= value <= _MOST_PROCESSES):
        return None
    return f"should be a number of processes from 0 to {_MOST_PROCESSES}, or 'auto', and is {value!r:.60}."


@dataclass(frozen=True)
class DeviceRequest:
    """Devices as a user asks for them."""

    count: int | None = None
    """Number of devices; None for all there are."""
    is_cpu: bool = False
    """True: CPU processes, even on a host with GPUs."""
    indices: tuple[int, ...] = ()
    """These of the visible GPUs, if any are named."""


def device_request(value: int | str) -> DeviceRequest | str:
    """Parses a setting of devices; returns the problem, as the end of a sentence, if it has one."""
    found = _DEVICES.fullmatch(str(value).strip())
    if not found:
        return f"should be a number, 'auto', 'cpu', 'cpu:N' or a list like '0,5' and is {value!r:.60}."
    indices = tuple(int(index) for index in (found["indices"] or "").split(",") if index)
    count = found["count"] or found["processes"]
    if count and int(count) < 1:
        return f"should ask for at least 1 process and is {value!r}. The GPU with index 0 alone is '0,'."
    if count and int(count) > _MOST_PROCESSES:
        return f"should ask for at most {_MOST_PROCESSES} processes of a host and is {value!r}."
    return DeviceRequest(int(count) if count else None, found["cpu"] is not None, indices)


def nearest_name(asked: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for an unknown name; where none is near, all public ones if they are few."""
    public = [name for name in known if not name.startswith("_")]
    close, _, everything = nearest(asked, public).partition(" Known:")
    return close or (f" Known:{everything}" if 0 < len(public) <= 20 else "")


def near_path(path: str | Path) -> str:
    """`` Did you mean 'train.py'?`` where the folder of a path has an entry with a similar name; else empty."""
    asked = Path(path)
    try:
        names = [entry.name for entry in islice(asked.parent.iterdir(), 1000) if entry.name != asked.name]
    except (OSError, ValueError):  # the folder is not there either, or the name has a zero byte
        return ""
    close = difflib.get_close_matches(asked.name, names, n=1, cutoff=0.7)
    return f" Did you mean {str(asked.parent / close[0])!r}?" if close else ""


def absent_module(asked: str, known: Iterable[str]) -> str:
    """Says that a top-level module is not there; names another only where it is a likely slip of the pen."""
    close = difflib.get_close_matches(asked, list(known), n=1, cutoff=0.8)
    advice = f"Did you mean {close[0]!r}?" if close else "Install the package that provides it, or correct the name."
    return f"there is no module {asked!r}. {advice}"


@cache
def field_types(cls: Hashable) -> dict[str, Any]:
    """The types of a dataclass's fields, by their names."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(typing.cast(Any, cls))}


def from_plain(kind: Any, value: Any) -> Any:
    """A value of a type, from what ``dataclasses.asdict`` and JSON have made of it.

    Of unions it knows those of one type and None; a value of any other union is taken as it is.
    """
    if kind in _NAMES:
        return kind(value)
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        types = field_types(typing.cast(Hashable, kind))
        return typing.cast(type, kind)(**{name: from_plain(types[name], each) for name, each in value.items()})
    if isinstance(kind, UnionType) and type(None) in options:
        return None if value is None else from_plain(options[0], value)
    if origin is tuple and Ellipsis not in options:
        return tuple(from_plain(*pair) for pair in zip(options, value, strict=True))
    if origin in (tuple, list):
        return origin(from_plain(options[0], each) for each in value)
    if origin in (dict, Mapping):
        return {from_plain(options[0], key): from_plain(options[1], each) for key, each in value.items()}
    return value if kind is Any or isinstance(kind, UnionType) else kind(value)


_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


def spell_types(kinds: tuple[Any, ...]) -> str:
    """Plain types in words, as in "a number or a string"."""
    return " or ".join(_NAMES[kind] for kind in kinds if kind in _NAMES)


def python_type_problem(kind: Any, value: Any) -> str | None:
    """The problem with a value that a script gives for a field: it is not the number, string or boolean asked for.

    Numbers of NumPy are numbers. Fields of other types are not looked at.
    """
    wanted = typing.get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if kind == tuple[str, ...]:
        fits = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        return None if fits else f"should be a list of strings and is {value!r}."
    if not all(each in (*_NAMES, Path, type(None)) for each in wanted):
        return None
    if isinstance(value, bool):
        fits = bool in wanted
    elif isinstance(value, numbers.Real):
        fits = float in wanted or (int in wanted and isinstance(value, numbers.Integral))
    else:
        fits = isinstance(value, wanted)
    return None if fits else f"should be {spell_types(wanted)} and is {value!r}."


def field_problem(field: dataclasses.Field[Any], value: Any) -> str | None:
    """The problem with a value of the right type for a field, or None."""
    check = field.metadata.get("check")
    return check(value) if check is not None and value is not None else None


def check_fields(config: Any, prefix: str | None = None) -> None:
    """Raises one ``ConfigError`` that says everything that is wrong with a dataclass of settings.

    Args:
        prefix: stands before the names of its fields; by default that of its class.
    """
    prefix = f"{type(config).__name__}." if prefix is None else prefix
    known: dict[str, Any] = field_types(typing.cast(Hashable, type(config)))
    problems: list[Problem] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        problem = python_type_problem(known[field.name], value) or field_problem(field, value)
        problems += [Problem((prefix + field.name,), problem)] if problem else []
    refuse(problems)


class CheckedOptions:
    """Base of a dataclass of settings: every field is checked, and all that is wrong is said at once."""

    def __post_init__(self) -> None:
        """Raises ``ConfigError`` unless every field passes its check."""
        check_fields(self)
