"""The documents say what the code does: the table of rules, the counts of the study, torch's own names."""

from pathlib import Path

import torch

from lockstep.lint import table
from lockstep.lint.module_names import MODULE_NAMES

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_in_the_documents_is_the_one_that_is_printed():
    text = (DOCS / "lint.md").read_text()
    held = text.partition("<!-- rules -->\n")[2].partition("<!-- end of rules -->")[0]
    assert held == table(), "docs/lint.md: put the output of 'lockstep lint --rules' between the two marks"


def public(names):
    return {name for name in names if not name.startswith("_")}


def test_every_public_name_of_a_wrapped_module_is_known():
    plain = public(dir(torch.nn.Module()))
    wrappers = public(dir(torch.nn.parallel.DistributedDataParallel)) | public(
        dir(torch.nn.DataParallel(torch.nn.Module()))
    )
    assert plain | wrappers <= MODULE_NAMES, sorted((plain | wrappers) - MODULE_NAMES)


def test_names_of_models_are_not_taken_for_names_of_the_wrapper():
    assert not {"generate", "config", "fc", "weight", "encoder", "loss"} & MODULE_NAMES
