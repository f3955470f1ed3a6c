"""Notices what a program has changed in a data set, such as its length, a transform or the level of a curriculum.

Loaders plan an epoch for the length that a set has, and workers read the copy of it that they were forked with. So both
are made again where the notes of a set are no longer those with which they were made.
"""

from __future__ import annotations

import io
import logging
import os
import re
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.sharedctypes import SynchronizedBase
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset

from lockstep.core.fingerprint import digest_tensor, memory_of
from lockstep.core.values import (
    ATTRIBUTE,
    CONTAINERS,
    DEFAULT,
    ENTRY,
    INNER,
    OF_CLASS,
    is_plain,
    is_users_object,
    octets_of,
    reached_from,
    short_digest,
    slots_of,
    stored_in,
)
from lockstep.data.adopt import Stream
from lockstep.data.wrappers.weighted import Weighted
from lockstep.data.wrappers.wrapping import Wrapping

CHOICE = "choice of samples"
"""Begins the words for what wrappers choose."""
BEGINNING = "the beginning"
"""The words for the first samples of a stream together."""
_MOST_NOTES, _MOST_ENTRIES, _DEPTH = 2_000, 64, 8
_MOST_BYTES, _MOST_HASHED = 1 << 20, 100_000
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LEAVES = (*(MethodDescriptorType, np.ufunc), *(ModuleType, logging.Logger, io.IOBase))
_FIXED = (PurePath, re.Pattern, torch.Generator)
"""Types whose values stay what they are; a generator is drawn from, and what it draws is looked for elsewhere."""
_CONTAINERS = (list, tuple, deque, Mapping, MethodType, BuiltinFunctionType)
_Note = tuple[Any, ...]


class Notes:
    """The contents of a data set, or of a loader of one, now: plain values, and which objects hold them.

    So it is noted of what its functions read beside their arguments: variables of their module, and of functions
    around them.
    """

    def __init__(self, data: Any) -> None:
        self._notes: list[tuple[Any, _Note]] = []
        self._parameters: list[torch.nn.Parameter] = []
        self._known: set[int] = set()
        self.are_whole = True
        """False where something can change unseen: large arrays in place, long lists of objects, tables of pandas."""
        self._add(data, _DEPTH)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Notes) or len(self._notes) != len(other._notes):
            return False
        return all(
            (one is two or (_is_plain(one) and type(one) is type(two))) and mine == theirs
            for (one, mine), (two, theirs) in zip(self._notes, other._notes)
        )

    __hash__ = None  # type: ignore[assignment]  # what it notes may change

    def shared(self) -> list[bytes]:
        """The contents of small memory that the set shares with its workers: tensors, and values of multiprocessing."""
        values = [value for value, _ in self._notes]
        tensors = [
            each
            for each in values
            if isinstance(each, torch.Tensor) and each.is_cpu and each.is_shared()  # type: ignore[no-untyped-call]  # in torch
        ]
        return [
            *(bytes(each.get_obj()) for each in values if isinstance(each, SynchronizedBase)),
            *(bytes(memory_of(each)) for each in tensors if each.nbytes <= _MOST_BYTES),
        ]

    def versions(self) -> list[int]:
        """Of the parameters that the set holds, or its functions name: numbers that change where these are trained."""
        return [each._version for each in self._parameters if not each.is_inference()]

    def _add(self, value: Any, depth: int, *, of_method: bool = False) -> None:
        if id(value) in self._known:
            return
        if isinstance(value, torch.nn.Parameter) and not of_method:  # one of a model's may collate, and read no weight
            self._parameters.append(value)
        note, is_all = _noted(value)
        self._notes.append((value, note))  # the value is kept, so that its identity stays its own
        if _is_plain(value) or isinstance(value, (*_LEAVES, *_FIXED)):
            return
        self.are_whole = self.are_whole and is_all and depth > 0 and len(self._notes) < _MOST_NOTES
        if depth == 0 or len(self._notes) >= _MOST_NOTES:
            return
        self._known.add(id(value))
        for each, is_noted in _parts(value):
            if is_noted:
                self._add(each, depth - 1, of_method=of_method or isinstance(value, MethodType))
            elif isinstance(each, torch.nn.Module) and not of_method:
                self._parameters += each.parameters()


def inherited_by_workers() -> object:
    """The surroundings of which samples may be made, and which workers have as they were when they were forked."""
    folder = None
    with suppress(OSError):  # it may be gone
        folder = Path.cwd()
    return dict(os.environ), folder, torch.get_default_dtype()


