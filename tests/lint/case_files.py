"""Reads ``cases/LS*.txt``: small scripts for every rule, and the lines in which it must find something."""

import re
from pathlib import Path

import pytest

from lockstep.lint import LintRule, check_text

CASES = Path(__file__).parent / "cases"
IMPORTS = """\
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
"""


def cases(*kinds, module=None):
    """(rule, script) of every case, or of those of a module's rules; a bad one marks its lines with ``# here``."""
    for path in sorted(CASES.glob("LS*.txt")):
        if module is not None and path.stem not in numbers(module):
            continue
        for block in re.split(r"^=== ", path.read_text(), flags=re.MULTILINE)[1:]:
            head, _, body = block.partition("\n")
            kind, _, title = head.partition(": ")
            if kind in kinds:
                yield pytest.param(path.stem, IMPORTS + body, id=f"{path.stem} {kind}: {title}")


def numbers(module):
    """The numbers of the rules that a module defines."""
    return {rule.number for rule in vars(module).values() if isinstance(rule, LintRule)}


def lines_of(number, script):
    """The lines in which a rule finds something."""
    return [finding.line for finding in check_text(script) if finding.rule == number]


def marked_lines(script):
    return [line for line, text in enumerate(script.splitlines(), start=1) if text.endswith("# here")]
