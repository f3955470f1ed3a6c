"""What a single setting may be: small checks that return what is wrong with a value, or None."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from lockstep.errors import ConfigError, nearest

Check = Callable[[Any], str | None]

_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_DOTTED_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_PLAIN_NAME = re.compile(r"[\w-][\w.-]{0,99}")
_DEVICES = re.compile(r"auto|cpu|cpu:0*[1-9]\d*|0*[1-9]\d*|\d+,|\d+(,\d+)+,?")


def at_least(minimum: float) -> Check:
    """A finite number that is not below ``minimum``."""

    def check(value: float) -> str | None:
        return (
            None
            if math.isfinite(value) and value >= minimum
            else f"should be at least {minimum} and is {value}."
        )

    return check


def more_than(minimum: float) -> Check:
    """A finite number above ``minimum``."""

    def check(value: float) -> str | None:
        return (
            None
            if math.isfinite(value) and value > minimum
            else f"should be more than {minimum} and is {value}."
        )

    return check


def one_of(*names: str) -> Check:
    """One of the names; the nearest is offered for another."""

    def check(value: str) -> str | None:
        return None if value in names else f"{value!r} is not known.{nearest(value, names)}"

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


def plain_name(value: str) -> str | None:
    """A name that is a single part of a path and no option: letters, digits, ``-``, ``_`` and ``.``."""
    if not value or (_PLAIN_NAME.fullmatch(value) and not value.startswith("-")):
        return None
    return f"should be a plain name of letters, digits, '-', '_' and '.' and is {value!r}."


def devices(value: int | str) -> str | None:
    """A number of devices, ``auto``, ``cpu``, ``cpu:N`` or a list of device numbers, none twice."""
    if isinstance(value, int):
        return None if value >= 1 else f"should be at least 1 and is {value}."
    if not _DEVICES.fullmatch(value):
        return f"should be a number, 'auto', 'cpu', 'cpu:N' or a list like '0,5' and is {value!r}."
    numbers = [int(number) for number in value.rstrip(",").split(",") if number.isdecimal()]
    twice = sorted({number for number in numbers if numbers.count(number) > 1})
    return f"names device {', '.join(map(str, twice))} twice in {value!r}." if twice else None


def nearest_name(asked: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for an unknown name; where none is near, all public ones if they are few."""
    public = [name for name in known if not name.startswith("_")]
    close, _, everything = nearest(asked, public).partition(" Known:")
    return close or (f" Known:{everything}" if 0 < len(public) <= 20 else "")


def absent_module(asked: str, known: Iterable[str]) -> str:
    """Says that a top-level module is not there; names another only where it is a likely slip of the pen."""
    close = difflib.get_close_matches(asked, list(known), n=1, cutoff=0.8)
    advice = f"Did you mean {close[0]!r}?" if close else "Install what gives it, or mend the name."
    return f"there is no module {asked!r}. {advice}"


def field_problem(field: dataclasses.Field[Any], value: Any) -> str | None:
    """What is wrong with a value of the right type for a field, or None."""
    check = field.metadata.get("check")
    return check(value) if check is not None and value is not None else None


def check_fields(config: Any) -> None:
    """Raises one ``ConfigError`` that says everything that is wrong with a dataclass of settings."""
    wrong = []
    for field in dataclasses.fields(config):
        problem = field_problem(field, getattr(config, field.name))
        if problem:
            wrong.append(f"{type(config).__name__}.{field.name} {problem}")
    if wrong:
        raise ConfigError(" ".join(wrong))


class Checked:
    """Base of a dataclass of settings: every field is checked, and all that is wrong is said at once."""

    def __post_init__(self) -> None:
        """Raises ``ConfigError`` unless every field passes its check."""
        check_fields(self)
