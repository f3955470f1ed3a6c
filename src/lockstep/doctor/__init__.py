"""Looks at the machine before training does: each finding is ok, a warning or a fault, and says what to do."""

from lockstep.doctor.finding import Finding, Grade
from lockstep.doctor.host import look_at_host
from lockstep.doctor.links import Link, judge_links

__all__ = ["Finding", "Grade", "Link", "judge_links", "look_at_host"]
