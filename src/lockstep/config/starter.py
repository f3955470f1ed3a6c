"""Writes a first job for data of the user's own: a job file, and a script with the data sets, the model and a loop.

    images    a folder with a folder of photos for each class           ResNet-18, classes
    table     a CSV file with a header                                  a perceptron, classes or a number
    text      a text file, or a folder with some                        a transformer that predicts the next byte
    tensors   x and y in a .npz or .pt file, or x.npy and y.npy         a perceptron, classes or numbers

``look_at`` finds out what the data is and what follows from it, without torch but for ``.pt`` files; ``job_text`` and
``script_text`` write it down. A job for images needs no script, so ``lockstep train FOLDER`` trains it as it is.
"""

from __future__ import annotations

import csv
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.starter_texts import (
    JOB_PARTS,
    JOB_RECIPE,
    SCRIPT_CORRECT,
    SCRIPT_HEAD,
    SCRIPT_LOOP,
    SCRIPT_PARTS,
)
from lockstep.errors import ConfigError, nearest
from lockstep.text import plural, shorten

KINDS = ("images", "table", "text", "tensors")
GOALS = ("classes", "numbers")
_EPOCHS = {"images": 10, "table": 20, "text": 5, "tensors": 10}
_PHOTOS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
_TEXTS = (".txt", ".md", ".text")
TRAINING_FOLDERS = {"train", "training"}
_SPLITS = TRAINING_FOLDERS | {"validation", "val", "valid", "test"}
_MOST_CLASSES = 20
"""Different whole numbers in a target up to which they are taken for classes."""
_WINDOW = 64
"""Bytes of text in a sample."""


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """The kind of the data, and what was chosen for it."""

    data: Path
    """Absolute."""
    kind: str
    goal: str
    """``classes`` or ``numbers``; what the model gives."""
    samples: int
    """How many samples there are, of training and validation together."""
    outputs: int
    """Classes, or numbers, that the model gives."""
    values: dict[str, Any]
    """The names in the texts, beside the fields above."""
    remarks: tuple[str, ...]
    """Sentences on what was found, and what was left out."""

    @property
    def global_batch(self) -> int:
        """Samples per step: 64 where an epoch then has ten steps, else 32."""
        return 64 if self.samples >= 800 else 32

    @property
    def epochs(self) -> int:
        """Passes over the data, unless another number is asked for."""
        return _EPOCHS[self.kind]


def kind_of(data: Path) -> str:
    """The kind that some data looks like. Raises ``ConfigError`` where it looks like nothing that is known."""
    if not data.exists():
        raise ConfigError(f"There is no file or folder '{data}'.")
    suffix = data.suffix.lower()
    if data.is_file():
        kinds = {".csv": "table", ".tsv": "table", ".npz": "tensors", ".pt": "tensors", ".pth": "tensors"}
        found = kinds.get(suffix, "text" if suffix in _TEXTS else "")
    elif (data / "x.npy").is_file() and (data / "y.npy").is_file():
        found = "tensors"
    else:
        suffixes = {path.suffix.lower() for path in _files(data)}
        found = "images" if suffixes & {*_PHOTOS} else "text" if suffixes & {*_TEXTS} else ""
    if not found:
        raise ConfigError(
            f"'{data}' is none of: a folder of photos in a folder for each class, a CSV file, text files, or x and y "
            "in a .npz or .pt file or in x.npy and y.npy."
        )
    return found


def look_at(data: Path, kind: str, *, target: str = "", goal: str = "") -> DataSummary:
    """Reads as much of the data as is needed to write a job for it.

    Args:
        data: the file or folder.
        kind: one of ``KINDS``.
        target: the column of a table that is predicted; empty: the last one.
        goal: ``classes`` or ``numbers``; empty: what the target looks like.

    Raises:
        ConfigError: the data is not of the kind, or has too few samples.
    """
    data = data.resolve()
    looks = {
        "images": _look_at_images,
        "table": _look_at_table,
        "text": _look_at_text,
        "tensors": _look_at_tensors,
    }
    found = looks[kind](data, target, goal)
    if found.samples < 10:
        raise ConfigError(f"'{data}' has {plural(found.samples, 'sample')}; at least 10 are needed.")
    if found.outputs < 2 and found.goal == "classes":
        raise ConfigError(f"'{data}' has one class only, and nothing to tell apart. Choose another target.")
    return found


