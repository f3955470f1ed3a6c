"""All rules together: comments that switch them off, their numbers and texts, and the table in the documentation."""

import re
from pathlib import Path

import pytest
from tests.lint.case_files import cases, lines_of

from lockstep.errors import ConfigError
from lockstep.lint import RULES, check_text, table

PAGE = Path(__file__).parents[2] / "docs" / "lint.md"


@pytest.mark.parametrize(("number", "script"), list(cases("bad")))
def test_a_comment_in_the_line_switches_the_rule_off(number, script):
    assert lines_of(number, script.replace("# here", f"# lockstep: ignore[{number}]")) == []
    assert lines_of(number, script.replace("# here", "# lockstep: ignore")) == []


@pytest.mark.parametrize(("number", "script"), list(cases("bad")))
def test_a_finding_says_what_is_wrong_and_how_to_fix_it(number, script):
    findings = check_text(script)
    assert number in {finding.rule for finding in findings}
    for finding in findings:
        assert finding.wrong.endswith("."), finding
        assert finding.fix
        assert "\n" not in finding.wrong + finding.fix


@pytest.mark.parametrize("kind", ["bad", "good"])
def test_every_rule_has_cases_of_both_kinds(kind):
    assert {case.values[0] for case in cases(kind)} == {rule.number for rule in RULES}


def test_there_are_at_least_25_rules_with_numbers_and_names_of_their_own():
    assert len(RULES) >= 25
    assert len({rule.number for rule in RULES}) == len({rule.name for rule in RULES}) == len(RULES)
    assert all(re.fullmatch(r"LS0\d\d", rule.number) for rule in RULES)
    assert all(re.fullmatch(r"[a-z0-9-]+", rule.name) for rule in RULES)
    assert all(rule.summary.endswith(".") for rule in RULES)


def test_the_table_in_the_documentation_is_the_one_that_is_printed():
    held = PAGE.read_text().partition("<!-- rules -->\n")[2].partition("<!-- end of rules -->")[0]
    assert held == table(), "docs/lint.md: put the output of 'lockstep lint --rules' between the two marks"


def test_a_comment_that_ignores_no_rule_is_refused():
    with pytest.raises(ConfigError, match=r"script.py:2 ignores LS999, which is not the number of a rule"):
        check_text("x = 1\ny = 2  # lockstep: ignore[LS999]\n")


def test_a_comment_of_another_rule_switches_nothing_off():
    line = 'import os\nos.environ["CUDA_VISIBLE_DEVICES"] == "0"  # lockstep: ignore[{}]\n'
    assert [finding.rule for finding in check_text(line.format("LS011"))] == ["LS010"]
    assert check_text(line.format("LS011, ls010")) == []


def test_the_words_of_the_comment_in_a_string_are_no_comment():
    text = 'import os\nos.environ["CUDA_VISIBLE_DEVICES"] == "# lockstep: ignore"\n'
    assert [finding.rule for finding in check_text(text)] == ["LS010"]
