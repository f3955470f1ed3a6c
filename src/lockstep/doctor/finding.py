"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Grade(Enum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and what to do about it."""

    grade: Grade
    subject: str
    found: str
    advice: str = ""
    """Empty where nothing is to be done."""

    @property
    def text(self) -> str:
        """The line for the terminal."""
        line = f"{self.grade.value:8} {self.subject:14} {self.found}"
        return f"{line}\n{'':24}-> {self.advice}" if self.advice else line


def ok(subject: str, found: str) -> Finding:
    """Nothing to be done."""
    return Finding(Grade.OK, subject, found)


def warning(subject: str, found: str, advice: str) -> Finding:
    """Training works, perhaps not well."""
    return Finding(Grade.WARNING, subject, found, advice)


def fault(subject: str, found: str, advice: str) -> Finding:
    """Training will fail."""
    return Finding(Grade.FAULT, subject, found, advice)
