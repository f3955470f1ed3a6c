"""Runs a job in several layouts, compares them step by step, and names the first difference and its cause.

``Recorder`` does the same for any PyTorch loop. It is imported on first use, since it needs torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lockstep.verify.diagnosis import Cause, Comparison, Diagnosis, compare
from lockstep.verify.trace import StepTrace, Trace

if TYPE_CHECKING:
    from lockstep.verify.plain.recorder import Recorder

__all__ = ["Cause", "Comparison", "Diagnosis", "Recorder", "StepTrace", "Trace", "compare"]


def __getattr__(name: str) -> Any:
    if name == "Recorder":
        return import_module("lockstep.verify.plain.recorder").Recorder
    raise AttributeError(f"module 'lockstep.verify' has no attribute {name!r}")
