"""The rules on collectives, each on its small scripts in ``tests/lint/cases``."""

import pytest
from tests.lint.case_files import cases, lines_of, marked_lines

from lockstep.lint.rules import collectives


@pytest.mark.parametrize(("number", "script"), list(cases("bad", module=collectives)))
def test_the_rule_finds_the_marked_lines_and_no_others(number, script):
    assert lines_of(number, script) == marked_lines(script) != []


@pytest.mark.parametrize(("number", "script"), list(cases("good", module=collectives)))
def test_the_rule_leaves_a_good_script_alone(number, script):
    assert lines_of(number, script) == marked_lines(script) == []
