"""Jobs: what a job file may say, and how it becomes objects. Loading one does not import torch."""

from lockstep.config.job import JobConfig
from lockstep.config.job_file import load_job

__all__ = ["JobConfig", "load_job"]
