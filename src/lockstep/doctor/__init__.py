"""Checks the machine before training: each result is ok, a warning or a fault, and says what to do."""

from lockstep.doctor.host import CheckResult, Grade, look_at_host
from lockstep.doctor.torch_checks import judge_links

__all__ = ["CheckResult", "Grade", "judge_links", "look_at_host"]
