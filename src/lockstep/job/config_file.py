"""Loads a job file: TOML, what the command line sets on top, checks; every error is named with its line.

    file  ->  tables  ->  --set, --epochs, ...  ->  JobConfig  ->  {data}, {seed}, paths  ->  rules

Nothing here imports torch or starts anything, so a job with a mistake ends in well under a second.
"""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, nearest
from lockstep.job.config import JobConfig
from lockstep.job.config_lines import key_lines, line_of
from lockstep.job.config_overrides import Override, apply_overrides
from lockstep.job.config_places import settle
from lockstep.job.config_reader import KeyPath, Problem, read_table
from lockstep.job.config_rules import broken_rules
from lockstep.job.preflight import preflight

_NOT_PLAIN = re.compile(r"[^\w.-]+", re.ASCII)
BUILT_IN_JOBS = Path(__file__).parent.parent / "jobs"
_LARGEST = 1 << 20
"""Bytes of a job file."""


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """A job file as it was found, not yet checked."""

    name: str
    """Name of the job."""
    path: Path
    """The file."""
    text: str
    """What it says."""
    built_in: bool
    """Whether it is one of Lockstep's own; their relative paths mean the current folder."""


def built_in_jobs() -> list[str]:
    """The names of Lockstep's own jobs."""
    return sorted(path.stem for path in BUILT_IN_JOBS.glob("*.toml"))


def find_job(job: str) -> JobFile:
    """Finds a job by the path of its file or the name of a built-in one; ``ConfigError`` if there is none."""
    path = Path(job)
    built_in = not path.suffix and path.name == job and job in built_in_jobs()
    if built_in:
        path = BUILT_IN_JOBS / f"{job}.toml"
    try:
        text = _read(path)
    except FileNotFoundError:
        raise ConfigError(
            f"The job {job!r} is neither a file nor a built-in job.{nearest(job, built_in_jobs())}"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"The job file {job!r} cannot be read: {reason}.") from error
    return JobFile(
        name=_NOT_PLAIN.sub("-", path.stem).strip("-.")[:100] or "job",
        path=path,
        text=text,
        built_in=built_in,
    )


def _read(path: Path) -> str:
    """The text of an ordinary file, of a size that a person may have written; ``ValueError`` for any other."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("Is a directory" if stat.S_ISDIR(found.st_mode) else "it is no ordinary file")
    if found.st_size > _LARGEST:
        raise ValueError(f"it has {found.st_size:,} bytes, and no job is larger than {_LARGEST:,}")
    return path.read_bytes().decode()


def load_job(job: str, overrides: Sequence[Override] = (), *, imports: bool = True) -> JobConfig:
    """The checked job of a file or built-in name with overrides on top.

    Args:
        job: path of a TOML file, or name of a built-in job.
        overrides: what the command line sets.
        imports: also look into the source files of the import paths, which takes tens of milliseconds.

    All mistakes of the file and the overrides are in one ``ConfigError``, each with ``file:line`` or option.
    """
    file = find_job(job)
    try:
        return _load(file, overrides, imports)
    except RecursionError as error:
        raise ConfigError(f"{file.path}: tables or lists are nested too deeply to be a job.") from error


def _load(file: JobFile, overrides: Sequence[Override], imports: bool) -> JobConfig:
    try:
        table = tomllib.loads(file.text)
    except ValueError as error:
        raise ConfigError(f"{_place_of_syntax_error(file, error)} The job file is not valid TOML.") from error
    table.setdefault("job", file.name)
    origin = _Origin(file, overrides)
    problems = apply_overrides(table, overrides)
    config, wrong = read_table(JobConfig, table)
    problems += [problem for problem in wrong if problem.path not in {known.path for known in problems}]
    if config is None or problems:
        raise _report(problems, origin)
    config, problems = settle(config, None if file.built_in else file.path.parent, origin.is_override)
    problems = problems or broken_rules(config)
    if imports:
        found = {problem.path for problem in problems}
        problems += [problem for problem in preflight(config) if problem.path not in found]
    if problems:
        raise _report(problems, origin)
    return config


class _Origin:
    """Where a value came from: a line of the file or an option of the command line."""

    def __init__(self, file: JobFile, overrides: Sequence[Override]) -> None:
        self._file = file
        self._lines: Mapping[KeyPath, int] | None = None
        self._overrides = {override.path: override.origin for override in overrides}

    def is_override(self, path: KeyPath) -> bool:
        """Whether the command line gave the value."""
        return self.override(path) is not None

    def override(self, path: KeyPath) -> str | None:
        """The option that gave the value, as it was written."""
        texts = tuple(str(part) for part in path)
        return next(
            (self._overrides[texts[:n]] for n in range(len(texts), 0, -1) if texts[:n] in self._overrides),
            None,
        )

    def of(self, path: KeyPath) -> str:
        """The option, or ``file:line``, or the file."""
        override = self.override(path)
        if override is not None:
            return override
        if self._lines is None:
            self._lines = key_lines(self._file.text)
        line = line_of(path, dict(self._lines))
        return f"{self._file.path}:{line}" if line else str(self._file.path)


def _report(problems: Sequence[Problem], origin: _Origin) -> ConfigError:
    lines = [f"{origin.of(problem.path)}: {problem.text}" for problem in problems]
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError(f"The job has {len(lines)} mistakes.\n  " + "\n  ".join(lines))


def _place_of_syntax_error(file: JobFile, error: ValueError) -> str:
    text: Any = str(error)
    before, found, place = text.rpartition(" (at line ")
    if found:
        line = place.split(",")[0]
        return f"{file.path}:{line}: {before}."
    return f"{file.path}: {text.rstrip('.')}."
