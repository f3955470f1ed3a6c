"""Notices what a program has changed in a data set, such as its length, a transform or the level of a curriculum.

Loaders plan an epoch for the length that a set has, and workers read the copy of it that they were forked with. So both
are made anew where the notes of a set are no longer those with which they were made.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import logging
import re
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import partial
from multiprocessing.sharedctypes import SynchronizedBase
from pathlib import PurePath
from threading import Thread
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

from lockstep.data.adopt import Stream
from lockstep.data.keyed import read_by
from lockstep.data.wrappers.weighted import Weighted
from lockstep.data.wrappers.wrapping import Wrapping
from lockstep.runtime.error_record import is_users_file, is_users_module

CHOICE = "choice of samples"
"""Begins the words for what wrappers choose."""
BEGINNING = "the beginning"
"""The words for the first samples of a stream together."""
_MOST_NOTES, _MOST_ENTRIES, _DEPTH = 2_000, 64, 8
_MOST_BYTES, _MOST_HASHED = 1 << 20, 100_000
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LEAVES = (
    *(type, BuiltinFunctionType, MethodDescriptorType, np.ufunc),
    *(ModuleType, logging.Logger, io.IOBase, Enum),
)
_FIXED = (PurePath, range, re.Pattern, np.generic, np.dtype, torch.dtype, torch.device, torch.Generator)
"""Types whose values stay what they are; a generator is drawn from, and what it draws is looked for elsewhere."""
_CONTAINERS = (list, tuple, deque, Mapping, MethodType)
_Note = tuple[Any, ...]


class Notes:
    """The contents of a data set, or of a loader of one, now: plain values, and which objects hold them.

    So it is noted of what its functions read beside their arguments: variables of their module, and of functions
    around them.
    """

    def __init__(self, data: Any) -> None:
        self._notes: list[tuple[Any, _Note]] = []
        self._known: set[int] = set()
        self.are_whole = True
        """False where something can change unseen: large arrays in place, long lists of objects, tables of pandas."""
        self._add(data, _DEPTH)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Notes) or len(self._notes) != len(other._notes):
            return False
        return all(
            (one is two or (isinstance(one, _PLAIN) and type(one) is type(two))) and mine == theirs
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
            *(bytes(each.detach().numpy()) for each in tensors if each.nbytes <= _MOST_BYTES),
        ]

    def _add(self, value: Any, depth: int) -> None:
        if id(value) in self._known:
            return
        note, is_all = _noted(value)
        self._notes.append((value, note))  # the value is kept, so that its identity stays its own
        if isinstance(value, (*_PLAIN, *_LEAVES, *_FIXED)):
            return
        self.are_whole = self.are_whole and is_all and depth > 0 and len(self._notes) < _MOST_NOTES
        if depth == 0 or len(self._notes) >= _MOST_NOTES:
            return
        self._known.add(id(value))
        for each in _parts(value):
            self._add(each, depth - 1)


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
            digest = hashlib.sha256(chosen.tobytes()).hexdigest()[:8]
            found[f"{CHOICE} {len(found) + 1} ({type(dataset).__name__})"] = digest
        dataset = dataset.dataset
    return found


def _noted(value: Any) -> tuple[_Note, bool]:
    """The note on a value beside its identity, of a plain one itself; False where more of it can change.

    Its parts are noted on their own.
    """
    if isinstance(value, _PLAIN):
        return (value,), True
    if isinstance(value, SynchronizedBase):  # workers may have read ahead with what it was
        return (bytes(value.get_obj()),), True
    if isinstance(value, bytearray | array):
        return (bytes(value),), True
    if isinstance(value, torch.Tensor):
        return ((), False) if value.is_inference() else ((value._version,), True)
    if isinstance(value, np.ndarray):
        is_small = value.nbytes <= _MOST_BYTES and not value.dtype.hasobject
        note = (value.shape, hash(value.tobytes()) if is_small else 0)
        return note, is_small or not value.flags.writeable
    try:
        count = len(value)
    except Exception:  # a data set may have none
        count = -1
    if isinstance(value, set | frozenset):
        return (frozenset(value),), all(isinstance(each, _PLAIN) for each in value)
    if isinstance(value, list | tuple | deque | Mapping) and count > _MOST_ENTRIES:
        try:
            return (count, hash(_frozen(value)) if count <= _MOST_HASHED else 0), count <= _MOST_HASHED
        except TypeError:
            return (count,), False
    is_fixed = type(value).__module__.startswith("pyarrow.")  # its tables cannot be written to
    return (count,), is_fixed or isinstance(value, _CONTAINERS) or hasattr(value, "__dict__")


def _frozen(value: Any) -> Any:
    """Plain values in containers, as what can be hashed; ``TypeError`` for anything else."""
    if isinstance(value, Mapping):
        return tuple([(name, _frozen(each)) for name, each in value.items()])
    if isinstance(value, list | tuple | deque):
        return tuple(value) if set(map(type, value)) <= set(_PLAIN) else tuple(map(_frozen, value))
    if type(value) in _PLAIN:
        return value
    raise TypeError(type(value))


def _parts(value: Any) -> Iterator[Any]:
    """The values of an object that a loader reads by."""
    if isinstance(value, DataLoader):
        yield from (value.dataset, value.sampler, value.collate_fn)
    elif isinstance(value, Mapping):
        yield from value.values() if len(value) <= _MOST_ENTRIES else ()
    elif isinstance(value, list | tuple | deque):
        yield from value if len(value) <= _MOST_ENTRIES else ()
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, FunctionType):
        yield from _read_by(value)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    # The others are read here, as they are.
    elif not isinstance(value, Stream | IterableDataset | torch.Tensor | np.ndarray | SynchronizedBase):
        own = type(value).__module__.startswith("lockstep.")
        for name, each in getattr(value, "__dict__", {}).items():
            is_place = isinstance(value, Sampler) and name == "epoch"  # the run has its own
            if not is_place and not (own and name.startswith("_")):
                yield each
        methods = [
            getattr(each, "__func__", each) for kind in type(value).__mro__ for each in vars(kind).values()
        ]
        yield from filter(_is_users, methods)
        yield from _held_by_class(type(value))


_READABLE = (
    *(*_PLAIN, list, tuple, dict, torch.Tensor, np.ndarray, SimpleNamespace, argparse.Namespace),
    *(deque, set, frozenset, bytearray, array, SynchronizedBase, UserDict, UserList),
)


def _held_by_class(kind: type) -> Iterator[Any]:
    """The values of attributes of a class of the user's, its methods aside."""
    for each in kind.__mro__ if is_users_module(kind.__module__) else ():
        own = vars(each).items() if is_users_module(each.__module__) else ()
        yield from (held for key, held in own if not key.startswith("__") and isinstance(held, _READABLE))


def _is_users(function: Any) -> bool:
    return isinstance(function, FunctionType) and is_users_file(function.__code__.co_filename)


def _read_by(function: FunctionType) -> Iterator[Any]:
    """Everything that a function of the user's reads beside its arguments: values, containers and further functions."""
    for _, each in read_by(function) if _is_users(function) else ():
        if isinstance(each, type):
            yield from _held_by_class(each)
        elif isinstance(each, _READABLE) or _is_users(each) or _is_users_object(each):
            yield each


def _is_users_object(value: Any) -> bool:
    """True for an object of a class of the user's that samples may be made of."""
    is_else = isinstance(value, (*_LEAVES, torch.nn.Module, Dataset, DataLoader, Thread))
    return is_users_module(type(value).__module__) and not is_else
