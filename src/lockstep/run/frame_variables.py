"""The variables of the user's running functions, and all that they hold, as texts that are equal where values are.

    numbers, texts                              themselves
    tensors, arrays, tables                     the sum of their bits, of a part if they are large
    lists, dicts, objects of the user's         entry by entry, attribute by attribute
    functions, classes of the user's            the variables around them, defaults, attributes, globals they name
    iterators, objects of Python's own          one text of all that they are made of

Generators of random numbers are found wherever one of these leads to them.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import sys
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from inspect import GEN_CREATED, getgeneratorstate
from types import CodeType, FunctionType, GeneratorType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lockstep.core.fingerprint import digest_tensor
from lockstep.core.generators import encoded_state
from lockstep.core.users_code import (
    codes_in,
    homes_of,
    is_users_function,
    is_users_module,
    methods_of,
    names_asked_for,
    names_in,
    names_loaded,
    owners_of,
    users_frames,
)
from lockstep.core.values import (
    ATTRIBUTE,
    BUFFERS,
    DEFAULT,
    ENTRY,
    GLOBAL,
    INNER,
    VARIABLE,
    Part,
    attributes_of,
    class_name,
    copied,
    entries_in,
    globals_of,
    inside,
    inside_object,
    is_closed,
    is_namespace,
    is_plain,
    is_users_object,
    of_class,
    parted,
    parts_of,
    parts_of_tensor,
    short_digest,
    stored_in,
    text_of_file,
    text_of_plain,
    text_of_size,
    text_of_table,
)
from lockstep.run.changed_names import CONSTRUCTORS, changed_by_reading, changed_names, counted_by_reading
from lockstep.run.live_variables import live_in
from lockstep.run.optimizer_step import PreparedOptimizer
from lockstep.strategies.absent import AbsentTensor

logger = logging.getLogger(__name__)

_MOST_PLACES, _MOST_ENTRIES, _MOST_DEPTH, _OWN_DEPTH = 2_000, 64, 8, 3
_MOST_BYTES, _SAMPLE, _MOST_SAMPLES, _MOST_SORTED = 1 << 20, 4_096, 256, 8_192
"""Of a tensor or array that is read; the numbers out of a larger one; the objects out of a longer list; of a set."""
_LRU_CACHED = type(functools.lru_cache(len))
_VALUES = (Tensor, np.ndarray, list, dict, set, deque)
_CONFIGS = ("omegaconf.", "ml_collections.")
"""Installed packages whose objects hold the user's numbers."""
_OF_TORCH = (
    *("torch.distributions.", "torch.optim.lr_scheduler", "torch.amp.", "torch.quasirandom"),
    "torch.utils.data.sampler",
)
"""Modules of torch whose objects hold what a loop changes."""


@dataclass
class Variables:
    """The variables of the user's frames at a moment."""

    known: Mapping[int, str]
    """The ids of objects that checkpoints hold, with a name of each: a variable may be another of them."""
    texts: dict[str, str] = field(default_factory=dict)
    """Values by the name of the variable, with attributes and entries, as text that is equal where values are."""
    values: dict[str, Any] = field(default_factory=dict)
    """The values themselves."""
    plain: dict[str, Part] = field(default_factory=dict)
    """Values that are plain."""
    tensors: dict[str, list[Any]] = field(default_factory=dict)
    """By variable: the tensor itself; for a module, the module and its tensors."""
    generators: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    """Those that ``run.prepare`` was not given."""
    with_values: set[str] = field(default_factory=set)
    """Names of tensors, arrays, modules, and lists of many plain values."""
    of_data: set[str] = field(default_factory=set)
    """Names of what is held by data sets, or by objects that look like one."""
    of_datasets: set[str] = field(default_factory=set)
    """Names of what is held by a ``Dataset`` of torch."""
    perhaps_read: set[str] = field(default_factory=set)
    """Names of what reading samples may fill: globals, and lists and dicts of tensors or objects in ``of_data``."""
    local: set[str] = field(default_factory=set)
    """Names of the frames' variables. No code shows which attributes and globals are set before they are read."""
    read: set[str] = field(default_factory=set)
    """Those of ``local`` that are read before they are set, as the code shows."""
    live: set[str] = field(default_factory=set)
    """Names of what the frames may read before they set it again, as far as their code shows."""
    asked_for: set[str] = field(default_factory=set)
    """See ``names_asked_for``."""
    counted: set[str] = field(default_factory=set)
    """See ``counted_by_reading``."""
    other_names: dict[str, set[str]] = field(default_factory=dict)
    """By the first name of a value: the last words of the other names under which it was found."""
    renewed: set[str] = field(default_factory=set)
    """See ``renew_floats``."""

    @classmethod
    def of_loop(cls, known: Mapping[int, str], callbacks: Iterable[object] = (), **loop: Any) -> Variables:
        """Looks at the frames that are running, and at the user's own ``callbacks``: objects and functions.

        For ``loop`` see ``live_in``.
        """
        found = cls(known)
        _Search(found).look_at_loop(callbacks, **loop)
        return found

    def held(self, name: str) -> list[Any]:
        """The tensors, arrays or containers at a name, by which a loss that reads them is recognised."""
        value = self.values[name]
        is_one = isinstance(value, list | dict | deque | np.ndarray)
        return [value] if is_one else self.tensors.get(name, [])

    def renew_floats(self, names: Collection[str]) -> None:
        """Replaces floats that an object, a dict or a list holds by equal ones, so that setting them again shows."""
        for name in names & self.plain.keys():
            part = self.plain[name]
            if type(part.value) is float and not (part.is_fixed or isinstance(part.holder, str)):
                part = part._replace(value=part.value * 1.0)
                part.put(part.value)
                self.plain[name], self.values[name] = part, part.value
                self.renewed.add(name)


