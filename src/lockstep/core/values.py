"""Parts of the user's values, and short texts of values that are equal where the values are.

    list, tuple, deque, dict, set       entries, as they are stored
    array of objects, mappingproxy      the same, and those of threading.local and ContextVar
    partial, method                     the function, its object and arguments
    function                            the variables around it, defaults, attributes; ``globals_of`` has what it names
    class of the user's                 ``of_class``: attributes and methods, inherited ones of his classes among them
    any object                          attributes, those in slots, too

All that looks into values asks ``inside`` for their parts. No code of the user's is run by that. Which objects are
opened, how far, and what is noted of a part depends on what is asked.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import ctypes
import datetime
import functools
import gc
import hashlib
import io
import itertools
import logging
import os
import queue
import sys
import threading
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Iterable, Iterator, Mapping, Set, Sized
from contextlib import suppress
from contextvars import ContextVar
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from multiprocessing.sharedctypes import SynchronizedBase
from types import (
    BuiltinFunctionType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.utils.data import DataLoader, Dataset

from lockstep.core.fingerprint import digest_tensor
from lockstep.core.users_code import (
    CLOSED_PACKAGES,
    function_of,
    globals_in,
    is_users_code,
    is_users_function,
    is_users_module,
    names_in,
)

_T = TypeVar("_T")
_PLAIN = {
    *(bool, int, float, complex, str, bytes, Enum, np.generic, np.dtype),
    *(torch.dtype, torch.device, torch.Size, range, slice),
    *(Decimal, Fraction, datetime.date, datetime.time, datetime.timedelta),
}
BUFFERS = (bytearray, array.array, ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
_ITERATORS = ("builtins", "itertools", "collections", "_collections")
"""Modules whose iterators tell how far they have come."""
_OF_PYTHON = frozenset(
    """
    _collections _contextvars _csv _io _queue _thread array builtins collections configparser csv ctypes datetime
    decimal enum fractions functools itertools operator pathlib queue statistics types
    """.split()  # noqa: SIM905
)
_PLACES = ("coords", "iterindex", "line_num")
"""Attributes of iterators that cannot be copied."""
_MOST_CHARACTERS, _MOST_BITS_SHOWN, _MOST_NAMED, _SAMPLE = 60, 1 << 10, 64, 4_096
MOST_BITS = 14_000
"""Of an int, in the digits that Python reads and writes."""
_CLOSED = (
    *(Dataset, DataLoader, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
    *(ModuleType, threading.Thread, logging.Logger, io.IOBase),
)
"""Objects that are not looked into: they are not part of a forward pass."""
_CLOSED_MODULES = ("transformers.trainer_callback",)
"""Their objects are what a Trainer knows of its loop, which ``TransformersTrainer`` keeps."""
NAMESPACES = {
    *(SimpleNamespace, argparse.Namespace, UserDict, UserList, ChainMap, queue.Queue),
    *(SynchronizedBase, Distribution, np.poly1d, asyncio.Queue, WeakKeyDictionary),
}
"""Classes of Python, NumPy and torch whose objects hold what the user puts there."""


# How a value is held by another: the words for it there, of its key and what holds it.
ENTRY = "{1}[{0!r}]"
ATTRIBUTE = "the attribute {0!r} of {1}"
OF_CLASS = "the class attribute {0!r} of {1}"
VARIABLE = "the variable {0!r} of {1}"
GLOBAL = "the global variable {0!r}"
DEFAULT = "a default of {1}[{0!r}]"
INNER = "{1}"
"""Of a part that has no name of its own, such as the object of a method."""
Place = tuple[int | str, Any]
"""Where a value is: by the id of the dict or list that holds it, and the key; a variable of a function by the qualified
name of the function, and its own."""


class Part(NamedTuple):
    """A value inside another one."""

    how: str
    holder: Any
    """The container, the dict of attributes or globals, the object with slots, the class, the cell of a variable or the
    qualified name of its function; or None."""
    key: Any
    value: Any

    @property
    def place(self) -> Place:
        """See ``Place``."""
        return (self.holder if isinstance(self.holder, str) else id(self.holder)), self.key

    @property
    def is_fixed(self) -> bool:
        """True for a part in whose place no other can be put, as an entry of a tuple."""
        return self.how in (ENTRY, DEFAULT, INNER) and not isinstance(self.holder, (dict, list))

    def words(self, name: str) -> str:
        """The part of what has this name, for a message."""
        if self.how == ENTRY and not is_plain(self.key):  # each has a name of its own
            are_it = [key is self.key for key, _ in entries_in(self.holder, _MOST_NAMED)]
            return f"{name}[... {are_it.index(True) if any(are_it) else ''}]"
        return self.how.format(self.key, name)

    def path(self, name: str) -> str:
        """A short form of ``words``."""
        if self.how == ENTRY:
            return self.words(name)
        if self.how == DEFAULT:
            return f"{name}(default {self.key})"
        if self.how == OF_CLASS:
            return f"{self.holder.__name__}.{self.key}"
        return str(self.key) if self.how == GLOBAL else name if self.how == INNER else f"{name}.{self.key}"

    def put(self, value: Any) -> None:
        """Puts a value there."""
        if isinstance(self.holder, dict):
            dict.__setitem__(self.holder, self.key, value)  # no method of a class of the user's
        elif isinstance(self.holder, list):
            list.__setitem__(self.holder, self.key, value)
        elif self.how == VARIABLE:
            self.holder.cell_contents = value
        elif self.how == ATTRIBUTE:
            object.__setattr__(self.holder, self.key, value)  # a slot, of a frozen class, too
        elif function_of(vars(self.holder).get(self.key, self)) is not value:  # else it stays a static method
            setattr(self.holder, self.key, value)


_BASES: tuple[Any, ...] = (list, tuple, deque, set, frozenset)
CONTAINERS = (*_BASES, dict, MappingProxyType)


def inside(value: Any, leave_out: Iterable[str] = (), most: int | None = None) -> list[Part]:
    """The parts of a value as they are stored.

    ``leave_out``: attributes. ``most``: how many entries of a container or array, the first.
    """
    kind, found = type(value), list[Part]()
    if issubclass(kind, CONTAINERS) or (issubclass(kind, np.ndarray) and value.dtype == object):
        found = [Part(ENTRY, value, *each) for each in entries_in(value, most)]
    elif issubclass(kind, FunctionType):
        for key, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            with suppress(ValueError):  # it has no value yet
                found.append(Part(VARIABLE, cell, key, cell.cell_contents))
        found += [Part(DEFAULT, None, *each) for each in enumerate(value.__defaults__ or ())]
        by_name = value.__kwdefaults__ or {}
        found += [Part(DEFAULT, by_name, *each) for each in copied(by_name.items())]
    elif issubclass(kind, functools.partial):
        found = [Part(INNER, None, "func", value.func)]
        found += [Part(ENTRY, value.args, *each) for each in enumerate(value.args)]
        found += [Part(ENTRY, value.keywords, *each) for each in copied(value.keywords.items())]
    elif issubclass(kind, MethodType | BuiltinFunctionType):
        names = ("__self__", "__func__") if kind is MethodType else ("__self__",)
        found = [Part(INNER, None, name, getattr(value, name)) for name in names]
    elif kind is ContextVar:
        found = [Part(INNER, None, "", value.get(None))]
    return found + inside_object(value, leave_out)


def inside_object(value: Any, leave_out: Iterable[str] = ()) -> list[Part]:
    """The attributes of an object, without the entries of a container."""
    held = attributes_of(value)
    found = [Part(ATTRIBUTE, held, key, each) for key, each in copied(held.items()) if key not in leave_out]
    return found + [Part(ATTRIBUTE, value, *each) for each in slots_of(value).items() if each[0] not in leave_out]


def stored_in(container: Any) -> Any:
    """The entries of one of ``CONTAINERS``, an array or another mapping, of a mapping with their keys.

    As they are stored: a class of the user's, or of e3nn's, may make something else of them when it is asked.
    """
    kind = type(container)
    if issubclass(kind, dict):
        return (OrderedDict if issubclass(kind, OrderedDict) else dict).items(container)
    if kind in _BASES:
        return container
    for base in _BASES:
        if issubclass(kind, base) and (kind.__len__, kind.__iter__) != (base.__len__, base.__iter__):
            return tuple(base.__iter__(container))
    if issubclass(kind, Mapping):
        return container.items()
    return container.flat if issubclass(kind, np.ndarray) else container


def entries_in(container: Any, most: int | None = None) -> list[tuple[Any, Any]]:
    """The entries by key or number; none of a container that another thread is changing."""
    stored = stored_in(container)
    return copied(stored if issubclass(type(container), dict | MappingProxyType) else enumerate(stored), most)


def copied(entries: Iterable[_T], most: int | None = None) -> list[_T]:
    """The entries; none of a container that another thread is changing."""
    try:
        return list(itertools.islice(entries, most))
    except RuntimeError:
        return []


def reached_from(value: Any, most: int) -> Iterator[Part]:
    """The parts of a value, and what its code reads: globals that a function names, attributes of a class."""
    yield from inside(value, most=most)
    if isinstance(value, FunctionType):
        if is_users_function(value):
            code = value.__code__
            yield from globals_of(globals_in(code), value.__globals__, names_in(code))
    else:
        yield from of_class(value if isinstance(value, type) else type(value))


def text_of_size(container: Any, least: int) -> tuple[str, bool]:
    """The number of entries, of more than ``least`` also a digest; whether any is plain, or such as (path, label).

    Of many entries the digest is of some.
    """
    stored = stored_in(container)
    if (size := len(stored)) <= least:
        return f"{size} entries", False
    some = copied(itertools.islice(stored, 0, None, max(1, size // _SAMPLE)))
    parts = [part for each in some for part in parted(each)]
    plain = [part if part is None or is_plain(part) else "..." for part in parts]
    is_told = any(part is not None and is_plain(part) for part in parts)
    return f"{size} entries of digest {short_digest(repr(plain).encode())}", is_told


def parted(entry: Any) -> Any:
    """The parts of an entry that is a list or tuple; others as the only one."""
    return entry if type(entry) in (list, tuple) else (entry,)


def of_class(kind: type) -> Iterator[Part]:
    """The attributes of a class of the user's and of those of his that it inherits from; of methods the functions."""
    for cls in kind.__mro__:
        for key, held in copied(vars(cls).items()) if is_users_module(cls.__module__) else ():
            yield Part(OF_CLASS, cls, key, function_of(held))


