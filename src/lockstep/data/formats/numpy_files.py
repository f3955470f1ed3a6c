"""Arrays in NumPy's files: ``.npy`` mapped into memory, ``.npz`` read whole; pickles are never run."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.core.plan import Indices
from lockstep.data.batch import DeviceTransform
from lockstep.data.images.transforms import FinishAlias, renamed_finish
from lockstep.data.keyed import SampleKeys
from lockstep.data.labels import check_labels, class_names
from lockstep.errors import ConfigError, DataError

_KINDS = "iufb"


class NumpyArrays(FinishAlias, Dataset[Any]):
    """Rows of two arrays; ``dataset[i]`` is the pair ``(inputs[i], targets[i])``.

    Numbers keep their type, except that integer targets become int64, as losses want them.

    Args:
        inputs: a ``.npy`` file, which stays on the disk and is mapped; or a ``.npz`` file that holds both arrays.
        targets: a ``.npy`` file with as many rows; the name of the second array within a ``.npz``, ``y`` by default.
        input_name: the name of the inputs within a ``.npz``.
        classes: how many there are, or their names; with it every target must be an integer below.
        device_transform: applied to the input on its device, such as ``Normalize``.
        finish: deprecated name of ``device_transform``.

    Raises:
        DataError: a file is missing or broken, holds Python objects, or the two arrays do not fit together.
    """

    in_memory = True

    def __init__(
        self,
        inputs: str | Path,
        targets: str | Path | None = None,
        *,
        input_name: str = "x",
        classes: int | Sequence[str] | None = None,
        device_transform: DeviceTransform | None = None,
        finish: Any = ...,
    ) -> None:
        self.path = Path(inputs)
        self._others = targets, input_name
        self.device_transform = renamed_finish(device_transform, finish)
        self.inputs, self.targets = self._open()
        if len(self.inputs) != len(self.targets):
            raise DataError(
                f"{self.path} holds {len(self.inputs):,} inputs and {len(self.targets):,} targets belong to it "
                f"({targets or 'y'}). Take both from the same set."
            )
        if not len(self.inputs):
            raise DataError(f"{self.path} has no rows.")
        if classes is not None:
            self.classes = class_names(classes)
            if self.targets.ndim != 1 or self.targets.dtype.kind not in "iu":
                raise DataError(
                    f"The targets of {self.path} are {self.targets.dtype} of shape {self.targets.shape}; with classes "
                    "each must be one integer."
                )
            check_labels(self, len(self.classes))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One row of each array."""
        inputs, targets = self.get_batch(np.array([index], dtype=np.int64))
        return inputs[0], targets[0]

    def __repr__(self) -> str:
        return f"NumpyArrays {self.path.name}: {len(self):,} rows of {self.inputs.shape[1:]}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "inputs": None, "targets": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.inputs, self.targets = self._open()

    def sample_path(self, index: int) -> str:
        """The file and the row."""
        return f"{self.path.name}, row {index}"

    def get_batch(self, indices: Indices, keys: SampleKeys | None = None) -> tuple[Tensor, Tensor]:
        """Many rows of each array, stacked."""
        targets = self.targets[indices]
        whole = targets.dtype.kind in "iu"
        return _tensor(self.inputs[indices]), _tensor(targets.astype(np.int64) if whole else targets)

    def _open(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        targets, input_name = self._others
        if self.path.suffix.lower() == ".npz":
            return _unpacked(self.path, input_name, str(targets or "y"))
        if targets is None:
            raise ConfigError(f"NumpyArrays was given {self.path} alone; name the file of the targets too.")
        return open_npy(self.path), open_npy(Path(targets))


def open_npy(path: Path) -> npt.NDArray[Any]:
    """The array of numbers in a ``.npy`` file, mapped read-only; ``DataError`` if it is not one."""
    if not path.is_file():
        raise DataError(f"The array file {path} does not exist.")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read as an array of numbers: {error}") from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise DataError(f"{path} is an archive of several arrays; name it .npz.")
    return _numbers(array, str(path))


def _unpacked(path: Path, *names: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    if not path.is_file():
        raise DataError(f"The array file {path} does not exist.")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            for name in names:
                if name not in archive.files:
                    raise DataError(f"{path} has no array {name!r}; it holds {', '.join(sorted(archive.files))}.")
            first, second = (_numbers(archive[name], f"{name} in {path}") for name in names)
            return first, second
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, AttributeError) as error:
        raise DataError(f"{path} cannot be read as an archive of arrays: {error}") from error


def _numbers(array: npt.NDArray[Any], what: str) -> npt.NDArray[Any]:
    if array.ndim == 0 or array.dtype.kind not in _KINDS:
        raise DataError(f"{what} holds {array.dtype} of shape {array.shape}; rows of numbers are needed.")
    return array


def _tensor(rows: npt.NDArray[Any]) -> Tensor:
    native = np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("="))
    return torch.from_numpy(native)
