"""Short texts of values, equal where the values are: what comparisons look at, and messages show."""

from __future__ import annotations

import array
import ctypes
import datetime
import hashlib
import warnings
from collections.abc import Iterator, Sized
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.core.fingerprint import digest_tensor

_PLAIN = (
    *(bool, int, float, complex, str, bytes, Enum, np.generic, np.dtype),
    *(torch.dtype, torch.device, torch.Size, range, slice),
    *(Decimal, Fraction, datetime.date, datetime.time, datetime.timedelta),
)
_BUFFERS = (bytearray, array.array, ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
_ITERATORS = ("builtins", "itertools", "collections", "_collections")
"""Modules whose iterators tell how far they have come."""
_MOST_CHARACTERS, _MOST_BITS = 60, 1 << 10


def short_digest(content: bytes) -> str:
    """Eight digits that tell contents apart."""
    return hashlib.sha256(content).hexdigest()[:8]


def told_apart(owner: Any, name: str, longer: str, known: dict[str, Any]) -> str:
    """The name of an owner; the longer one, or that with a number, where another owner in ``known`` has it."""
    words, number = name, 1
    while known.setdefault(words, owner) is not owner:
        words, number = longer if number == 1 else f"{longer} ({number})", number + 1
    return words


def class_name(kind: type, known: dict[str, Any]) -> str:
    """See ``told_apart``."""
    return told_apart(kind, kind.__name__, f"{kind.__module__}.{kind.__qualname__}", known)


def is_plain(value: Any) -> bool:
    """Returns whether a value is a number, a text, or another that never changes and has no parts."""
    return issubclass(type(value), _PLAIN)


def text_of_plain(value: Any) -> str:
    """A value that ``is_plain`` as a short text."""
    if type(value) is int and value.bit_length() > _MOST_BITS:  # Python writes no number of 4,300 digits
        return f"an int of digest {short_digest(hex(value).encode())}"
    return short_text(repr(value))


def short_text(text: str) -> str:
    """The text, cut to ``_MOST_CHARACTERS``; a digest distinguishes texts that differ in what was cut off."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}... ({short_digest(text.encode())})"


def text_of_tensor(tensor: Tensor) -> str:
    """A tensor in memory, of any layout."""
    if tensor.layout is torch.strided and tensor.numel() == 1:
        return f"tensor({tensor.item()!r})"
    digests = "".join(map(digest_tensor, parts_of_tensor(tensor)))
    if tensor.layout is torch.strided:
        return f"a tensor {list(tensor.shape)} of digest {digests[:8]}"
    return f"a sparse tensor {list(tensor.shape)} of digest {short_digest(digests.encode())}"


def parts_of_tensor(tensor: Tensor) -> list[Tensor]:
    """The dense tensors of which a tensor consists; none where its layout is not known."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def text_of_array(values: Any) -> str:
    """A NumPy array of numbers, with its mask."""
    digest = hashlib.sha256(np.ascontiguousarray(values).tobytes())
    if isinstance(values, np.ma.MaskedArray):
        digest.update(np.ma.getmaskarray(values).tobytes())
    return f"an array {list(values.shape)} of digest {digest.hexdigest()[:8]}"


def octets_of(value: Any) -> bytes | None:
    """The memory of a bytearray, an array of Python's, or a value that processes share; None for other objects."""
    return np.frombuffer(value, np.uint8).tobytes() if issubclass(type(value), _BUFFERS) else None


def set_octets(value: Any, octets: bytes) -> None:
    """Gives an object the memory that ``octets_of`` returned for one of its kind."""
    if isinstance(value, bytearray):
        value[:] = octets
    elif isinstance(value, array.array):
        del value[:]
        value.frombytes(octets)
    else:
        np.frombuffer(value, np.uint8)[:] = np.frombuffer(octets, np.uint8)


def text_of_octets(octets: bytes) -> str:
    """A short text for the result of ``octets_of``."""
    return f"{len(octets)} bytes of digest {short_digest(octets)}"


def position_of(iterator: Any) -> str:
    """How far an iterator of Python's own has come; empty for other objects, and where that cannot be known."""
    if isinstance(iterator, GeneratorType):
        if (frame := iterator.gi_frame) is None:
            return " at its end"
        held = {key: text_of_plain(each) for key, each in frame.f_locals.items() if is_plain(each)}
        return f" at line {frame.f_lineno} {short_text(repr(held))}"
    if not isinstance(iterator, Iterator) or type(iterator).__module__ not in _ITERATORS:
        return ""
    try:
        with warnings.catch_warnings():
            # Those of itertools cannot be copied from Python 3.14 on.
            warnings.simplefilter("ignore", DeprecationWarning)
            made: Any = iterator.__reduce__()
    except TypeError:
        return ""
    _, arguments, *state = made
    return f" at ({', '.join(map(_text_of_part, (*arguments, *state)))})"


def _text_of_part(part: Any) -> str:
    if is_plain(part):
        return text_of_plain(part)
    if isinstance(part, tuple) and len(part) < 4:
        return ", ".join(map(_text_of_part, part))
    size = f" of {len(part)}" if isinstance(part, Sized) else ""
    return f"{type(part).__qualname__}{position_of(part)}{size}"
