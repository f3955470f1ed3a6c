"""Jobs: what a job file may say, and how it becomes objects. Loading one does not import torch."""

from lockstep.job.component import Component
from lockstep.job.config import JobConfig
from lockstep.job.config_file import built_in_jobs, load_job

__all__ = ["Component", "JobConfig", "built_in_jobs", "load_job"]