def job_text(found: DataSummary, name: str, epochs: int | None = None) -> str:
    """The job file; ``name`` is that of the script, which images do without."""
    return (JOB_PARTS[found.kind] + JOB_RECIPE).format(**_values(found, name, epochs))


def script_text(found: DataSummary, name: str, epochs: int | None = None) -> str:
    """The script: the data sets, the model and a loop of the same recipe as the job's."""
    metric = SCRIPT_CORRECT if found.goal == "classes" and found.kind != "text" else ""
    parts = SCRIPT_HEAD + SCRIPT_PARTS[found.kind] + metric + SCRIPT_LOOP
    return parts.format(**_values(found, name, epochs))


def folder_job(folder: Path) -> str:
    """The job that trains on a folder of images. Raises ``ConfigError`` if it is not one."""
    if (folder / "job.json").is_file():
        raise ConfigError(
            f"'{folder}' is the folder of a run, not a job. Continue the run: lockstep train JOB --resume "
            f"{shlex.quote(str(folder))}, where JOB is the job that it was started with."
        )
    for file in sorted(folder.glob("*.toml")):
        if "[model]" in file.read_text(errors="replace"):
            raise ConfigError(
                f"'{folder}' is a folder, and holds the job '{file.name}'. Train it: lockstep train "
                f"{shlex.quote(str(file))}"
            )
    return job_text(look_at(folder, "images"), folder.name)


def _values(found: DataSummary, name: str, epochs: int | None) -> dict[str, Any]:
    loss = "CrossEntropyLoss" if found.goal == "classes" else "MSELoss"
    counts = found.goal == "classes" and found.kind != "text"
    numpy = "import numpy as np\n" if "np." in found.values.get("read", "") else ""
    sets = "" if found.kind == "images" else "from torch.utils.data import TensorDataset\n"
    return {
        **found.values,
        "name": name,
        "data": str(found.data),
        "data_name": found.data.name,
        "toml_data": '"' + str(found.data).replace("\\", "\\\\").replace('"', '\\"') + '"',
        "imports": f"{numpy}import torch\nfrom torch import nn\n{sets}",
        "outputs": found.outputs,
        "epochs": found.epochs if epochs is None else epochs,
        "global_batch": found.global_batch,
        "loss": f"torch.nn:{loss}",
        "loss_name": loss,
        "metric": "accuracy" if counts else "loss",
        "measure": "correct" if counts else "loss_fn",
    }


def _files(folder: Path) -> Iterator[Path]:
    """The files below a folder, in order of their names; hidden ones are left out."""
    for place, inner, names in os.walk(folder):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))


