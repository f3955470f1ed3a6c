"""The rules on models and schedules, each on its small scripts in ``tests/lint/cases``."""

import pytest
import torch
from tests.lint.case_files import cases, lines_of, marked_lines

from lockstep.lint.rules import models


@pytest.mark.parametrize(("number", "script"), list(cases("bad", module=models)))
def test_the_rule_finds_the_marked_lines_and_no_others(number, script):
    assert lines_of(number, script) == marked_lines(script) != []


@pytest.mark.parametrize(("number", "script"), list(cases("good", module=models)))
def test_the_rule_leaves_a_good_script_alone(number, script):
    assert lines_of(number, script) == marked_lines(script) == []


def public(names):
    return {name for name in names if not name.startswith("_")}


def test_every_public_name_of_a_wrapped_module_is_known():
    plain = public(dir(torch.nn.Module()))
    wrappers = public(dir(torch.nn.parallel.DistributedDataParallel)) | public(
        dir(torch.nn.DataParallel(torch.nn.Module()))
    )
    assert plain | wrappers <= models.MODULE_NAMES, sorted((plain | wrappers) - models.MODULE_NAMES)


def test_names_of_models_are_not_taken_for_names_of_the_wrapper():
    assert not {"generate", "config", "fc", "weight", "encoder", "loss"} & models.MODULE_NAMES
