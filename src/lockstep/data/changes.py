"""Notices what a program has changed in a data set, such as its length, a transform or the level of a curriculum.

Loaders plan an epoch for the length that a set has, and workers read the copy of it that they were forked with. So both
are made anew where the notes of a set are no longer those with which they were made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset

from lockstep.data.adopt import Stream
from lockstep.data.wrappers.weighted import Weighted
from lockstep.data.wrappers.wrapping import Wrapping

CHOICE = "choice of samples"
"""Begins the words for what wrappers choose."""
_MOST_NOTES, _MOST_ENTRIES, _DEPTH = 2_000, 64, 6
_MOST_BYTES = 1 << 20
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LEAVES = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_Note = tuple[Any, ...]


class Notes:
    """What a data set, or a loader of one, consists of now: plain values, and which objects hold them.

    Large arrays that are changed in place are not seen, and neither is what functions and generators hold.
    """

    def __init__(self, data: Any) -> None:
        self._notes: list[tuple[Any, _Note]] = []
        self._known: set[int] = set()
        self._add(data, _DEPTH)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Notes) or len(self._notes) != len(other._notes):
            return False
        return all(
            (one is two or (isinstance(one, _PLAIN) and type(one) is type(two))) and mine == theirs
            for (one, mine), (two, theirs) in zip(self._notes, other._notes)
        )

    __hash__ = None  # type: ignore[assignment]  # what it notes may change

    def _add(self, value: Any, depth: int) -> None:
        if len(self._notes) >= _MOST_NOTES or id(value) in self._known:
            return
        self._notes.append((value, _noted(value)))  # the value is kept, so that its identity stays its own
        if isinstance(value, (*_PLAIN, *_LEAVES)) or depth == 0:
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


def _noted(value: Any) -> _Note:
    """What is noted of a value beside its identity; of a plain one, itself."""
    if isinstance(value, _PLAIN):
        return (value,)
    if isinstance(value, torch.Tensor):
        return () if value.is_inference() else (value._version,)
    if isinstance(value, np.ndarray):
        is_small = value.nbytes <= _MOST_BYTES and not value.dtype.hasobject
        return (value.shape, hash(value.tobytes()) if is_small else 0)
    try:
        count = len(value)
    except Exception:  # a data set may have none
        return ()
    if isinstance(value, list | tuple) and count > _MOST_ENTRIES and isinstance(value[0], _PLAIN):
        try:
            return (count, hash(tuple(value)))
        except TypeError:
            return (count,)
    return (count,)


def _parts(value: Any) -> Iterator[Any]:
    """What an object holds that a loader reads by."""
    if isinstance(value, DataLoader):
        yield from (value.dataset, value.sampler, value.collate_fn)
    elif isinstance(value, Mapping):
        yield from value.values() if len(value) <= _MOST_ENTRIES else ()
    elif isinstance(value, list | tuple):
        yield from value if len(value) <= _MOST_ENTRIES else ()
    elif not isinstance(value, Stream | IterableDataset | torch.Tensor):  # those are read here, as they are
        own = type(value).__module__.startswith("lockstep.")
        for name, each in getattr(value, "__dict__", {}).items():
            is_place = isinstance(value, Sampler) and name == "epoch"  # the run has its own
            if not is_place and not (own and name.startswith("_")):
                yield each
