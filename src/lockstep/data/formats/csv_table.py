"""Tables of numbers in CSV files, with one column as the target."""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lockstep.core.plan import Indices
from lockstep.data.keyed import SampleKeys
from lockstep.data.labels import check_labels, class_names
from lockstep.errors import ConfigError, DataError, nearest

_LARGEST = float(np.finfo(np.float32).max)


class CSVTable(TensorDataset):
    """The rows of a CSV file with a header; ``dataset[i]`` is the pair ``(columns, target)``.

    Columns are float32 of shape (number of columns,) and are held in memory, 4 bytes for each number. The target is
    int64 with ``classes``, else float32. A name in ``classes`` may stand in the target column in place of its number.

    Args:
        path: the file, in UTF-8.
        label: name of the column of targets.
        columns: names of the input columns, in order; ``None`` for all others.
        classes: how many classes there are, or their names in the order of their labels; ``None`` for regression.
        delimiter: the character between two columns.

    Raises:
        DataError: the file is missing, a row has too few or too many columns, or a value is not a finite number; names
            file, line and column.
    """

    in_memory = True

    def __init__(
        self,
        path: str | Path,
        label: str,
        *,
        columns: Sequence[str] | None = None,
        classes: int | Sequence[str] | None = None,
        delimiter: str = ",",
    ) -> None:
        if len(delimiter) != 1:
            raise ConfigError(f"CSVTable has delimiter={delimiter!r}; it must be one character.")
        self.path, self.label = Path(path), label
        self.classes: tuple[str, ...] = () if classes is None else class_names(classes)
        self._numbers = {name: float(label) for label, name in enumerate(self.classes)}
        if len(self._numbers) < len(self.classes):
            raise ConfigError(f"CSVTable was given classes={list(self.classes)}, two of one name. Name each once.")
        self._by_name: dict[bool, int] = {}
        """The first lines whose labels are given by name, and by number."""
        try:
            inputs, targets = self._load(columns, delimiter)
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{self.path} cannot be read as CSV in UTF-8: {error}") from error
        self._check_names()
        if self.classes:
            fractions = torch.nonzero(targets != targets.round())
            if len(fractions):
                row = int(fractions[0])
                raise DataError(
                    f"{self.path}, line {self._lines[row]}: {label} is {targets[row]}, which is not a class."
                )
        self.inputs, self.targets = inputs, targets.to(torch.int64 if self.classes else torch.float32)
        super().__init__(self.inputs, self.targets)
        if self.classes:
            check_labels(self, len(self.classes))

    def __repr__(self) -> str:
        return f"CSVTable {self.path.name}: {len(self):,} rows, {len(self.columns)} columns, target {self.label}"

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the input columns, in their order."""
        return self.columns

    def sample_path(self, index: int) -> str:
        """The file and the line of a row."""
        return f"{self.path.name}, line {self._lines[index]}"

    def get_batch(self, indices: Indices, keys: SampleKeys | None = None) -> tuple[Tensor, Tensor]:
        """Many rows, of shape (n, columns) and (n,)."""
        rows = torch.from_numpy(indices)
        return self.inputs.index_select(0, rows), self.targets.index_select(0, rows)

    def _load(self, columns: Sequence[str] | None, delimiter: str) -> tuple[Tensor, Tensor]:
        if not self.path.is_file():
            raise DataError(f"The table {self.path} does not exist.")
        inputs, targets, lines = array("f"), array("d"), array("q")
        with self.path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            header = [name.strip() for name in next(reader, [])]
            self.columns, places = self._places(header, columns)
            last = places.pop()
            for line, row in self._rows(reader, header):
                inputs.extend(self._number(row[place], line, header[place]) for place in places)
                targets.append(self._label(row[last], line))
                lines.append(line)
        if not lines:
            raise DataError(f"{self.path} has a header and no rows.")
        self._lines = np.frombuffer(lines, dtype=np.int64).copy()
        values = np.frombuffer(inputs, dtype=np.float32).reshape(len(lines), len(places))
        labels = np.frombuffer(targets, dtype=np.float64)
        return torch.from_numpy(values.copy()), torch.from_numpy(labels.copy())

    def _places(self, header: list[str], columns: Sequence[str] | None) -> tuple[tuple[str, ...], list[int]]:
        """The names of the input columns, and where they and, last, the target stand."""
        if not header or len(set(header)) < len(header):
            raise DataError(f"{self.path} needs a first line that names each column once; it has {header}.")
        wanted = tuple(name for name in header if name != self.label) if columns is None else tuple(columns)
        for name in (*wanted, self.label):
            if name not in header:
                raise DataError(f"{self.path} has no column {name!r}.{nearest(name, header)}")
        if not wanted:
            raise DataError(f"{self.path} has no column beside the target {self.label!r}.")
        return wanted, [header.index(name) for name in (*wanted, self.label)]

    def _rows(self, reader: Any, header: list[str]) -> Iterator[tuple[int, list[str]]]:
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise DataError(
                    f"{self.path}, line {reader.line_num}: {len(row)} columns, and the header has {len(header)}."
                )
            yield reader.line_num, row

    def _label(self, text: str, line: int) -> float:
        label = self._numbers.get(text.strip())
        self._by_name.setdefault(label is not None, line)
        return self._number(text, line, self.label) if label is None else label

    def _check_names(self) -> None:
        """Refuses names that are the numbers of other classes where labels are given both ways."""
        numbers = {f"{label:g}": name for name, label in self._numbers.items()}
        odd = next((name for name in self.classes if numbers.get(name, name) != name), None)
        if odd is not None and len(self._by_name) == 2:
            raise DataError(
                f"{self.path} gives the label in line {self._by_name[True]} by the name of its class and the one in "
                f"line {self._by_name[False]} by its number, and class {self._numbers[odd]:g} has the name {odd!r}. "
                "Give all labels by name, or the classes other names."
            )

    def _number(self, text: str, line: int, column: str) -> float:
        try:
            number = math.nan if "_" in text else float(text)  # to Python 1_000 is a number
        except ValueError:
            number = math.nan
        if not abs(number) <= _LARGEST:
            raise DataError(
                f"{self.path}, line {line}: column {column!r} holds {text!r:.40}, which is not a finite "
                "float32. Correct it, or choose other columns."
            )
        return number