def globals_of(
    names: Set[str], space: dict[str, Any], attributes: Set[str] | None = None, seen: set[int] | None = None
) -> Iterator[Part]:
    """The globals that code names, and the attributes that it names of the user's own modules among them."""
    attributes = names if attributes is None else attributes
    absent = names - space.keys() if seen is None else ()  # of code, which may import them itself
    seen = set() if seen is None else seen
    imported = {key: sys.modules[key] for key in absent if key in sys.modules}
    for key in sorted(names & (space.keys() | imported.keys())):
        held = imported[key] if key in imported else space[key]
        if key not in imported:
            yield Part(GLOBAL, space, key, held)
        if type(held) is ModuleType and is_users_module(held.__name__) and id(held) not in seen:
            seen.add(id(held))
            yield from globals_of(attributes, vars(held), None, seen)


def differing(one: Mapping[_T, Any], other: Mapping[_T, Any]) -> list[_T]:
    """The keys under which two mappings have other values, or that one of them does not have."""
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


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
    return not _PLAIN.isdisjoint(type(value).__mro__)  # issubclass would ask the abstract ones among them


def repr_of(value: Any) -> str:
    """The representation of a value; of an int with more digits than Python writes, in hexadecimal."""
    return hex(value) if isinstance(value, int) and value.bit_length() > MOST_BITS else repr(value)


