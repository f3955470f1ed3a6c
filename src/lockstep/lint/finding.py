"""What a rule finds, and the rule itself."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.lint.script import Script


class Hit(NamedTuple):
    """A place that a rule objects to: the node, what is wrong there, and the line that mends it."""

    node: ast.expr | ast.stmt
    wrong: str
    mend: str


Check = Callable[[Script], Iterator[Hit]]


@dataclass(frozen=True)
class Rule:
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
    mend: str

    def text(self) -> str:
        """The finding as it is printed: the place and what is wrong, then what mends it."""
        place = f"{self.path}:{self.line}:{self.column}"
        return f"{place}: {self.rule} {self.name}: {self.wrong}\n    mend: {self.mend}"


def rule(number: str, name: str, summary: str) -> Callable[[Check], Rule]:
    """Makes a ``Rule`` of the function that follows; the function yields its hits in any order."""

    def decorate(check: Check) -> Rule:
        return Rule(number=number, name=name, summary=summary, check=check)

    return decorate
