"""Any PyTorch loop, with or without Lockstep: what its ranks wrote down, compared, and the cause of the difference."""

from lockstep.verify.plain.diagnosis import diagnose_plain
from lockstep.verify.plain.record import BatchRecord, Measure, RankRecord, Recording, StepRecord

__all__ = ["BatchRecord", "Measure", "RankRecord", "Recording", "StepRecord", "diagnose_plain"]