def text_of_plain(value: Any) -> str:
    """A value that ``is_plain`` as a short text."""
    if type(value) is int and value.bit_length() > _MOST_BITS_SHOWN:
        return f"an int of digest {short_digest(hex(value).encode())}"
    return short_text(repr(value))


def short_text(text: str, kind: str = "") -> str:
    """The text, cut to ``_MOST_CHARACTERS``; a digest, of this kind, distinguishes texts that differ in the rest."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}... ({kind}{short_digest(text.encode())})"


def text_of_tensor(tensor: Tensor) -> str:
    """A tensor in memory, of any layout."""
    if tensor.layout is torch.strided and not tensor.is_nested and tensor.numel() == 1:
        return f"tensor({tensor.item()!r})"
    digests = "".join(map(digest_tensor, parts_of_tensor(tensor)))
    if tensor.is_nested:
        return f"a nested tensor of digest {short_digest(digests.encode())}"
    if tensor.layout is torch.strided:
        return f"a tensor {list(tensor.shape)} of digest {digests[:8]}"
    return f"a sparse tensor {list(tensor.shape)} of digest {short_digest(digests.encode())}"


def parts_of_tensor(tensor: Tensor) -> list[Tensor]:
    """The dense tensors of which a tensor consists; none where its layout is not known."""
    if tensor.is_nested:
        return list(tensor.unbind())
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


def text_of_table(table: Any) -> str:
    """A table or a column of pandas, of a long one some rows; empty for other objects."""
    kind = type(table)
    if kind.__module__.partition(".")[0] == "pandas" and hasattr(kind, "iloc"):
        with suppress(Exception):  # entries that have no hash
            some = table.iloc[:: max(1, len(table) // _SAMPLE)]
            content = sys.modules["pandas"].util.hash_pandas_object(some).to_numpy().tobytes()
            return f"{table.shape} of digest {short_digest(content)}"
    return ""


def text_of_file(file: Any) -> str:
    """The name of an open file, and how far it was read from the disk or written; empty for other objects and pipes."""
    with suppress(AttributeError, OSError, ValueError):  # as of a file that is closed
        if type(file).__module__ == "_io" and file.fileno() > 2:
            place = os.lseek(file.fileno(), 0, os.SEEK_CUR) if file.readable() else file.tell()
            return f"{file.name!r} at byte {place}"
    return ""


def version_of(value: Any) -> int:
    """A number that changes where a tensor, an array or a container is changed in place; 0 for other objects."""
    if isinstance(value, Tensor):
        return value._version if not value.is_inference() else 0
    if isinstance(value, np.ndarray):
        return 0 if isinstance(value, np.memmap) else hash(value.tobytes())
    if (octets := octets_of(value)) is not None:
        return hash(octets)
    return len(stored_in(value)) if isinstance(value, CONTAINERS) else 0


def octets_of(value: Any) -> bytes | None:
    """The memory of a bytearray, an array of Python's, or a value that processes share; None for other objects."""
    return np.frombuffer(value, np.uint8).tobytes() if issubclass(type(value), BUFFERS) else None


