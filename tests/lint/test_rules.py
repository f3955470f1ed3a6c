"""Every rule on small scripts: what it must find, at which line, and what it must leave alone."""

import re
from pathlib import Path

import pytest

from lockstep.lint import RULES, check_text

CASES = Path(__file__).parent / "cases"
IMPORTS = """\
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
"""


def cases():
    """(rule, bad or good, title, script) of every case; a bad one marks the lines it is found in with ``# here``."""
    for path in sorted(CASES.glob("LS*.txt")):
        for block in re.split(r"^=== ", path.read_text(), flags=re.MULTILINE)[1:]:
            head, _, body = block.partition("\n")
            kind, _, title = head.partition(": ")
            yield pytest.param(path.stem, kind, IMPORTS + body, id=f"{path.stem} {kind}: {title}")


def found(number, text):
    return [finding.line for finding in check_text(text) if finding.rule == number]


@pytest.mark.parametrize(("number", "kind", "script"), list(cases()))
def test_the_rule_finds_the_marked_lines_and_no_others(number, kind, script):
    marked = [line for line, text in enumerate(script.splitlines(), start=1) if text.endswith("# here")]
    assert bool(marked) == (kind == "bad")
    assert found(number, script) == marked


@pytest.mark.parametrize(("number", "kind", "script"), [case for case in cases() if case.values[1] == "bad"])
def test_a_comment_in_the_line_switches_the_rule_off(number, kind, script):
    assert found(number, script.replace("# here", f"# lockstep: ignore[{number}]")) == []
    assert found(number, script.replace("# here", "# lockstep: ignore")) == []


def test_every_rule_has_cases_of_both_kinds():
    kinds = {}
    for case in cases():
        kinds.setdefault(case.values[0], set()).add(case.values[1])
    assert kinds == {rule.number: {"bad", "good"} for rule in RULES}


@pytest.mark.parametrize(("number", "kind", "script"), [case for case in cases() if case.values[1] == "bad"])
def test_a_finding_says_what_is_wrong_and_what_mends_it(number, kind, script):
    for finding in check_text(script):
        assert finding.wrong.endswith("."), finding
        assert finding.mend
        assert "\n" not in finding.wrong + finding.mend


def test_there_are_at_least_25_rules_with_numbers_and_names_of_their_own():
    assert len(RULES) >= 25
    assert len({rule.number for rule in RULES}) == len({rule.name for rule in RULES}) == len(RULES)
    assert all(re.fullmatch(r"LS0\d\d", rule.number) for rule in RULES)
    assert all(re.fullmatch(r"[a-z0-9-]+", rule.name) for rule in RULES)
    assert all(rule.summary.endswith(".") for rule in RULES)