class _Search:
    """The search that fills ``found``: what it is looking at, and what it still has to look at.

    Args:
        in_data: whether it looks at what a data set holds.
        only_tensors: whether it is in an object of an installed package, of which it notes no numbers.
    """

    def __init__(self, found: Variables, *, in_data: bool = False, only_tensors: bool = False) -> None:
        self.found, self._only_tensors = found, only_tensors
        self._most_bytes = 1 << 12 if in_data else _MOST_BYTES
        self._is_live, self._is_in_data, self._is_in_dataset = True, in_data, False
        self._noted: list[str] = []
        self._codes: list[tuple[CodeType, dict[str, Any]]] = []
        """The code and the globals of functions whose globals are still to be looked at."""
        self._modules: set[CodeType] = set()
        """The code of running modules."""
        self._reading: list[FunctionType] = []
        """Functions that data sets hold, and the methods of objects that they hold."""
        self._bound: list[Any] = []
        """The objects of methods that data sets hold."""
        self._changed_by_reading: set[str] = set()
        self._named: dict[str, Any] = {}
        self._kept: list[Any] = []
        """The results of ``parts_of``: the ids of objects are those of others once they are gone."""
        self._most_seen = _MOST_PLACES
        self._seen: dict[int, tuple[int, int]] = {}
        """By the id of an object: the range in ``_noted`` of the names of it and of what it holds."""

    def look_at_loop(self, callbacks: Iterable[object], **loop: Any) -> None:
        """See ``Variables.of_loop``."""
        found, frames = self.found, users_frames()
        variables: list[tuple[str, Part, bool]] = []
        for frame, live, owner in zip(frames, live_in(frames, **loop), owners_of(frames)):
            code, home = frame.f_code, owner.removesuffix(": ") or frame.f_globals
            found.local |= {owner + name for name in code.co_varnames + code.co_cellvars + code.co_freevars}
            variables += [
                (f"{owner}{name}", Part(VARIABLE, home, name, value), name in live)
                for name, value in copied(frame.f_locals.items())
                if not name.startswith("__")
            ]
        read = {id(part.value) for _, part, is_live in variables if is_live}  # by another frame, perhaps
        for name, part, is_live in sorted(variables, key=lambda variable: _is_foreign(variable[1].value)):
            found.local.add(name)
            found.read |= {name} if is_live else set()
            self._is_live = is_live or id(part.value) in read
            self._look(part, name)
        self._is_live = True
        numbers = Counter[str]()
        for each in filter(_is_users_callback, callbacks):
            numbers[name := getattr(each, "__name__", type(each).__name__)] += 1
            self._look(Part(INNER, None, None, each), f"{name} (callback {numbers[name]})")
        loggers = (logging.root, *copied(logging.root.manager.loggerDict.values()))
        streams = [getattr(each, "stream", None) for one in loggers for each in getattr(one, "handlers", ())]
        for number, stream in enumerate(filter(None, streams)):
            self._look(Part(INNER, None, None, stream), f"stream {number} of logging")
        self._codes += [(frame.f_code, frame.f_globals) for frame in frames]
        self._modules = {frame.f_code for frame in frames if frame.f_code.co_name == "<module>"}
        own = {key: id(space) for space in (each.f_globals for each in frames[::-1]) for key in [*space]}
        self._look_at_globals(own)
        self._look_at_what_data_reads(own)

    def _look_at_what_data_reads(self, own: Mapping[str, int]) -> None:
        """Looks at the values that functions of data sets read: globals, and variables of the frames."""
        places, attributes = self._read_by_data(own)
        places = [*(("", Part(INNER, None, "", each)) for each in self._bound), *places]
        self._is_in_data = self._is_in_dataset = True
        known = {part.place: name for name, part in self.found.plain.items()}
        seen = set[int]()
        for name, part in places:
            name, held = known.get(part.place, name), part.value
            if part.key in self._changed_by_reading:
                first, last = self._seen.get(id(held), (0, 0))
                self.found.perhaps_read.update(self._noted[first:last])
            elif held is not None and (is_plain(held) or isinstance(held, _VALUES)):
                self._look(part, name)
            elif is_users_object(held) and not isinstance(held, Dataset | nn.Module) and id(held) not in seen:
                seen.add(id(held))
                read = [each for each in inside_object(held) if each.key in attributes]
                places += [(each.path(name), each) for each in read]

    def _read_by_data(self, own: Mapping[str, int]) -> tuple[list[tuple[str, Part]], set[str]]:
        """The variables that functions of data sets name, and the attributes; notes what these functions change."""
        places, attributes, seen = list[tuple[str, Part]](), set[str](), set[FunctionType]()
        while self._reading:
            function = self._reading.pop()
            if function in seen or not is_users_function(function):
                continue
            seen.add(function)
            codes = [*codes_in(function.__code__)]
            read = set[str]().union(*(names_loaded(code, "LOAD_ATTR", "IMPORT_FROM") for code in codes))
            names = set[str]().union(*(names_loaded(code, "LOAD_GLOBAL", "LOAD_NAME") for code in codes))
            package = function.__globals__.get("__package__")
            for each in set[str]().union(*(names_loaded(code, "IMPORT_NAME") for code in codes)):
                names |= {each, f"{package}.{each}"}  # the second is of "from .settings import level"
            attributes |= read
            for part in globals_of(names, function.__globals__, read):
                _, space, key, held = part
                if isinstance(held, FunctionType):
                    self._reading.append(held)
                    whole = [(held.__code__, -1, math.inf)]
                    self._changed_by_reading |= changed_names(whole, {}, of_functions=True)
                places.append((_name_of(key, space, own), part))
            for part in inside(function):
                homes = homes_of(codes[0]) if part.how == VARIABLE else ()
                local = [home for home in homes if f"{home}: {part.key}" in self.found.local]
                places += [(f"{home}: {part.key}", part._replace(holder=home)) for home in local]
        return places, attributes

    def _look_at_globals(self, own: Mapping[str, int]) -> None:
        """Looks at the globals that code names, and those of the user's functions that it names, and so on."""
        seen: set[tuple[CodeType, int]] = set()
        while self._codes:
            code, space = self._codes.pop(0)  # what is near comes first
            if (code, id(space)) in seen:
                continue
            seen.add((code, id(space)))
            self.found.asked_for |= names_asked_for(code)
            self._codes += [(inner, space) for inner in code.co_consts if isinstance(inner, CodeType)]
            for key in code.co_names:
                held = space.get(key, sys.modules.get(key))  # which the code may import
                name = _name_of(key, space, own)
                if type(held) is ModuleType and is_users_module(held.__name__):
                    self._codes.append((code, vars(held)))
                elif key in space and name in self.found.texts:
                    if code not in self._modules:  # functions may read what the code of the module does not
                        first, last = self._seen.get(id(held), (0, 0))
                        self._mark([name, *self._noted[first:last]])
                elif key in space:
                    self._look(Part(GLOBAL, space, key, held), name)

    def _look(self, part: Part, name: str, depth: int = 0) -> None:
        """Notes a value and what it holds."""
        value = part.value
        own = vars(value).get("wrapped") if type(value) is PreparedOptimizer else value
        held = self.found.known.get(id(own))
        if value is None or is_plain(value) or held is not None:
            if not self._only_tensors:
                self._note(name, text_of_plain(value) if held is None else held, value)
                self.found.plain[name] = part
            return
        if depth < _OWN_DEPTH and part.how != ENTRY:  # however large a list beside it is, as of the episodes of a game
            self._most_seen = len(self._seen) + _MOST_PLACES
        if len(self._seen) > self._most_seen:
            return
        if self._is_in_dataset:
            self._reading += _functions_in(value)
            self._bound += [value.__self__] if isinstance(value, MethodType) else []
        is_named = issubclass(type(value), type | FunctionType)
        is_object = is_named or issubclass(type(value), nn.Module | Dataset) or is_users_object(value)
        if is_object and not self._only_tensors:
            what = value if is_named else type(value)
            self._note(name, f"{what.__module__}.{what.__qualname__}", value)  # another may take its place
        if type(value) in (tuple, frozenset) and all(each is None or is_plain(each) for each in value):
            # Names of the same constant may have nothing to do with each other: there is one ().
            self._look_into(value, name, depth)
            return
        start = len(self._noted)
        first, last = self._seen.setdefault(id(value), (start, start))
        self._mark(self._noted[first:last])  # it may have been found as a variable that is read no more
        if first == start:
            self._look_into(value, name, depth)
            self._seen[id(value)] = start, len(self._noted)
        elif first < last:
            alone = name.rpartition(" ")[2].rpartition(".")[2]
            self.found.other_names.setdefault(self._noted[first], set()).add(alone)

    def _look_into(self, value: Any, name: str, depth: int) -> None:
        kind = type(value)
        if issubclass(kind, Optimizer) and not issubclass(kind, PreparedOptimizer):
            self.found.optimizers[name] = value
            self._mark([name])
        if issubclass(kind, Tensor):
            if not issubclass(kind, AbsentTensor) and value.numel():
                self.found.tensors[name] = [value]
                self._note(name, self._text_of(value), value, has_values=True)
        elif issubclass(kind, np.ndarray):
            self._array(value, name)
            for part in inside_object(value):  # a mask, or attributes of a class of the user's
                self._look_at_part(part, name, depth)
        elif (state := encoded_state(value)) is not None:
            self._generator(value, state, name, depth)
        elif issubclass(kind, nn.Module):
            self._module(value, name)
        elif issubclass(kind, GeneratorType) and getgeneratorstate(value) == GEN_CREATED:
            self._note(name, "an iterator at its beginning", value)
        elif issubclass(kind, _BaseDataLoaderIter):
            self._note(name, f"after {value._num_yielded} batches", value)
        elif depth < _MOST_DEPTH:
            self._look_deeper(value, name, depth)

    def _look_deeper(self, value: Any, name: str, depth: int) -> None:
        """Looks at what holds other values."""
        kind = type(value)
        if issubclass(kind, FunctionType | _LRU_CACHED):
            self._function(value, name, depth)
        elif issubclass(kind, type):
            self._class(value, depth)
        elif issubclass(kind, list | tuple | deque | dict | MappingProxyType):
            self._container(value, name, depth)
            self._attributes(value, name, depth)
        elif issubclass(kind, DataLoader):
            was, self._only_tensors = self._only_tensors, False
            for key in ("dataset", "sampler", "generator", "collate_fn"):
                self._look_at_part(Part(ATTRIBUTE, vars(value), key, getattr(value, key, None)), name, depth)
            self._only_tensors = was
            collate = getattr(value.collate_fn, "__func__", value.collate_fn)
            reader = collate if isinstance(collate, FunctionType) else type(collate)
            self.found.counted |= counted_by_reading(reader)  # type: ignore[arg-type]  # hashable
        elif issubclass(kind, set | frozenset):
            if not self._only_tensors:
                stored = stored_in(value)
                every = sorted(map(_text_of_entry, stored if len(stored) <= _MOST_SORTED else ()))
                content = f" of digest {short_digest(repr(every).encode())}"
                self._note(name, f"{len(stored)} entries{content}", value, has_values=self._is_in_data)
        elif text := text_of_table(value):
            self._note(name, text, value, has_values=True)
        elif not (self._only_tensors or self._is_in_data) and (text := text_of_file(value)):
            self._note(name, text, value)
        elif issubclass(kind, BUFFERS):
            self._whole(value, name, [np.frombuffer(value, np.uint8)], depth, kind.__name__, self._only_tensors)
        elif issubclass(kind, Dataset) or kind.__module__.startswith(_OF_TORCH) or not is_closed(value):
            self._attributes(value, name, depth)
        elif (parts := parts_of(value)) is not None or issubclass(kind, GeneratorType):
            what = "an iterator" if hasattr(kind, "__next__") else kind.__name__
            self._whole(value, name, parts if isinstance(parts, list) else [parts], depth, what, self._only_tensors)

    def _generator(self, value: Any, state: Any, name: str, depth: int) -> None:
        if self._is_in_data:  # reading samples draws from it
            return
        self.found.generators[name] = value
        self._note(name, short_digest(repr(state).encode()), value)
        for part in inside_object(value, ("gauss_next",)) if is_users_object(value) else ():
            self._look_at_part(part, name, depth)
        seeds = getattr(getattr(value, "bit_generator", value), "seed_seq", None)
        self._look(Part(ATTRIBUTE, name, "seed_seq", seeds), f"{name}.seed_seq", depth)

    def _look_at_part(self, part: Part, name: str, depth: int) -> None:
        self._look(part, part.path(name), depth + 1)

    def _container(self, value: Any, name: str, depth: int) -> None:
        """Looks at the entries of a list, tuple, deque or dict; one text stands for those of a long one."""
        stored = stored_in(value)
        is_long = len(stored) > _MOST_ENTRIES
        text, is_told = text_of_size(value, 0 if self._is_in_data else _MOST_ENTRIES)
        is_foreign = self._only_tensors or self._is_in_data  # what a data set has read may fill a cache
        has_tensors = is_long and _begins_with_tensors(stored)
        if is_long and (has_tensors or not is_foreign):
            some = copied(itertools.islice(stored, 0, None, 1 + len(stored) // _samples_of(stored)))
            self._whole(value, name, some, depth, text)
            self.found.with_values.add(name)
        elif is_told or not self._only_tensors:
            is_ordered = issubclass(type(value), dict) and not is_foreign
            order = [key for key, _ in stored if is_plain(key)] if is_ordered else []
            text += f" of digest {short_digest(repr(order).encode())}" if order else ""
            self._note(name, text, value, has_values=self._is_in_data)
        if self._is_in_data and not is_told:
            self.found.perhaps_read.add(name)
        for key, held in entries_in(value) if not is_long else ():
            if not (is_told and self._is_in_data and (held is None or is_plain(held))):
                self._look_at_part(Part(ENTRY, value, key, held), name, depth)

    def _whole(
        self, value: Any, name: str, parts: list[Any], depth: int, what: str, only_tensors: bool = False
    ) -> None:
        """Notes one text for all that an object is made of; ``what`` names its kind."""
        found = Variables(self.found.known, local=self.found.local)
        inner = _Search(found, in_data=self._is_in_data, only_tensors=only_tensors)
        for number, part in enumerate(parts):
            inner._look_at_part(Part(ENTRY, name, number, part), name, depth)
        self._kept, self._codes = [*self._kept, parts, inner], [*self._codes, *inner._codes]
        self._reading, self._bound = self._reading + inner._reading, self._bound + inner._bound
        self.found.generators |= found.generators
        texts = sorted(pair for pair in found.texts.items() if pair[0] not in found.generators)
        if not only_tensors or hasattr(type(value), "__next__"):
            self._note(name, f"{what} of digest {short_digest(repr(texts).encode())}", value)

    def _function(self, function: Any, name: str, depth: int) -> None:
        """Looks at a function's closure, unless the function around it still runs, its defaults and attributes.

        Functions of installed packages have marks of their own as attributes, such as those of ``torch.compile``.
        """
        is_own, homes = type(function) is FunctionType and is_users_function(function), list[str]()
        if is_own:
            self._codes.append((function.__code__, function.__globals__))
            homes = homes_of(function.__code__)
        for part in inside(function):
            if part.how == ATTRIBUTE:
                if is_own or type(function) is not FunctionType or part.key == "__wrapped__":
                    self._look_at_part(part, name, depth)
            elif is_own and part.how == DEFAULT:
                self._look_at_part(part._replace(holder=name), name, depth)
            elif homes and not any(f"{each}: {part.key}" in self.found.local for each in homes):
                self._look_at_part(part._replace(holder=homes[-1]), name, depth)

    def _class(self, kind: type, depth: int) -> None:
        """Looks at the attributes of a class of the user's."""
        was_live, self._is_live = self._is_live, True  # whatever object it was found by
        known = {id(each) for each in kind.__mro__ if each is not kind and id(each) in self._seen}
        for part in of_class(kind) if not issubclass(kind, Enum) else ():
            if not (id(part.holder) in known or part.key.startswith("__")):
                self._seen.setdefault(id(part.holder), (0, 0))
                own = class_name(part.holder, self._named)
                self._look(part._replace(holder=own), f"{own}.{part.key}", depth + 1)
        self._is_live = was_live

    def _attributes(self, value: Any, name: str, depth: int) -> None:
        kind = type(value)
        is_config = kind.__module__.startswith(_CONFIGS)
        is_sized = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
        is_data = issubclass(kind, Dataset) or (is_sized and not is_config)
        was = self._is_in_data, self._is_in_dataset, self._only_tensors
        self._is_in_data = self._is_in_data or is_data
        self._is_in_dataset = self._is_in_dataset or issubclass(kind, Dataset)
        if issubclass(kind, Dataset):
            self._reading += _functions_in(value)
            self._note(name, f"{kind.__module__}.{kind.__qualname__}", value)  # another may take its place
        is_open = is_users_module(kind.__module__) or is_namespace(kind)
        has_state = _keeps_state(kind)  # type: ignore[arg-type]  # a class is hashable
        is_told = is_open or has_state or is_config or kind.__module__.startswith(_OF_TORCH)
        self._only_tensors = self._only_tensors or not is_told
        own: Collection[str] = changed_by_reading(kind) if is_data else ()  # type: ignore[arg-type]
        self._changed_by_reading.update(own)
        if issubclass(kind, IterableDataset) and not is_open and hasattr(kind, "set_epoch"):
            # The run tells it the epoch before it reads it.
            own = [k for k, held in attributes_of(value).items() if is_plain(held) or isinstance(held, Tensor | dict)]
        self.found.counted |= counted_by_reading(kind) if self._is_in_data else set()  # type: ignore[arg-type]
        for part in inside_object(value, own):
            if is_open or isinstance(part.holder, dict):
                self._look_at_part(part, name, depth)
        if is_open:
            self._look(Part(INNER, name, "", kind), class_name(kind, self._named), depth + 1)
            for part in _from_class(value) if not self._only_tensors else ():
                self._note(f"{name}.{part.key}", text_of_plain(part.value), part.value)
        self._is_in_data, self._is_in_dataset, self._only_tensors = was

    def _text_of(self, tensor: Tensor) -> str:
        version = "" if tensor.is_inference() else f"version {tensor._version}"
        if tensor.is_nested:
            return version
        if tensor.layout is not torch.strided and (parts := parts_of_tensor(tensor)):
            return repr([self._text_of(each) for each in parts])
        is_read = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not is_read or not tensor.is_cpu or tensor.is_quantized:  # the host would wait for another device
            return version
        if tensor.numel() == 1:
            return f"tensor({tensor.item()!r})"
        if tensor.nbytes > self._most_bytes:
            if not tensor.is_contiguous():
                return version
            tensor = tensor.detach().view(-1)[:: self._step(tensor.numel())]
            return f"{version}, a sample of digest {digest_tensor(tensor)[:8]}"
        return f"{list(tensor.shape)} of digest {digest_tensor(tensor)[:8]}"

    def _step(self, numbers: int) -> int:
        return max(1, numbers // min(_SAMPLE, self._most_bytes // _MOST_ENTRIES))

    def _array(self, array: Any, name: str) -> None:
        if array.dtype.hasobject and array.dtype.names is None:
            some = array.ravel()[:: max(1, array.size // _MOST_SAMPLES)].tolist()
            what = f"{list(array.shape)}, {text_of_size(array, _MOST_ENTRIES)[0]}"
            self._whole(array, name, some, 0, what)
        elif not (array.dtype.hasobject or _is_on_disk(array)):
            step = 1 if array.nbytes <= self._most_bytes else self._step(array.size)
            content = np.ascontiguousarray(array.flat[::step]).tobytes()
            self._note(name, f"{list(array.shape)} of digest {short_digest(content)}", array, has_values=True)

    def _module(self, module: nn.Module, name: str) -> None:
        """Notes one text for all tensors of a module, such as an average of the model, and one for each number."""
        tensors = [
            held
            for each in module.modules()
            for held in (*each._parameters.values(), *each._buffers.values(), *vars(each).values())
            if isinstance(held, Tensor) and id(held) not in self.found.known and id(each) not in self.found.known
        ]
        if tensors:  # one that follows the model may hold the model, too
            content = repr([self._text_of(tensor) for tensor in tensors])
            self.found.tensors[name] = [module, *tensors]
            self._note(name, f"tensors of digest {short_digest(content.encode())}", module, has_values=True)
        for path, each in module.named_modules(prefix=name):
            for part in [*inside_object(each), *_from_class(each)] if id(each) not in self.found.known else ():
                if (part.value is None or is_plain(part.value)) and part.key != "training" and part.key[0] != "_":
                    self._note(f"{path}.{part.key}", text_of_plain(part.value), part.value)
                    self.found.plain |= {f"{path}.{part.key}": part} if part.how == ATTRIBUTE else {}

    def _note(self, name: str, text: str, value: Any, *, has_values: bool = False) -> None:
        self.found.texts[name], self.found.values[name] = text, value
        if has_values:
            self.found.with_values.add(name)
        self._noted.append(name)
        self._mark([name])

    def _mark(self, names: Iterable[str]) -> None:
        if self._is_live:
            self.found.live.update(names)
        if self._is_in_data:
            self.found.of_data.update(names)
        if self._is_in_dataset:
            self.found.of_datasets.update(names)


def _from_class(value: Any) -> list[Part]:
    """The plain values that an object has from its class, a user's, as long as it has none of its own."""
    found = {part.key: part for part in reversed([*of_class(type(value))])}
    plain = {key: part for key, part in found.items() if part.value is None or is_plain(part.value)}
    return [part for key, part in plain.items() if key not in attributes_of(value) and not key.startswith("__")]


def _name_of(key: str, space: dict[str, Any], own: Mapping[str, int]) -> str:
    """The name of a global; with its module, unless code of the loop means this global by the name alone."""
    return key if own.get(key) == id(space) else f"{space.get('__name__')}.{key}"


def _is_foreign(value: Any) -> bool:
    """True for an object of an installed package, except one of data: of what it holds only tensors are noted."""
    return bool(attributes_of(value)) and not is_users_object(value) and not isinstance(value, Dataset | DataLoader)


def _is_users_callback(value: Any) -> bool:
    return is_users_function(value) if type(value) is FunctionType else is_users_object(value)


@functools.cache
def _keeps_state(kind: type) -> bool:
    """True for schedules, averages and meters of installed packages, as far as their class shows."""
    methods = {name: each for cls in kind.__mro__ for name, each in vars(cls).items()}
    codes = (each.__code__ for each in methods.values() if type(each) is FunctionType)
    sets_rates = any("param_groups" in names_in(code) for code in codes)
    is_meter = "reset" in methods and methods.keys() & {"update", "add"} and not methods.keys() & {"close", "stop"}
    return sets_rates or is_meter or "load_state_dict" in methods or methods.keys() >= {"__call__", "save", "load"}


def _functions_in(value: Any) -> list[FunctionType]:
    """A function itself, and the methods of the class of an object, or of a class."""
    value = getattr(value, "__func__", value) if isinstance(value, MethodType) else value
    if isinstance(value, FunctionType):
        return [value]
    kind = value if isinstance(value, type) else type(value)
    return [each for name, each in methods_of(kind) if name not in CONSTRUCTORS]


def _is_on_disk(array: Any) -> bool:
    """True for an array, or a view of one, whose values would be read from a file."""
    return isinstance(array, np.memmap) or (isinstance(array, np.ndarray) and _is_on_disk(array.base))


def _samples_of(entries: Any) -> int:
    """The number of a long list's entries to look at: fewer where each has many parts, as in a replay buffer."""
    if len(entries) <= _MOST_SAMPLES:
        return _MOST_SAMPLES
    parts = max(1, *(len(parted(each)) for each in copied(entries, 1)))
    return max(_MOST_SAMPLES // 8, _MOST_SAMPLES // parts)


def _begins_with_tensors(entries: Iterable[Any]) -> bool:
    parts = [part for each in copied(entries, 1) for one in parted(each) for part in parted(one)]
    return any(isinstance(part, Tensor | np.ndarray) for part in parts)


def _text_of_entry(entry: Any) -> str:
    return ", ".join(text_of_plain(each) if is_plain(each) else "..." for each in parted(entry))