def set_octets(value: Any, octets: bytes) -> None:
    """Gives an object the memory that ``octets_of`` returned for one of the same kind."""
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
    parts = parts_of(iterator) if isinstance(iterator, Iterator) and type(iterator).__module__ in _ITERATORS else None
    return "" if parts is None else f" at ({', '.join(map(_text_of_part, parts))})"


def parts_of(value: Any) -> Any:
    """The parts of an object of Python's own or of NumPy's, as a copy would have them; None where nothing tells."""
    kind = type(value)
    if kind.__module__ not in _OF_PYTHON and not kind.__module__.startswith("numpy"):
        return None
    if issubclass(kind, ctypes.CDLL):  # has each of its functions as an attribute once that was called
        return None
    with suppress(Exception):
        if kind is GeneratorType:
            frame, held = value.gi_frame, gc.get_referents(value)
            module = frame.f_globals.get("__name__", "")
            is_own = is_users_code(value.gi_code, module) and not value.gi_running
            if not is_own or any(type(each) is kind and not is_users_code(each.gi_code, "") for each in held):
                return None  # one around run.batches
            return [frame.f_lasti, dict(frame.f_locals), [each for each in held if hasattr(each, "__next__")]]
        if kind is threading.local:
            return dict(vars(value))
        if kind is ContextVar:
            return [value.get(None)]
        with suppress(TypeError):
            return np.frombuffer(memoryview(value).cast("B"), np.uint8)
        reduced = value.__reduce_ex__(2)
        if issubclass(kind, functools.partial):  # which looking for its attributes gives an empty dict
            reduced = (*reduced[:2], (*reduced[2][:3], reduced[2][3] or None))
        return None if isinstance(reduced, str) else [*reduced[1:3], *map(list, filter(None, reduced[3:]))]
    held = [each.__self__ if type(each) is BuiltinFunctionType else each for each in gc.get_referents(value)]
    inner = [each for each in held if hasattr(each, "__next__")]  # of a csv.writer, which holds a method, the file
    if not (inner or hasattr(kind, "__next__")):
        return None
    places = [getattr(value, key) for key in _PLACES if hasattr(kind, key)]
    return [*inner, *places, repr(value) if kind is itertools.count else None]


