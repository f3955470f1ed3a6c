"""Runs a job in several layouts, compares them step by step, and names where and why they part."""

from lockstep.verify.comparison import Comparison, compare
from lockstep.verify.diagnosis import Cause, Diagnosis
from lockstep.verify.trace import StepTrace, Trace

__all__ = ["Cause", "Comparison", "Diagnosis", "StepTrace", "Trace", "compare"]
