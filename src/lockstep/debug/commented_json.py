"""Reads JSON as editors write it, with comments and trailing commas, and tells where each part stands in the text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING_COMMA = re.compile(r'"(?:[^"\\\n]|\\.)*"|,(?=\s*[\]}])')
_SPACE = re.compile(r"\s*")
_MOST_DEPTH = 64


@dataclass(frozen=True)
class Part:
    """A value and the stretch of text that it stands in."""

    value: Any
    begin: int
    end: int


def blank(text: str) -> str:
    """The text with spaces in place of comments and trailing commas: plain JSON, and every place stays the same."""
    spaced = _TOKEN.sub(
        lambda token: token[0] if token[0][0] == '"' else re.sub(r"[^\n]", " ", token[0]), text
    )
    return _TRAILING_COMMA.sub(lambda token: " " if token[0] == "," else token[0], spaced)


def parse(text: str) -> Any:
    """The value; ``ValueError`` says where it cannot be read."""
    plain = blank(text)
    if _depth(plain) > _MOST_DEPTH:
        raise ValueError(f"it is nested more than {_MOST_DEPTH} deep")
    return json.loads(plain)


def members(text: str, begin: int) -> dict[str, Part]:
    """The members of the object that begins at a place, by name. The text is known to parse."""
    plain, found = blank(text), {}
    place = _after_space(plain, begin + 1)
    while plain[place] != "}":
        name, place = json.JSONDecoder().raw_decode(plain, place)
        place = _after_space(plain, _after_space(plain, place) + 1)
        value, end = json.JSONDecoder().raw_decode(plain, place)
        found[name] = Part(value, place, end)
        place = _next(plain, end)
    return found


def elements(text: str, begin: int) -> list[Part]:
    """The elements of the array that begins at a place. The text is known to parse."""
    plain, found = blank(text), []
    place = _after_space(plain, begin + 1)
    while plain[place] != "]":
        value, end = json.JSONDecoder().raw_decode(plain, place)
        found.append(Part(value, place, end))
        place = _next(plain, end)
    return found


def beginning(text: str) -> int:
    """Where the first value begins."""
    return _after_space(blank(text), 0)


def _next(plain: str, place: int) -> int:
    place = _after_space(plain, place)
    return _after_space(plain, place + 1) if plain[place] == "," else place


def _after_space(plain: str, place: int) -> int:
    found = _SPACE.match(plain, place)
    return place if found is None else found.end()


def _depth(plain: str) -> int:
    depth = deepest = 0
    for mark in re.sub(r'"(?:[^"\\\n]|\\.)*"', "", plain):
        depth += (mark in "[{") - (mark in "]}")
        deepest = max(deepest, depth)
    return deepest
