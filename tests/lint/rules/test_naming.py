"""The rules on names and options, each on its small scripts in ``tests/lint/cases``."""

import importlib
import inspect

import pytest
import torch
from tests.lint.case_files import cases, lines_of, marked_lines

from lockstep.lint.rules import naming


@pytest.mark.parametrize(("number", "script"), list(cases("bad", module=naming)))
def test_the_rule_finds_the_marked_lines_and_no_others(number, script):
    assert lines_of(number, script) == marked_lines(script) != []


@pytest.mark.parametrize(("number", "script"), list(cases("good", module=naming)))
def test_the_rule_leaves_a_good_script_alone(number, script):
    assert lines_of(number, script) == marked_lines(script) == []


@pytest.mark.parametrize("name", naming.KEYWORDS)
def test_the_keywords_are_those_of_the_installed_torch(name):
    home = {"init_process_group": torch.distributed, "DataLoader": torch.utils.data}.get(name, torch.nn.parallel)
    home = torch.utils.data.distributed if name == "DistributedSampler" else home
    found = inspect.signature(getattr(home, name)).parameters
    known = naming.KEYWORDS[name].split()
    assert {keyword for keyword in found if not keyword.startswith("_")} <= set(known)


def test_the_modules_are_modules():
    for name in naming.MODULES - {"torch.utils.tensorboard"}:
        assert inspect.ismodule(importlib.import_module(name)), name
