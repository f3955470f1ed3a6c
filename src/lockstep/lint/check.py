"""The check of a script: every rule on it, except where a comment switches rules off.

``# lockstep: ignore[LS040]`` in the line of a finding switches that rule off, ``# lockstep: ignore`` all of them.
"""

from __future__ import annotations

import functools
import io
import re
import tokenize
from collections.abc import Iterable
from dataclasses import replace

from lockstep.errors import ConfigError, nearest
from lockstep.lint.finding import Finding, Hit, LintRule
from lockstep.lint.rules import collectives, gradients, launching, models, naming, sampling, saving
from lockstep.lint.script import parse, read_text
from lockstep.text import comma_separated

_GROUPS = (sampling, launching, collectives, gradients, models, saving, naming)
RULES: tuple[LintRule, ...] = tuple(
    sorted(
        (item for group in _GROUPS for item in vars(group).values() if isinstance(item, LintRule)),
        key=lambda item: item.number,
    )
)
_COMMENT = re.compile(r"#\s*lockstep:\s*ignore(?:\[([^\]]*)\])?")
_EVERY = "every"
_ASKED = re.compile(r"torchmetrics|ignite|\.micro_batches|on_output|on_micro_batch|on_samples|[( ]set\(|lstsq\(")
"""Words of a program, beside ``launching.COUNTS``, by which a rule of ``findings_in_a_run`` may find something."""


def check_file(path: str, rules: Iterable[LintRule] = RULES) -> list[Finding]:
    """Checks a file and returns its findings by line. Raises ``ConfigError`` where it is not a Python script."""
    return check_text(read_text(path), path, rules)


def check_text(text: str, path: str = "script.py", rules: Iterable[LintRule] = RULES) -> list[Finding]:
    """Checks a text and returns its findings by line; ``path`` is only the name in the findings."""
    script = parse(text, path)
    ignored = _ignored_rules(text, path)
    try:
        hits = [(r, *hit) for r in rules for hit in r.check(script) if not _is_ignored(hit, r, ignored)]
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply to check.") from error
    found = set()
    for r, node, wrong, fix in hits:
        place = path, node.lineno, node.col_offset + 1
        found.add(Finding(*place, r.number, r.name, _one_line(wrong), _one_line(fix)))
    return sorted(found)


@functools.lru_cache(maxsize=16)  # a program may make many runs
def findings_in_a_run(text: str, path: str) -> list[Finding]:
    """The findings of LS059 and LS067 to LS071 in a program that uses Lockstep; none if the file is not a script."""
    rules = (
        replace(launching.recipe_by_world_size, check=launching.by_world_size),
        replace(sampling.metric_of_one_share, check=sampling.of_one_share),
        launching.loss_of_all_combined,
        sampling.metric_of_all_combined,
        sampling.order_of_a_set,
        models.least_squares_driver,
    )
    asks = launching.COUNTS.search(text) or _ASKED.search(text)
    try:
        return check_text(text, path, rules) if asks else []
    except ConfigError:
        return []


def choose(select: str, ignore: str) -> tuple[LintRule, ...]:
    """Returns the rules that ``--select`` and ``--ignore`` leave: numbers, their beginnings, or names, with commas.

    Raises ``ConfigError`` if one of them names no rule.
    """
    chosen = _named(select, "--select") if select else set(RULES)
    return tuple(item for item in RULES if item in chosen - _named(ignore, "--ignore"))


def table(rules: Iterable[LintRule] = RULES) -> str:
    """Returns the rules as a Markdown table, as in ``docs/lint.md``."""
    lines = ["| number | name | what it finds | more precisely |", "|---|---|---|---|"]
    for item in rules:
        evidence = " ".join((item.check.__doc__ or "").split()).replace("``", "`").replace("|", "\\|")
        lines.append(f"| {item.number} | `{item.name}` | {item.summary} | {evidence} |")
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _named(text: str, option: str) -> set[LintRule]:
    found: set[LintRule] = set()
    for word in comma_separated(text):
        meant = [rule for rule in RULES if word == rule.name or rule.number.startswith(word.upper())]
        if not meant or word.upper() == "L":
            known = [rule.number for rule in RULES] + [rule.name for rule in RULES]
            close = nearest(word, known).partition(" Known:")[0]
            raise ConfigError(f"{option} {word}: no rule has this number or name.{close} See 'lockstep lint --rules'.")
        found.update(meant)
    return found


def _ignored_rules(text: str, path: str) -> dict[int, set[str]]:
    """The numbers of the rules that each line switches off, or ``every`` where it names none."""
    found: dict[int, set[str]] = {}
    known = {rule.number for rule in RULES}
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            match = _COMMENT.search(token.string) if token.type == tokenize.COMMENT else None
            if match:
                words = {word.strip().upper() for word in (match.group(1) or "").split(",")} - {""}
                found[token.start[0]] = words or {_EVERY}
    except (tokenize.TokenError, SyntaxError):
        pass  # the parser has accepted the file; what is read so far stands
    for line, numbers in found.items():
        for number in sorted(numbers - known - {_EVERY}):
            close = nearest(number, known).partition(" Known:")[0]
            raise ConfigError(f"{path}:{line} ignores {number}, which is not the number of a rule.{close}")
    return found


def _is_ignored(hit: Hit, rule: LintRule, ignored: dict[int, set[str]]) -> bool:
    """Looks for a comment in the first line of a finding, and in its last where it is one expression."""
    lines = {hit.node.lineno}
    if not hasattr(hit.node, "body"):
        lines.add(hit.node.end_lineno or hit.node.lineno)
    return any(ignored.get(line, set()) & {rule.number, _EVERY} for line in lines)
