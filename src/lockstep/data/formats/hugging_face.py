"""Data sets of Hugging Face's ``datasets``, as pairs of an input and a target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.data.formats.arrow_files import as_number, as_value, optional_module, whole_numbers
from lockstep.data.images.encoded import EncodedPairs
from lockstep.data.images.image_cache import StoredPhotos
from lockstep.data.images.transforms import ImageTransform, Transform
from lockstep.data.naming import check_labels, class_names
from lockstep.errors import ConfigError, DataError, nearest


class HuggingFace(EncodedPairs):
    """Two columns of a ``datasets.Dataset``; ``dataset[i]`` is the pair ``(input, target)``.

    Nothing is downloaded: the set is one that the script has, or one that ``save_to_disk`` has written. It stays on the
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
        ConfigError: datasets is not installed, or the set is a stream.
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
            raise DataError(f"The data set {source!s:.80} holds no rows.")
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
            column = self._targets.with_format("arrow")[:][label]
            self.labels = whole_numbers(column, f"Column {label!r}")
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