def choices(dataset: Any) -> dict[str, str]:
    """Digests of which samples the wrappers of a set choose, the outermost first, by the words of messages."""
    found: dict[str, str] = {}
    while isinstance(dataset, Subset | Wrapping):
        chosen: Any = None
        if type(dataset) is Subset:
            chosen = np.asarray(dataset.indices, dtype=np.int64)
        elif isinstance(dataset, Weighted):
            chosen = dataset.bounds
        if chosen is not None:
            found[f"{CHOICE} {len(found) + 1} ({type(dataset).__name__})"] = short_digest(chosen.tobytes())
        dataset = dataset.dataset
    return found


def _noted(value: Any) -> tuple[_Note, bool]:
    """The note on a value beside its identity, of a plain one itself; False where more of it can change.

    Its parts are noted on their own.
    """
    if _is_plain(value):
        return (value,), True
    if isinstance(value, SynchronizedBase):  # workers may have read ahead with what it was
        return (bytes(value.get_obj()),), True
    if (octets := octets_of(value)) is not None:
        return (octets,), True
    if isinstance(value, torch.Tensor):
        if value.is_inference():
            return (), False
        is_usual = type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_nested and value.is_cpu
        is_small = is_usual and value.layout is torch.strided and value.nbytes <= _MOST_BYTES
        # Changes of an array on the same memory, or of .data, leave the version as it is
        return (value._version, digest_tensor(value) if is_small else ""), True
    if isinstance(value, np.ndarray):
        is_small = value.nbytes <= _MOST_BYTES and not value.dtype.hasobject
        note = (value.shape, hash(value.tobytes()) if is_small else 0)
        return note, is_small or not value.flags.writeable
    try:
        count = len(stored_in(value) if isinstance(value, CONTAINERS) else value)
    except Exception:  # a data set may have none
        count = -1
    if isinstance(value, set | frozenset):
        entries = frozenset(stored_in(value))
        return (entries,), all(map(_is_plain, entries))
    if isinstance(value, list | tuple | deque | Mapping) and count > _MOST_ENTRIES:
        try:
            return (count, hash(_frozen(value)) if count <= _MOST_HASHED else 0), count <= _MOST_HASHED
        except TypeError:
            return (count,), False
    is_fixed = type(value).__module__.startswith("pyarrow.")  # its tables cannot be written to
    is_open = isinstance(value, _CONTAINERS) or hasattr(value, "__dict__") or bool(slots_of(value))
    return (count,), is_fixed or is_open


def _frozen(value: Any) -> Any:
    """Plain values in containers, as what can be hashed; ``TypeError`` for anything else."""
    if type(value) in _PLAIN:
        return value
    stored = stored_in(value)
    if isinstance(value, Mapping):
        return tuple([(name, _frozen(each)) for name, each in stored])
    if isinstance(value, list | tuple | deque):
        return tuple(stored) if set(map(type, stored)) <= set(_PLAIN) else tuple(map(_frozen, stored))
    raise TypeError(type(value))


def _parts(value: Any) -> Iterator[tuple[Any, bool]]:
    """The values of an object that a loader reads by, and whether they are noted: models that code names are not."""
    if isinstance(value, DataLoader):
        yield from ((value.dataset, True), (value.sampler, True), (value.collate_fn, True))
    # The others are read here, as they are.
    elif not isinstance(value, Stream | IterableDataset | torch.Tensor | SynchronizedBase):
        own = type(value).__module__.startswith("lockstep.")
        is_long = isinstance(value, CONTAINERS) and len(stored_in(value)) > _MOST_ENTRIES
        for how, _, name, each in reached_from(value, 0 if is_long else _MOST_ENTRIES):
            if how == ATTRIBUTE:
                is_place = isinstance(value, Sampler) and name == "epoch"  # the run has its own
                is_read = not is_place and not (own and name.startswith("_"))
            elif isinstance(each, FunctionType) and how == OF_CLASS:
                is_read = not isinstance(value, type)  # methods
            else:
                is_hidden = how == OF_CLASS and name.startswith("__")
                is_read = how in (ENTRY, DEFAULT, INNER) or (_is_read(each) and not is_hidden)
            if is_read or isinstance(each, torch.nn.Module):
                yield each, is_read


_READABLE = (
    *(*CONTAINERS, torch.Tensor, np.ndarray, bytearray, array),
    *(type, FunctionType, MethodType, BuiltinFunctionType, partial),
)


def _is_read(value: Any) -> bool:
    """True for what samples may be made of, where code of the user's reads it: not a model, nor a library's object."""
    is_users = is_users_object(value) and not isinstance(value, torch.nn.Module)
    return is_users or _is_plain(value) or isinstance(value, _READABLE)


def _is_plain(value: Any) -> bool:
    return value is None or is_plain(value)
