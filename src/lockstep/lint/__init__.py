"""A static check of PyTorch training scripts for the known mistakes of distributed training, and advice on porting.

Pure: a script is parsed, never imported; torch is not needed.
"""

from lockstep.lint.check import RULES, check_file, check_text, choose, table
from lockstep.lint.finding import Finding, LintRule
from lockstep.lint.porting import Change, changes, changes_in

__all__ = [
    "RULES",
    "Change",
    "Finding",
    "LintRule",
    "changes",
    "changes_in",
    "check_file",
    "check_text",
    "choose",
    "table",
]