def _look_at_images(data: Path, target: str, goal: str) -> DataSummary:
    if not data.is_dir():
        raise ConfigError(f"'{data}' is not a folder. Photos are in a folder for each class.")
    if goal == "numbers":
        raise ConfigError("Images are sorted into classes, those of their folders. Leave --goal out.")
    from PIL import Image

    photos = [path for path in _files(data) if path.suffix.lower() in _PHOTOS]
    top = {path.relative_to(data).parts[0] for path in photos if len(path.relative_to(data).parts) > 1}
    by_split = bool(top & TRAINING_FOLDERS) and bool(top & (_SPLITS - TRAINING_FOLDERS))
    depth = 1 if by_split else 0
    photos = [path for path in photos if len(path.relative_to(data).parts) > depth + 1]  # of a class
    classes = sorted({path.relative_to(data).parts[depth] for path in photos})
    if len(classes) < 2:
        raise ConfigError(
            f"'{data}' has {plural(len(classes), 'folder')} with photos, and at least two classes are needed: one "
            "folder of photos for each."
        )
    try:
        sides = []
        for path in photos[:: max(1, len(photos) // 20)]:
            with Image.open(path) as photo:
                sides.append(min(photo.size))
    except OSError as error:
        raise ConfigError(
            f"'{path}' cannot be opened as a photo: {str(error).rstrip('.')}. Replace or remove it."
        ) from error
    middle = sorted(sides)[len(sides) // 2]
    is_small = middle <= 64
    size = (32 if middle <= 32 else 64) if is_small else 224
    split = "the folders are the splits" if by_split else "20 % of each class is held out for validation"
    return DataSummary(
        data=data,
        kind="images",
        goal="classes",
        samples=len(photos),
        outputs=len(classes),
        values={
            "size": size,
            "resize": size if is_small else 256,
            "small": str(is_small).lower(),
            "small_python": is_small,
        },
        remarks=(
            f"{plural(len(photos), 'photo')} in {plural(len(classes), 'class')}: {shorten(classes)}",
            f"{split}; photos are scaled to {size} x {size} pixels",
            f"ResNet-18{' for small images' if is_small else ''}, from random weights",
        ),
    )


def _read_table(data: Path) -> tuple[dict[str, list[str]], str]:
    """The values of each column, by the names in the first line, and what separates them.

    Raises:
        ConfigError: it is no such table.
    """
    try:
        with data.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            known = "\t" if data.suffix.lower() == ".tsv" else ",;\t"
            delimiter = next((each for each in known if each in first), known[0])
            rows = [row for row in csv.reader(file, delimiter=delimiter) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"'{data}' cannot be read as CSV in UTF-8: {error}. Save it so.") from error
    header = [name.strip() for name in rows[0]] if rows else []
    if len(set(header)) < max(2, len(header)):
        raise ConfigError(f"'{data}' needs a first line that names at least two columns, each once.")
    uneven = next((number for number, row in enumerate(rows, 1) if len(row) != len(header)), None)
    if uneven is not None:
        raise ConfigError(f"'{data}', row {uneven}: {len(rows[uneven - 1])} values for {len(header)} columns.")
    return {name: [row[place].strip() for row in rows[1:]] for place, name in enumerate(header)}, delimiter


def _look_at_table(data: Path, target: str, goal: str) -> DataSummary:
    columns, delimiter = _read_table(data)
    if target and target not in columns:
        raise ConfigError(f"--target {target!r} is not a column of '{data}'.{nearest(target, columns)}")
    label = target or list(columns)[-1]
    wanted = columns.pop(label)
    empty = [number for number, text in enumerate(wanted, 2) if not text]
    if empty:
        raise ConfigError(
            f"'{data}' has no value in {plural(len(empty), 'row')} of column {label!r}, which is predicted; the first "
            f"is row {empty[0]}. Remove these rows, or choose another column with --target."
        )
    inputs, left_out = list[str](), list[str]()
    for name, texts in columns.items():
        others = (f"{text!r} in row {row}" for row, text in enumerate(texts, 2) if not _is_number(text))
        found = next(others, "")
        (left_out if found else inputs).append(f"{name} ({found})" if found else name)
    if not inputs:
        raise ConfigError(
            f"'{data}' has no column of numbers beside {label!r}: {shorten(left_out)}. Encode text as numbers, and "
            "fill in empty values or remove their rows."
        )
    goal = goal or _goal_of(wanted)
    if goal == "numbers" and not all(map(_is_number, wanted)):
        raise ConfigError(f"The column {label!r} is not all numbers. Use --goal classes.")
    classes = sorted(set(wanted), key=lambda text: (float(text) if _is_number(text) else math.inf, text))
    told = f"predicts {label!r}: " + (f"classes {shorten(classes)}" if goal == "classes" else "a number")
    remarks = [f"{plural(len(wanted), 'row')}, {plural(len(inputs), 'column')} of numbers", told]
    if left_out:
        remarks.append(f"left out, because some values are not numbers: {shorten(left_out)}")
    return DataSummary(
        data=data,
        kind="table",
        goal=goal,
        samples=len(wanted),
        outputs=len(classes) if goal == "classes" else 1,
        values={
            "label": label,
            "columns": inputs,
            "delimiter": delimiter,
            "classes": classes if goal == "classes" else None,
            "in_features": len(inputs),
            "targets": "table.targets" if goal == "classes" else "scaled(table.targets[:, None])",
        },
        remarks=(*remarks, "20 % of the rows are held out for validation; a perceptron of two hidden layers"),
    )


def _goal_of(texts: Sequence[str]) -> str:
    """``classes`` for texts, or for few different whole numbers; else ``numbers``."""
    if not all(map(_is_number, texts)):
        return "classes"
    different = {float(text) for text in texts}
    return "classes" if len(different) <= _MOST_CLASSES and all(map(float.is_integer, different)) else "numbers"


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and abs(float(text)) < 3e38
    except ValueError:
        return False


def _look_at_text(data: Path, target: str, goal: str) -> DataSummary:
    if goal == "numbers":
        raise ConfigError("A model of text predicts the next byte, which is one of 256 classes. Leave --goal out.")
    files = [data] if data.is_file() else [path for path in _files(data) if path.suffix.lower() in _TEXTS]
    size = sum(path.stat().st_size for path in files)
    return DataSummary(
        data=data,
        kind="text",
        goal="classes",
        samples=max(0, size + len(files) - 2) // _WINDOW,  # a newline parts files
        outputs=256,
        values={"window": _WINDOW, "suffixes": _TEXTS},
        remarks=(
            f"{size:,} bytes in {plural(len(files), 'text file')}; a byte is a token",
            f"the last 10 % is held out for validation; samples of {_WINDOW} bytes",
            "a transformer of 4 blocks that predicts the next byte",
        ),
    )


def _read_tensors(data: Path) -> tuple[Any, Any, str]:
    """The arrays x and y, and the lines of a script that read them."""
    import numpy as np

    if data.is_dir():
        x, y = (np.load(data / name, mmap_mode="r", allow_pickle=False) for name in ("x.npy", "y.npy"))
        return x, y, 'x, y = (np.load(DATA / name) for name in ("x.npy", "y.npy"))'
    if data.suffix.lower() == ".npz":
        with np.load(data, allow_pickle=False) as arrays:
            _require_names(arrays)
            return arrays["x"], arrays["y"], 'arrays = np.load(DATA)\n    x, y = arrays["x"], arrays["y"]'
    import torch

    tensors = torch.load(data, weights_only=True)
    _require_names(tensors)
    known = (torch.as_tensor(tensors[name]) for name in ("x", "y"))
    x, y = ((each.float() if each.dtype == torch.bfloat16 else each).numpy() for each in known)
    return x, y, 'tensors = torch.load(DATA, weights_only=True)\n    x, y = tensors["x"], tensors["y"]'


def _require_names(held: Any) -> None:
    """Raises ``ValueError`` with what a file holds, where that is not x and y by name."""
    if not isinstance(held, Mapping) or not {"x", "y"} <= held.keys():
        found = shorten(held) if isinstance(held, Mapping) else f"a {type(held).__name__}"
        raise ValueError(f"it holds {found or 'nothing'}. Save both under these names, in a .pt file as a dict.")


def _require_finite(name: str, values: Any) -> None:
    import numpy as np

    for first in range(0, len(values), 4096):
        part = values[first : first + 4096]
        rows = np.isfinite(part).reshape(len(part), -1).all(1)
        if not rows.all():
            raise ConfigError(
                f"Row {first + int(rows.argmin())} of {name} is NaN or infinite. Fill or remove such rows."
            )


def _look_at_tensors(data: Path, target: str, goal: str) -> DataSummary:
    try:
        x, y, read = _read_tensors(data)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ConfigError(f"'{data}' does not hold tensors named x and y: {error}") from error
    if x.ndim < 2 or y.ndim < 1 or len(x) != len(y) or {x.dtype.kind, y.dtype.kind} - {*"iuf"}:
        raise ConfigError(
            f"x is {x.dtype} of shape {list(x.shape)} and y {y.dtype} of shape {list(y.shape)}. Both need as many rows "
            "of numbers, and x at least one number in each."
        )
    _require_finite("x", x)
    _require_finite("y", y)
    whole = y.ndim == 1 and y.dtype.kind in "iu"
    goal = goal or ("classes" if whole else "numbers")
    if goal == "classes" and (not whole or int(y.min()) < 0):
        raise ConfigError(
            f"Classes are whole numbers from 0 in a y of one dimension, and y is {y.dtype} of shape {list(y.shape)}. "
            "Use --goal numbers."
        )
    outputs = int(y.max()) + 1 if goal == "classes" else math.prod(y.shape[1:])
    shown = plural(outputs, "class" if goal == "classes" else "number")
    return DataSummary(
        data=data,
        kind="tensors",
        goal=goal,
        samples=len(x),
        outputs=outputs,
        values={
            "read": read,
            "in_features": math.prod(x.shape[1:]),
            "targets": "y.long()" if goal == "classes" else "scaled(y.reshape(len(y), -1))",
        },
        remarks=(
            f"{plural(len(x), 'sample')} of shape {list(x.shape[1:])}; {shown} to predict",
            "20 % is held out for validation; a perceptron of two hidden layers",
        ),
    )
