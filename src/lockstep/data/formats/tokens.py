"""Files of token numbers, mapped into memory and read in windows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.core.plan import Indices
from lockstep.data.formats.numpy_files import open_npy
from lockstep.data.keyed import SampleKeys
from lockstep.errors import ConfigError, DataError

_AT_ONCE = 1 << 22
"""Tokens that are looked at together when they are checked."""


class TokenFiles(Dataset[Any]):
    """Windows of ``length`` tokens; ``dataset[i]`` is the pair ``(tokens, the same one place on)``.

        file      t0 t1 t2 t3 t4 t5 t6 t7 t8      length 4, stride 4
        window 0  t0 t1 t2 t3 -> t1 t2 t3 t4
        window 1              t4 t5 t6 t7 -> t5 t6 t7 t8

    Both are int64 of shape (length,). A window lies within one file; tokens behind the last whole window of a file
    are not read. Nothing but the windows asked for is held in memory.

    Args:
        files: one file or several: ``.npy`` of one dimension, or any other name for plain numbers without a header,
            as nanoGPT writes them.
        length: tokens of a window.
        stride: tokens from one window's start to the next; ``None`` for ``length``, so that they do not overlap.
        dtype: what a plain file holds, in little endian; a ``.npy`` file says so itself.
        vocabulary: number of known tokens; with it every file is read once on opening, to name a token beyond.

    Raises:
        DataError: a file is missing, ends within a token, is too short, or holds a token out of range.
    """

    in_memory = True  # the operating system keeps the pages: a process to read them would only cost

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        length: int,
        *,
        stride: int | None = None,
        dtype: Literal["uint16", "uint32"] = "uint16",
        vocabulary: int | None = None,
    ) -> None:
        self.length, self.stride = length, length if stride is None else stride
        if self.length < 1 or self.stride < 1:
            raise ConfigError(f"TokenFiles has length={length} and stride={self.stride}; both must be at least 1.")
        if dtype not in ("uint16", "uint32"):
            raise ConfigError(f"TokenFiles has no dtype {dtype!r}. Known: uint16, uint32.")
        self.files = [Path(files)] if isinstance(files, (str, Path)) else [Path(file) for file in files]
        if not self.files:
            raise ConfigError("TokenFiles was given an empty list of files. Name at least one.")
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._maps = self._open()
        windows = [self._windows(file, tokens) for file, tokens in zip(self.files, self._maps, strict=True)]
        self._ends = np.cumsum(windows)
        if vocabulary is not None:
            for file, tokens in zip(self.files, self._maps, strict=True):
                _check_tokens(file, tokens, vocabulary)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """The window and its successor tokens."""
        inputs, targets = self.get_batch(np.array([index], dtype=np.int64))
        return inputs[0], targets[0]

    def __repr__(self) -> str:
        return f"TokenFiles: {len(self):,} windows of {self.length} tokens in {len(self.files)} files"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._maps = self._open()

    def sample_path(self, index: int) -> str:
        """The file of a window and its first token there."""
        file, start = self._place(index)
        return f"{self.files[file].name}, token {start}"

    def get_batch(self, indices: Indices, keys: SampleKeys | None = None) -> tuple[Tensor, Tensor]:
        """Many windows, two int64 tensors of shape (n, length)."""
        rows = np.empty((len(indices), self.length + 1), dtype=np.int64)
        for row, index in zip(rows, indices.tolist(), strict=True):
            file, start = self._place(index)
            row[:] = self._maps[file][start : start + self.length + 1]
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        file = int(np.searchsorted(self._ends, index, side="right"))
        return file, (index - (int(self._ends[file - 1]) if file else 0)) * self.stride

    def _open(self) -> list[npt.NDArray[Any]]:
        return [_mapped(file, self._dtype) for file in self.files]

    def _windows(self, file: Path, tokens: npt.NDArray[Any]) -> int:
        if len(tokens) <= self.length:
            raise DataError(
                f"{file} holds {len(tokens):,} tokens, and one window needs {self.length + 1} (length and one more). "
                "Choose a smaller length, or leave the file out."
            )
        return (len(tokens) - self.length - 1) // self.stride + 1


def _mapped(file: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if file.suffix.lower() == ".npy":
        tokens = open_npy(file)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(
                f"{file} holds {tokens.dtype} of shape {tokens.shape}; tokens must be integers in one dimension."
            )
        return tokens
    if not file.is_file():
        raise DataError(f"The file of tokens {file} does not exist.")
    size = file.stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise DataError(
            f"{file} has {size:,} bytes, which is not a multiple of {dtype.itemsize}, the size of a {dtype.name} "
            "token. Give the dtype that it was written with, or write it again."
        )
    return np.memmap(file, dtype=dtype, mode="r")


def _check_tokens(file: Path, tokens: npt.NDArray[Any], vocabulary: int) -> None:
    for start in range(0, len(tokens), _AT_ONCE):
        part = tokens[start : start + _AT_ONCE]
        wrong = np.flatnonzero((part >= vocabulary) | (part < 0))
        if len(wrong):
            place = start + int(wrong[0])
            raise DataError(
                f"{file} holds the token {int(tokens[place])} at position {place:,}, and vocabulary={vocabulary} "
                f"allows 0 to {vocabulary - 1}. Give the tokenizer's vocabulary, or another dtype."
            )
