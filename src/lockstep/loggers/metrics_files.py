"""Files of metrics that a resumed run continues: ``log.jsonl``, with an object for each record, and ``log.csv``.

{"kind": "step", "step": 10, "epoch": 0, "loss": 2.1, "accuracy": 0.31, "learning_rate": 0.1}
{"kind": "epoch", "step": 12, "epoch": 0, "validation_accuracy": 0.64}

kind,step,epoch,loss,accuracy,learning_rate,validation_accuracy
step,10,0,2.1,0.31,0.1,
epoch,12,0,1.9,0.35,,0.64
"""

from __future__ import annotations

import csv
import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import IO, Any

from lockstep.core.atomic import file_aside


class MetricsFile(ABC):
    """Appends a record per call and flushes it at once.

    Args:
        path: the file; it and its folder are made at the first record.
        first_step: steps done before this run resumes. Records of later steps, left by a run that was stopped
            after its last checkpoint, are removed: they are about to be written again.
        open_epoch: the epoch within which this run resumes, if there is one. Its record is removed too: after its last
            step it may have been written without a checkpoint that followed.
    """

    def __init__(self, path: Path | str, *, first_step: int = 0, open_epoch: int | None = None) -> None:
        self._path = Path(path)
        self._first_step, self._open_epoch = first_step, open_epoch
        self._file: IO[str] | None = None
        self._epoch = 0
        self._earlier = 0.0
        self._began: float | None = None

    def begin(self, epoch: int, **_: Any) -> None:
        """Remembers the epoch, for the records, and when the first one began."""
        self._epoch = epoch
        self._began = monotonic() if self._began is None else self._began

    def log(self, step: int, values: Mapping[str, float], so_far: Mapping[str, float] | None = None) -> None:
        """Appends a record of kind ``step``."""
        self._append("step", step, self._epoch, values)

    def epoch(self, epoch: int, step: int, values: Mapping[str, float], *, is_last: bool = False) -> None:
        """Appends a record of kind ``epoch``."""
        self._append("epoch", step, epoch, values)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _append(self, kind: str, step: int, epoch: int, values: Mapping[str, float]) -> None:
        numbers = {name: float(value) for name, value in values.items()}
        record: dict[str, Any] = {"kind": kind, "step": step, "epoch": epoch, "seconds": 0.0, **numbers}
        file = self._opened(record)
        if self._began is not None:
            record["seconds"] = round(self._earlier + monotonic() - self._began, 3)
        file.write(self._line(record))
        file.flush()

    def _opened(self, record: dict[str, Any]) -> IO[str]:
        """The file, ready for a record to be appended; a new one where it was removed, or moved with its folder."""
        if self._file is not None and not self._path.exists():
            self._file.close()
            self._file = None
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.is_file():
                open_epoch = ("epoch", self._open_epoch)
                earlier = [each for each in self._records() if each["step"] <= self._first_step]
                kept = [each for each in earlier if (each.get("kind"), each.get("epoch")) != open_epoch]
                self._earlier = float(kept[-1].get("seconds", 0.0)) if kept else 0.0
                self._replace(kept)
            self._file = self._path.open("a", encoding="utf-8", newline="")
        return self._file

    def _replace(self, records: Iterable[dict[str, Any]]) -> None:
        """Replaces the file by one that has these records."""
        with (
            file_aside(self._path, alone=True) as aside,
            aside.open("w", encoding="utf-8", newline="") as file,
        ):
            file.write(self._head())
            file.writelines(map(self._line, records))

    def _head(self) -> str:
        return ""

    @abstractmethod
    def _line(self, record: dict[str, Any]) -> str:
        """A record as the file has it."""

    @abstractmethod
    def _records(self) -> Iterator[dict[str, Any]]:
        """The records of the file; torn lines are left out."""


class JsonLines(MetricsFile):
    """A JSON object a line, as ``MetricsFile`` says."""

    def _line(self, record: dict[str, Any]) -> str:
        # JSON has no NaN and no infinity; other programs must be able to read the file.
        numbers = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        return json.dumps(numbers) + "\n"

    def _records(self) -> Iterator[dict[str, Any]]:
        return read_json_lines(self._path)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file of ``JsonLines``, in their order; torn lines and other content are left out."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(record, dict):
                continue
            are_numbers = (isinstance(record.get(name), int) for name in ("step", "epoch"))
            others = (each for name, each in record.items() if name != "kind")  # None in place of NaN
            if all(are_numbers) and all(isinstance(each, int | float | None) for each in others):
                yield record


class CsvTable(MetricsFile):
    """A row for each record, as ``MetricsFile`` says. The file is rewritten where a metric needs a new column."""

    _columns: tuple[str, ...] = ()

    def _opened(self, record: dict[str, Any]) -> IO[str]:
        if not self._path.is_file():
            self._columns = ()
        elif self._file is None:
            self._columns = tuple(dict.fromkeys(name for each in self._records() for name in each))
        file = super()._opened(record)
        if new := tuple(name for name in record if name not in self._columns):
            earlier = list(self._records())
            self._columns += new
            self._replace(earlier)
            file.close()
            file = self._file = self._path.open("a", encoding="utf-8", newline="")
        return file

    def _head(self) -> str:
        return _row(self._columns)

    def _line(self, record: dict[str, Any]) -> str:
        return _row([record.get(name, "") for name in self._columns])

    def _records(self) -> Iterator[dict[str, Any]]:
        """The records of the file, their metrics as they are written; a torn last line is left out."""
        whole = self._path.read_text(encoding="utf-8", errors="replace").rpartition("\n")[0]
        for row in csv.DictReader(io.StringIO(whole, newline="")):
            found = {name: value for name, value in row.items() if value}
            if {"step", "epoch"} <= found.keys():
                yield {**found, "step": int(found["step"]), "epoch": int(found["epoch"])}


def _row(values: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()