def _text_of_part(part: Any) -> str:
    if is_plain(part):
        return text_of_plain(part)
    if isinstance(part, tuple) and len(part) < 4:
        return ", ".join(map(_text_of_part, part))
    size = f" of {len(part)}" if isinstance(part, Sized) else ""
    return f"{type(part).__qualname__}{position_of(part)}{size}"


def is_namespace(kind: type) -> bool:
    """Returns whether a class is one of ``NAMESPACES``, or is derived from one."""
    return not NAMESPACES.isdisjoint(kind.__mro__)


def is_closed(value: Any) -> bool:
    """True for an object whose attributes are its own affair."""
    kind = type(value)
    if is_namespace(kind):
        return False
    package = kind.__module__.partition(".")[0]
    return issubclass(kind, _CLOSED) or package in CLOSED_PACKAGES or kind.__module__ in _CLOSED_MODULES


def is_users_object(value: Any) -> bool:
    """True for an object of a class of the user's own, or of a namespace of Python's, whose attributes are his."""
    kind = type(value)
    return is_namespace(kind) or (is_users_module(kind.__module__) and not is_closed(value))


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object as they are stored, those in slots aside; none for one that has no dict."""
    is_local = issubclass(type(value), threading.local)
    try:
        held = vars(value) if is_local else object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return held if isinstance(held, dict) else {}


def slots_of(value: Any) -> dict[str, Any]:
    """The attributes of an object that are in slots of its classes."""
    names = _slots_in(type(value))  # type: ignore[arg-type]  # a class can be hashed
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


@functools.lru_cache(1_024)
def _slots_in(kind: type) -> tuple[str, ...]:
    found = []
    for cls in kind.__mro__:
        slots = vars(cls).get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else tuple(slots):
            is_private = key.startswith("__") and not key.endswith("__")
            found.append(f"_{cls.__name__.lstrip('_')}{key}" if is_private else key)
    return tuple(name for name in dict.fromkeys(found) if name not in ("__dict__", "__weakref__"))


def refill(container: Any, entries: Any) -> None:
    """Gives a list, deque, set or dict these entries, as they are stored; one that has them stays as it is."""
    if isinstance(container, dict):
        now = [*stored_in(container)]
        same = (a is c and b is d for (a, b), (c, d) in zip(now, entries.items()))  # keys may be tensors
        if len(now) == len(entries) and all(same):
            return
        base = OrderedDict if isinstance(container, OrderedDict) else dict
        base.clear(container)
        for key, value in entries.items():
            base.__setitem__(container, key, value)
        return
    kind: Any = next(each for each in (set, list, deque) if isinstance(container, each))
    kind.clear(container)
    (kind.update if kind is set else kind.extend)(container, entries)
