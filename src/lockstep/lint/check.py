"""The check of a script: every rule on it, less what its comments switch off."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.errors import ConfigError, nearest
from lockstep.lint.catalogue import RULES
from lockstep.lint.comments import EVERY, ignored_rules
from lockstep.lint.finding import Finding, Hit, Rule
from lockstep.lint.source import parse, read_text


def check_file(path: str, rules: Iterable[Rule] = RULES) -> list[Finding]:
    """The findings in a file, by line. ``ConfigError`` where the file is not a Python script."""
    return check_text(read_text(path), path, rules)


def check_text(text: str, path: str = "script.py", rules: Iterable[Rule] = RULES) -> list[Finding]:
    """The findings in a text, by line; ``path`` is only what they are reported under."""
    script = parse(text, path)
    ignored = _checked(ignored_rules(text), path)
    try:
        found = [
            _finding(path, rule, hit)
            for rule in rules
            for hit in rule.check(script)
            if not _is_ignored(hit, rule, ignored)
        ]
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply to be checked.") from error
    return sorted(set(found))


def _finding(path: str, rule: Rule, hit: Hit) -> Finding:
    return Finding(
        path=path,
        line=hit.node.lineno,
        column=hit.node.col_offset + 1,
        rule=rule.number,
        name=rule.name,
        wrong=" ".join(hit.wrong.split()),
        mend=" ".join(hit.mend.split()),
    )


def _is_ignored(hit: Hit, rule: Rule, ignored: dict[int, set[str]]) -> bool:
    """A comment counts in the first line of a finding, and in its last where it is one expression."""
    lines = {hit.node.lineno}
    if not hasattr(hit.node, "body"):
        lines.add(hit.node.end_lineno or hit.node.lineno)
    return any(ignored.get(line, set()) & {rule.number, EVERY} for line in lines)


def _checked(ignored: dict[int, set[str]], path: str) -> dict[int, set[str]]:
    known = {rule.number for rule in RULES}
    for line, numbers in ignored.items():
        for number in sorted(numbers - known - {EVERY}):
            close = nearest(number, known).partition(" Known:")[0]
            raise ConfigError(f"{path}:{line} ignores {number}, which is not the number of a rule.{close}")
    return ignored
