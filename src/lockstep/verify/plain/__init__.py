"""Verification of any PyTorch loop, with or without Lockstep: the records of its ranks, compared and diagnosed."""

from lockstep.verify.plain.diagnosis import diagnose_plain
from lockstep.verify.plain.record import BatchRecord, Measure, RankRecord, Recording, StepRecord

__all__ = ["BatchRecord", "Measure", "RankRecord", "Recording", "StepRecord", "diagnose_plain"]
