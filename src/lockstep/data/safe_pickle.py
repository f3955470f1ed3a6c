"""Reads the pickles that CIFAR-10 is published in, without running anything they name.

A pickle is a program that may call any function. Here only four names exist, and each stands for an inert
record of its arguments; NumPy itself never sees them. The array is made from the recorded bytes after type
and size are checked.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError


class _Record:
    """Stands for an object that the pickle wants to build: keeps what it was given and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(_Record):
    pass


class _Type(_Record):
    pass


def _reconstruct(*arguments: Any) -> _Array:
    return _Array(*arguments)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in {"latin1", "latin-1"}:
        raise pickle.UnpicklingError(f"bytes are written in an unknown way ({encoding!r})")
    return text.encode("latin1")


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which has no place in a file of images"
            )
        return _ALLOWED[module, name]


def load_arrays(data: bytes, name: str) -> dict[str, Any]:
    """The dictionary in a pickle: arrays of bytes, lists, numbers and texts. ``DataError`` for anything else.

    Args:
        data: the pickle.
        name: the file it comes from, for messages.
    """
    try:
        found = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:
        raise DataError(f"{name} cannot be read: {error}. Nothing of it was used.") from error
    if not isinstance(found, dict):
        raise DataError(f"{name} holds a {type(found).__name__}, not a dictionary. Nothing of it was used.")
    return {
        key.decode("latin1") if isinstance(key, bytes) else str(key): _plain(value, name)
        for key, value in found.items()
    }


def _plain(value: Any, name: str) -> Any:
    return _array(value, name) if isinstance(value, _Array) else value


def _array(record: _Array, name: str) -> npt.NDArray[np.uint8]:
    """The array of a record ``(version, shape, type, in Fortran order, bytes)`` of bytes."""
    state = record.state
    if not (isinstance(state, tuple) and len(state) == 5 and isinstance(state[2], _Type)):
        raise DataError(f"{name} holds an array in an unknown form. Nothing of it was used.")
    _, shape, kind, fortran, body = state
    if kind.arguments[:1] not in {("u1",), (b"u1",)} or not isinstance(body, bytes):
        raise DataError(f"{name} holds an array whose elements are not bytes. Nothing of it was used.")
    if not isinstance(shape, tuple) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise DataError(f"{name} holds an array of unknown shape. Nothing of it was used.")
    if math.prod(shape) != len(body):
        raise DataError(
            f"{name} holds an array of shape {shape} with {len(body)} bytes. Nothing of it was used."
        )
    return np.frombuffer(bytearray(body), dtype=np.uint8).reshape(shape, order="F" if fortran else "C")
