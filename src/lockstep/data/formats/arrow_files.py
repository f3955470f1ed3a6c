"""Rows of Arrow and Parquet files and of Hugging Face's ``datasets``: one column as the input, one as the target."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lockstep.data.images.encoded import EncodedPairs
from lockstep.data.images.image_cache import StoredPhotos
from lockstep.data.images.transforms import ImageTransform, Transform
from lockstep.data.labels import check_labels, class_names
from lockstep.errors import ConfigError, DataError, nearest


def optional_module(name: str, what: str) -> Any:
    """The module ``name``, which ``what`` needs; ``ConfigError`` where it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"{what} needs {package}, which cannot be imported here ({error}). Install it: pip install {package}."
        ) from error


def files_of_kind(path: str | Path | Sequence[str | Path], suffixes: Sequence[str], hint: str = "") -> list[Path]:
    """The files of a list, the one file, or those of a folder with one of the suffixes, in the order of their names.

    ``DataError`` with the hint where there are none.
    """
    if not isinstance(path, (str, Path)):
        files = [Path(file) for file in path]
    elif Path(path).is_dir():
        files = sorted(file for file in Path(path).iterdir() if file.suffix.lower() in suffixes)
    else:
        files = [Path(path)]
    if not files:
        raise DataError(f"{path} has no files that end in {', '.join(suffixes)}. {hint}".rstrip())
    return files


def as_value(cell: Any) -> Any:
    """Numbers and lists of numbers as tensors (float32, or int64 of whole numbers); anything else as it is.

    ``DataError`` for an empty cell, a list of unequal lists, or an integer that int64 cannot hold.
    """
    if cell is None:
        raise DataError("the cell is empty")
    if isinstance(cell, (bool, int, float, list)):
        try:
            array = np.asarray(cell)
        except ValueError as error:
            raise DataError(f"the cell's lists are of unequal lengths: {error}") from error
        # of a number that is too large NumPy makes uint64, and of several numbers with such a one float64
        if array.dtype.kind in "uf" and np.any(array >= 2.0**63) and _is_too_large(cell):
            raise DataError("the cell holds an integer of 2^63 or more, which int64 cannot hold")
        if array.dtype.kind in "iub":
            return torch.from_numpy(np.atleast_1d(array).astype(np.int64)).reshape(array.shape)
        if array.dtype.kind == "f":
            return torch.from_numpy(np.atleast_1d(array).astype(np.float32)).reshape(array.shape)
        if array.dtype == object and _holds_none(cell):
            raise DataError("the cell's list contains a null")
    return cell


def as_number(cell: Any) -> Any:
    """A target: a number stays a Python number, which torch collates; see ``as_value`` for lists."""
    return cell if isinstance(cell, (bool, int, float)) else as_value(cell)


def whole_numbers(column: Any, where: str) -> npt.NDArray[np.int64]:
    """A column of labels as int64; ``DataError`` where a cell is empty or no whole number."""
    try:
        values = np.asarray(column)
    except (ValueError, TypeError) as error:
        raise DataError(f"{where} cannot be read as labels: {error}") from error
    if values.dtype.kind not in "iu" or values.ndim != 1:
        found = "has empty cells" if getattr(column, "null_count", 0) else f"holds {values.dtype}"
        raise DataError(f"{where} {found}; with classes every target must be one integer.")
    return values.astype(np.int64)


def _holds_none(cell: Any) -> bool:
    return any(_holds_none(each) for each in cell) if isinstance(cell, list) else cell is None


def _is_too_large(cell: Any) -> bool:
    if isinstance(cell, list):
        return any(map(_is_too_large, cell))
    return isinstance(cell, int) and cell >= 1 << 63


_SUFFIXES = (".parquet", ".arrow", ".feather")
_GROUPS_KEPT = 4


