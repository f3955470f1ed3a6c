"""All rules, in the order of their numbers, and the table of them."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.errors import ConfigError, nearest
from lockstep.lint.finding import Rule
from lockstep.lint.rules import (
    accumulation,
    collectives,
    devices,
    gradients,
    launching,
    models,
    once,
    ranks_apart,
    sampling,
    saving,
    scaling,
    schedules,
    sharing,
)

_GROUPS = (
    sampling,
    sharing,
    devices,
    launching,
    collectives,
    ranks_apart,
    scaling,
    accumulation,
    gradients,
    models,
    saving,
    once,
    schedules,
)
RULES: tuple[Rule, ...] = tuple(
    sorted(
        (item for group in _GROUPS for item in vars(group).values() if isinstance(item, Rule)),
        key=lambda item: item.number,
    )
)


def choose(select: str, ignore: str) -> tuple[Rule, ...]:
    """The rules that are left by ``--select`` and ``--ignore``: numbers or beginnings, separated by commas.

    ``ConfigError`` where one of them is no rule's number, name, or the beginning of a number.
    """
    chosen = _named(select, "--select") if select else set(RULES)
    return tuple(item for item in RULES if item in chosen - _named(ignore, "--ignore"))


def table(rules: Iterable[Rule] = RULES) -> str:
    """The rules as a Markdown table; ``docs/lint.md`` holds it."""
    rows = [f"| {item.number} | `{item.name}` | {item.summary} | {_evidence(item)} |" for item in rules]
    return (
        "\n".join(["| number | name | what it finds | more precisely |", "|---|---|---|---|", *rows]) + "\n"
    )


def _evidence(item: Rule) -> str:
    """What a rule wants to see before it speaks: the words of its check's docstring, in one line."""
    text = " ".join((item.check.__doc__ or "").split()).replace("``", "`")
    return text.replace("|", "\\|")


def _named(text: str, option: str) -> set[Rule]:
    found: set[Rule] = set()
    for word in (part.strip() for part in text.split(",")):
        if not word:
            continue
        meant = [rule for rule in RULES if word == rule.name or rule.number.startswith(word.upper())]
        if not meant or word.upper() in ("L", ""):
            known = [rule.number for rule in RULES] + [rule.name for rule in RULES]
            close = nearest(word, known).partition(" Known:")[0]
            raise ConfigError(
                f"{option} {word}: no rule has this number or name.{close} See 'lockstep lint --rules'."
            )
        found.update(meant)
    return found
