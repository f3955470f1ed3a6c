"""Metrics as a CSV table with a column for each, in a file that a resumed run continues.

kind,step,epoch,loss,accuracy,learning_rate,validation_accuracy
step,10,0,2.1,0.31,0.1,
epoch,12,0,1.9,0.35,,0.64
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import IO, Any

from lockstep.loggers.json_lines import MetricsFile


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
