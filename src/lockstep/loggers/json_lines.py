"""Metrics as JSON, one record a line, in a file that a resumed run continues.

{"kind": "step", "step": 10, "epoch": 0, "loss": 2.1, "accuracy": 0.31}
{"kind": "epoch", "step": 12, "epoch": 0, "validation_accuracy": 0.64}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any


class JsonLines:
    """Appends a record per call and flushes it at once.

    Args:
        path: the file; it and its folder are made at the first record.
        first_step: steps done before this run goes on. Records of later steps, left by a run that was stopped
            after its last checkpoint, are removed: they are about to be written again.
        open_epoch: the epoch within which this run goes on, if there is one. Its record is removed too: after its last
            step it may have been written without a checkpoint that followed.
    """

    def __init__(self, path: Path | str, *, first_step: int = 0, open_epoch: int | None = None) -> None:
        self._path = Path(path)
        self._first_step, self._open_epoch = first_step, open_epoch
        self._file: IO[str] | None = None
        self._epoch = 0

    def begin(self, epoch: int, *, epochs: int, start: int, steps: int) -> None:
        """Remembers the epoch, for the records."""
        self._epoch = epoch

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Appends a record of kind ``step``."""
        self._append("step", step, self._epoch, values)

    def epoch(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Appends a record of kind ``epoch``."""
        self._append("epoch", step, epoch, values)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _append(self, kind: str, step: int, epoch: int, values: Mapping[str, float]) -> None:
        if self._file is None:
            self._file = self._open()
        # JSON has no NaN and no infinity; other programs must be able to read the file.
        finite = {name: float(value) if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"kind": kind, "step": step, "epoch": epoch, **finite}) + "\n")
        self._file.flush()

    def _open(self) -> IO[str]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.is_file():
            aside = self._path.with_name(f".{self._path.name}.partial")
            try:
                with aside.open("w", encoding="utf-8") as kept:
                    kept.writelines(f"{line}\n" for line in self._kept())
                aside.replace(self._path)
            finally:
                aside.unlink(missing_ok=True)
        return self._path.open("a", encoding="utf-8")

    def _kept(self) -> Iterator[str]:
        """The earlier records of what this run does not do again; torn lines are left out."""
        with self._path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                record = _record_in(line)
                if record is not None and not self._is_to_come(record):
                    yield line.rstrip("\n")

    def _is_to_come(self, record: dict[str, Any]) -> bool:
        ends_open_epoch = record.get("kind") == "epoch" and record.get("epoch") == self._open_epoch
        return bool(record["step"] > self._first_step or ends_open_epoch)


def _record_in(line: str) -> dict[str, Any] | None:
    """The record of a line; None where it is none, or torn."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