class ArrowFiles(EncodedPairs):
    """Rows of ``.parquet``, ``.arrow`` or ``.feather`` files; ``dataset[i]`` is the pair ``(input, target)``.

    An Arrow file stays on the disk and is mapped. Of Parquet, whose row groups are compressed, each process keeps the
    last four groups it read, of the two columns alone: shuffled reading is quick where a group is small (write with
    ``row_group_size=1000`` or so), and an Arrow file is quicker still. Lists of numbers become tensors.

    Args:
        path: a file, a folder of files of one kind (in the order of their names), or a list of files.
        input: name of the input column: numbers, lists of numbers, text, or bytes of pictures.
        label: name of the column of targets.
        transform: an ``ImageTransform`` for pictures, or any callable of the input's value.
        classes: how many there are, or their names; with it every target must be an integer below.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: a file is missing or broken, or has other columns than the first one.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        input: str,
        label: str,
        *,
        transform: Transform | None = None,
        classes: int | Sequence[str] | None = None,
    ) -> None:
        super().__init__(transform)
        self._arrow = optional_module("pyarrow", "ArrowFiles")
        self.files, self.columns = files_of_kind(path, _SUFFIXES), (input, label)
        kinds = sorted({file.suffix.lower() for file in self.files})
        if len(kinds) > 1 or kinds[0] not in _SUFFIXES:
            raise ConfigError(
                f"ArrowFiles reads files of one kind ({', '.join(_SUFFIXES)}) and was given {', '.join(kinds)}. "
                "Name the files."
            )
        self._open()
        if classes is not None:
            self.classes = class_names(classes)
            places = range(len(self._ends))
            parts = [whole_numbers(self._column(n, label), f"{self._name(n)}, column {label!r}") for n in places]
            self.labels = np.concatenate(parts)
            check_labels(self, len(self.classes))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __repr__(self) -> str:
        return f"ArrowFiles: {len(self):,} rows in {len(self.files)} files, {self.columns[0]} -> {self.columns[1]}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrow": None, "_opened": None, "_kept": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._arrow = optional_module("pyarrow", "ArrowFiles")
        self._open()

    def sample_path(self, index: int) -> str:
        """The file of a row and its number there."""
        file = self._groups[int(np.searchsorted(self._ends, index, side="right"))][0]
        starts = zip(self._groups, self._starts, strict=True)
        first = next(start for (other, _), start in starts if other == file)
        return f"{self.files[file].name}, row {index - first}"

    def _photos(self) -> StoredPhotos:
        name = self.files[0].parent.name or "tables"
        return StoredPhotos(name, len(self), self.files, [self.columns[0]], self._picture)

    def _input(self, index: int) -> Any:
        return as_value(self._cell(index, self.columns[0]))

    def _target(self, index: int) -> Any:
        return as_number(self._cell(index, self.columns[1]))

    def _cell(self, index: int, column: str) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        place = int(np.searchsorted(self._ends, index, side="right"))
        return self._column(place, column)[index - self._starts[place]].as_py()

    def _column(self, place: int, name: str) -> Any:
        """A column of one group of rows."""
        if place not in self._kept:
            file, group = self._groups[place]
            try:
                self._kept[place] = self._opened[file].rows(group, list(dict.fromkeys(self.columns)))
            except (self._arrow.ArrowException, OSError) as error:
                raise DataError(f"{self._name(place)} cannot be read: {error}") from error
            if len(self._kept) > _GROUPS_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(place)
        return self._kept[place].column(name)

    def _name(self, place: int) -> str:
        file, group = self._groups[place]
        return f"{self.files[file]} (group of rows {group})"

    def _open(self) -> None:
        self._opened: list[_Parquet | _Mapped] = []
        self._groups: list[tuple[int, int]] = []
        self._kept: OrderedDict[int, Any] = OrderedDict()
        sizes: list[int] = []
        for number, file in enumerate(self.files):
            opened = self._opened_file(file)
            self._opened.append(opened)
            self._groups += [(number, group) for group in range(len(opened.counts))]
            sizes += opened.counts
        if not sum(sizes):
            raise DataError(f"{', '.join(map(str, self.files))} have no rows.")
        self._ends = np.cumsum(sizes)
        self._starts = self._ends - np.array(sizes)

    def _opened_file(self, file: Path) -> _Parquet | _Mapped:
        if not file.is_file():
            raise DataError(f"The table {file} does not exist.")
        try:
            opened = (_Parquet if file.suffix.lower() == ".parquet" else _Mapped)(file)
        except (self._arrow.ArrowException, OSError) as error:
            raise DataError(f"{file} cannot be read as {file.suffix[1:]}: {error}") from error
        for column in self.columns:
            if column not in opened.names:
                raise DataError(f"{file} has no column {column!r}.{nearest(column, opened.names)}")
        return opened


class _Parquet:
    """Row groups of a Parquet file."""

    def __init__(self, file: Path) -> None:
        self._file = optional_module("pyarrow.parquet", "ArrowFiles").ParquetFile(file)
        self.names = list(self._file.schema_arrow.names)
        metadata = self._file.metadata
        self.counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]

    def rows(self, group: int, columns: list[str]) -> Any:
        return self._file.read_row_group(group, columns=columns, use_threads=False)


class _Mapped:
    """Record batches of an Arrow file, or of the stream that Hugging Face writes, mapped."""

    def __init__(self, file: Path) -> None:
        arrow, ipc = optional_module("pyarrow", "ArrowFiles"), optional_module("pyarrow.ipc", "ArrowFiles")
        source = arrow.memory_map(str(file))
        try:
            reader = ipc.open_file(source)
            self._batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        except arrow.ArrowInvalid:
            source.seek(0)
            reader = ipc.open_stream(source)
            self._batches = list(reader)
        self.names = list(reader.schema.names)
        self.counts = [batch.num_rows for batch in self._batches]

    def rows(self, group: int, columns: list[str]) -> Any:
        return self._batches[group]


class HuggingFace(EncodedPairs):
    """Two columns of a ``datasets.Dataset``; ``dataset[i]`` is the pair ``(input, target)``.

    Nothing is downloaded: give a set that the script has opened, or that ``save_to_disk`` has written. It stays on the
    disk, mapped. A ``datasets.Dataset`` can also go to ``run.batches`` as it is; its samples are then dicts, which the
    model gets by keyword.

    Args:
        source: a ``datasets.Dataset``, or the folder that ``save_to_disk`` wrote.
        input: name of the input column. Pictures reach an ``ImageTransform`` undecoded.
        label: name of the column of targets.
        split: which set of a ``DatasetDict``.
        transform: an ``ImageTransform``, or any callable of the input's value.
        classes: how many there are, or their names; ``None`` for those of a ``ClassLabel`` column, if it is one.

    Raises:
        ConfigError: datasets is not installed, or the set is a stream or has a transform of its own.
        DataError: the folder holds no such set, or a column is missing.
    """

    def __init__(
        self,
        source: Any,
        input: str,
        label: str,
        *,
        split: str | None = None,
        transform: Transform | None = None,
        classes: int | Sequence[str] | None = None,
    ) -> None:
        super().__init__(transform)
        library = optional_module("datasets", "HuggingFace")
        found = _loaded(source, library) if isinstance(source, (str, Path)) else source
        rows = _split_of(found, split, library)
        for column in (input, label):
            if column not in rows.column_names:
                raise DataError(
                    f"The data set {source!s:.80} has no column {column!r}.{nearest(column, rows.column_names)}"
                )
        if not len(rows):
            raise DataError(f"The data set {source!s:.80} has no rows.")
        if rows.format["type"] == "custom":
            raise ConfigError(
                "HuggingFace was given a data set with a transform of its own (set_transform, with_transform), which "
                "it does not call. Give the function of the input as transform=, or the data set itself to run.batches."
            )
        if isinstance(transform, ImageTransform) and isinstance(rows.features[input], library.Image):
            rows = rows.cast_column(input, library.Image(decode=False))
        self._inputs = rows.select_columns([input]).with_format(None)
        self._targets = rows.select_columns([label]).with_format(None)
        self.columns = input, label
        names = getattr(rows.features[label], "names", None)
        if classes is None and names:
            classes = names
        if classes is not None:
            self.classes = class_names(classes)
            self.labels = whole_numbers(self._targets.with_format("arrow")[:][label], f"Column {label!r}")
            check_labels(self, len(self.classes))

    def __len__(self) -> int:
        return len(self._inputs)

    def __repr__(self) -> str:
        return f"HuggingFace: {len(self):,} rows, {self.columns[0]} -> {self.columns[1]}"

    def _photos(self) -> StoredPhotos:
        files = [Path(each["filename"]) for each in self._inputs.cache_files]
        return StoredPhotos("hugging-face", len(self), files, [self._inputs._fingerprint], self._picture)

    def _input(self, index: int) -> Any:
        return as_value(self._inputs[index][self.columns[0]])

    def _target(self, index: int) -> Any:
        return as_number(self._targets[index][self.columns[1]])


def _loaded(source: str | Path, library: Any) -> Any:
    if not Path(source).is_dir():
        raise DataError(f"The data folder {source} does not exist. Name the folder that save_to_disk wrote.")
    try:
        return library.load_from_disk(str(source))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{source} cannot be read as a saved data set: {error}") from error


def _split_of(found: Any, split: str | None, library: Any) -> Any:
    if isinstance(found, library.DatasetDict):
        if split not in found:
            raise DataError(f"The data set has no split {split!r}.{nearest(str(split), found)}")
        return found[split]
    if isinstance(found, library.Dataset):
        return found
    raise ConfigError(
        f"HuggingFace was given a {type(found).__name__}, and a datasets.Dataset with rows by number is needed. "
        "Load it without streaming=True."
    )
