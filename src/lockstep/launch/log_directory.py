"""Where the ranks of a run write their output and error records."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ConfigError


@dataclass
class LogDirectory:
    """The log folder of one run."""

    path: Path
    keep: bool
    """Whether it stays after the run."""


@contextmanager
def log_directory(asked: str, run_id: str) -> Iterator[LogDirectory]:
    """Opens the folder that was asked for, or a temporary one (0700), which goes unless ``keep`` is set."""
    if asked:
        path = Path(asked).resolve()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"The log folder {asked!r} cannot be made: {error.strerror}. Choose one that can be written."
            ) from error
        _remove_former(path)
        yield LogDirectory(path, keep=True)
        return
    logs = LogDirectory(Path(tempfile.mkdtemp(prefix=f"lockstep-logs-{run_id}-")), keep=False)
    try:
        yield logs
    finally:
        if not logs.keep:
            shutil.rmtree(logs.path, ignore_errors=True)


def _remove_former(path: Path) -> None:
    """Error records of an earlier run in the same folder would be taken for this run's."""
    for pattern in ("rank-*.error.json", "rank-*.log"):
        for file in path.glob(pattern):
            file.unlink()
