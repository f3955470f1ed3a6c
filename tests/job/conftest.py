"""A job file that a test can change."""

from tests.config.conftest import job_file, load

__all__ = ["job_file", "load"]
