"""Jobs: what a job file may say, and how it becomes objects. Loading one does not import torch."""

from lockstep.config.components import Component
from lockstep.config.job import JobConfig
from lockstep.config.job_file import built_in_jobs, load_job

__all__ = ["Component", "JobConfig", "built_in_jobs", "load_job"]
