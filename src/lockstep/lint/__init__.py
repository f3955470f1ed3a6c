"""A static check of PyTorch training scripts for the known mistakes of distributed training.

Pure: a script is parsed, never imported; torch is not needed.
"""

from lockstep.lint.catalogue import RULES, choose, table
from lockstep.lint.check import check_file, check_text
from lockstep.lint.finding import Finding, Rule

__all__ = ["RULES", "Finding", "Rule", "check_file", "check_text", "choose", "table"]
