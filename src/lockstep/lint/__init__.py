"""A static check of PyTorch training scripts for the known mistakes of distributed training.

Pure: a script is parsed, never imported; torch is not needed.
"""

from lockstep.lint.check import RULES, check_file, check_text, choose, table
from lockstep.lint.finding import Finding, LintRule

__all__ = ["RULES", "Finding", "LintRule", "check_file", "check_text", "choose", "table"]
