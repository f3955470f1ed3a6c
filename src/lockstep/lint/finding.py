"""Rules, the places that they object to, and the findings that are reported."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.lint.script import Script


class Hit(NamedTuple):
    """A place that a rule objects to: the node, what is wrong there, and the line that fixes it."""

    node: ast.expr | ast.stmt
    wrong: str
    fix: str


Check = Callable[[Script], Iterator[Hit]]


@dataclass(frozen=True)
class LintRule:
    """A rule: its number, its name, one sentence on what it finds, and the function that finds it."""

    number: str
    name: str
    summary: str
    check: Check


@dataclass(frozen=True, order=True)
class Finding:
    """One finding of one rule in one file; lines and columns count from 1."""

    path: str
    line: int
    column: int
    rule: str
    name: str
    wrong: str
    fix: str

    def text(self) -> str:
        """The finding as it is printed: the place and what is wrong, then the fix."""
        place = f"{self.path}:{self.line}:{self.column}"
        return f"{place}: {self.rule} {self.name}: {self.wrong}\n    fix: {self.fix}"


def rule(number: str, summary: str) -> Callable[[Check], LintRule]:
    """Makes a rule of a function, which yields its hits in any order and gives the rule its name."""

    def decorate(check: Check) -> LintRule:
        return LintRule(number, check.__name__.replace("_", "-"), summary, check)

    return decorate
