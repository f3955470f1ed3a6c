"""The state that a model or a function keeps from one call to the next, beside parameters and registered buffers.

    model      attributes of its modules, and of the objects that they hold
    function   variables of its closure, globals it names, defaults and attributes; of a method, its object's attributes
    both       generators of random numbers among these, and containers, entry by entry

``Snapshot`` describes all that it finds as text by name, so that two can be compared, and puts it back as it was. It
looks into the user's own code only: functions and classes of installed packages are left alone, their objects are not.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import io
import itertools
import logging
import os
import queue
import random
import threading
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from enum import Enum
from multiprocessing.sharedctypes import SynchronizedBase
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils.data import DataLoader, Dataset

from lockstep.core.fingerprint import digest_tensor
from lockstep.data.keyed import encoded_state, set_encoded_state
from lockstep.numerics.value_text import (
    class_name,
    is_plain,
    octets_of,
    parts_of_tensor,
    position_of,
    set_octets,
    short_digest,
    short_text,
    text_of_array,
    text_of_octets,
    text_of_plain,
    text_of_tensor,
    told_apart,
)
from lockstep.runtime.error_record import CLOSED_PACKAGES, LIBRARIES, is_users_module
from lockstep.text import shorten

_NUMBERS = (bool, int, float, complex, np.generic)
_OF_TORCH = vars(nn.Module()).keys() - {"training"}
_INNER = ".<locals>."
ALIAS = "what is "
"""Begins the text of a place whose object was found at another before."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_CLOSED = (
    *(Dataset, DataLoader, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
    *(ModuleType, threading.Thread, logging.Logger, io.IOBase),
)
"""Objects that are not looked into: they are not part of a forward pass."""
_CLOSED_MODULES = ("transformers.trainer_callback",)
"""Their objects are what a Trainer knows of its loop, which ``TransformersTrainer`` keeps."""
NAMESPACES = (
    *(SimpleNamespace, argparse.Namespace, UserDict, UserList, ChainMap, queue.Queue),
    *(SynchronizedBase, Distribution, np.poly1d),
)
"""Classes of Python, NumPy and torch whose objects hold what the user puts there."""
_MOST_PLACES = 50_000
_MOST_ENTRIES = 1_000
_MOST_DEPTH = 50
_MOST_BYTES = 256 << 20


class Kind(Enum):
    """The kind of a value, as far as it matters for what its change means."""

    NUMBER = "number"
    GENERATOR = "generator"
    TENSOR = "tensor"
    OTHER = "other"


Place = tuple[int | str, Any]
"""Where a value is: by the id of the dict or list that holds it, and the key; a variable of a function by the qualified
name of the function, and its own."""


class Snapshot:
    """The state that the given objects keep now.

    Args:
        roots: modules and functions by the words that messages call them by; "" for a model, whose modules then have
            their own names.
        known: tensors that others look after, such as buffers; parameters are always left out.
        restorable: whether ``restore`` will be called; otherwise nothing is copied.
    """

    def __init__(
        self, roots: Mapping[str, Any], known: Iterable[Tensor] = (), *, restorable: bool = True
    ) -> None:
        self.texts: dict[str, str] = {}
        """The value at each place, as text that is equal where values are."""
        self.kinds: dict[str, Kind] = {}
        self._named: dict[str, Any] = {}
        self.places: dict[Place, tuple[str, Any]] = {}
        """The name and the value of each attribute, entry and variable that was found."""
        self._setters: dict[str, tuple[Any, Callable[[Any], object]]] = {}
        """The values of numbers and tensors and the entries of containers, by name, and what puts them back."""
        self.draws_globally = False
        """True if code was found that names NumPy's or Python's global generator."""
        self._known = {id(tensor) for tensor in known}
        self._seen: dict[int, tuple[Any, str]] = {}
        self._depth = 0
        self._undo: list[Callable[[], None]] = []
        self._restorable, self._bytes = restorable, 0
        for name, root in roots.items():
            self.add(name, root)

    def add(self, name: str, root: Any) -> None:
        """Looks at one more object."""
        self._value(root, name)

    def name_of(self, value: Any) -> str:
        """The words for an object that was found; empty for others."""
        return self._seen[id(value)][1] if id(value) in self._seen else ""

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """The functions and methods that were found, and those by which modules of installed packages compute."""
        found = [value for value, _ in self._seen.values() if isinstance(value, FunctionType | nn.Module)]
        return [type(each).forward if isinstance(each, nn.Module) else each for each in found]

    def restore(self) -> None:
        """Puts everything back, the latest found first."""
        with torch.no_grad():
            for undo in reversed(self._undo):
                undo()

    def values_of(self, names: Iterable[str]) -> dict[str, Any]:
        """The values that stand at those of the places where ``put`` can set them."""
        return {name: self._setters[name][0] for name in names if name in self._setters}

    def put(self, values: Mapping[str, Any]) -> None:
        """Sets numbers and tensors to what an earlier snapshot found, and takes out what containers have got since."""
        with torch.no_grad():
            for name in values.keys() & self._setters.keys():
                (now, put), value = self._setters[name], values[name]
                if type(now) is type(value) or (isinstance(now, _NUMBERS) and isinstance(value, _NUMBERS)):
                    put(value)

    def changed(self, later: Snapshot) -> dict[str, tuple[str, str]]:
        """Texts before and after of the places that differ in a later snapshot of the same objects."""
        names = [*self.texts, *(name for name in later.texts if name not in self.texts)]
        absent = "nothing"
        pairs = {name: (self.texts.get(name, absent), later.texts.get(name, absent)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def _note(self, name: str, text: str, kind: Kind = Kind.OTHER) -> None:
        self.texts[name], self.kinds[name] = text, kind

    def _remember(self, undo: Callable[[], None]) -> None:
        if self._restorable:
            self._undo.append(undo)

    def _held(self, value: Any, name: str, put: Callable[[Any], object]) -> None:
        """Looks at what a variable, an attribute or an entry holds; ``put`` gives it another value."""
        self._value(value, name)
        if isinstance(value, type | FunctionType | BuiltinFunctionType):
            self._note(name, f"{value.__module__}.{value.__qualname__}")
        if self._restorable and isinstance(value, _NUMBERS):
            self._setters[name] = value, put
        elif isinstance(value, Tensor) and name in self._setters:
            self._setters[name] = self._setters[name][0], functools.partial(_set_tensor, value, put)

    def _value(self, value: Any, name: str) -> None:
        if value is None or is_plain(value):
            self._note(name, text_of_plain(value), Kind.NUMBER if isinstance(value, _NUMBERS) else Kind.OTHER)
            return
        if id(value) in self._seen:
            if not isinstance(value, type | FunctionType | nn.Module):
                self._note(name, f"{ALIAS}{self._seen[id(value)][1]}")
            return
        if len(self._seen) > _MOST_PLACES or self._depth > _MOST_DEPTH:
            return
        self._seen[id(value)] = value, name
        self._depth += 1
        self._look_at(value, name)
        self._depth -= 1

    def _look_at(self, value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            self._tensor(value, name)
        elif isinstance(value, np.ndarray):
            self._array(value, name)
        elif _is_global_generator(value):
            self.draws_globally = True
        elif (state := encoded_state(value)) is not None:
            self._note(name, f"state {short_digest(repr(state).encode())}", Kind.GENERATOR)
            self._remember(functools.partial(set_encoded_state, value, state))
        elif isinstance(value, list | deque | dict | set):
            self._container(value, name)
        elif isinstance(value, tuple | frozenset):
            self._entries(enumerate(value), name)
        elif isinstance(value, MappingProxyType | threading.local):
            held = vars(value) if isinstance(value, threading.local) else value
            self._entries(held.items(), name)
        elif isinstance(value, ContextVar):
            self._value(value.get(None), name)
        elif (octets := octets_of(value)) is not None:
            self._note(name, text_of_octets(octets), Kind.TENSOR)
            self._remember(functools.partial(set_octets, value, octets))
        elif isinstance(value, type):
            self._class(value)
        else:
            self._callable_or_object(value, name)

    def _tensor(self, tensor: Tensor, name: str) -> None:
        if isinstance(tensor, nn.Parameter) or id(tensor) in self._known:
            return
        with torch._C.DisableTorchFunctionSubclass():  # which makes stand-ins for another rank's tensors tell
            parts = [] if tensor.is_meta else parts_of_tensor(tensor)
        size = sum(each.nbytes for each in parts)
        if not parts or self._bytes + size > _MOST_BYTES:
            self._note(name, f"version {tensor._version}", Kind.TENSOR)
            return
        self._bytes += size
        self._note(name, text_of_tensor(tensor), Kind.TENSOR)
        if self._restorable and tensor.layout is torch.strided:
            self._setters[name] = tensor.detach().clone(), functools.partial(_put_back, tensor)
            self._remember(functools.partial(_put_back, tensor, self._setters[name][0]))

    def _array(self, array: Any, name: str) -> None:
        if array.dtype.hasobject or self._bytes + array.nbytes > _MOST_BYTES:
            return
        self._bytes += array.nbytes
        self._note(name, text_of_array(array), Kind.TENSOR)
        if self._restorable and array.flags.writeable:
            self._remember(functools.partial(array.__setitem__, ..., array.copy()))

    def _container(self, value: Any, name: str) -> None:
        self._note(name, f"{len(value)} entries")
        if self._restorable:
            kind: Any = set if isinstance(value, set) else list
            entries = dict(entries_of(value)) if isinstance(value, dict) else kind(value)
            self._remember(functools.partial(refill, value, entries))
            self._setters[name] = entries, functools.partial(_shrink, value)
        if isinstance(value, dict):
            self._entries(entries_of(value), name, value)
        elif isinstance(value, set):
            self._note(name, f"{len(value)} entries {short_text(repr(sorted(map(repr, value))))}")
        else:
            self._entries(enumerate(value), name, value)

    def _entries(self, entries: Iterable[tuple[Any, Any]], name: str, container: Any = ()) -> None:
        if len(container) <= _MOST_ENTRIES:
            for key, value in entries:
                entry = f"{name}[{key!r}]" if is_plain(key) else f"{name}[...]"
                if is_plain(key):
                    self.places[id(container), key] = entry, value
                if isinstance(container, dict | list):
                    self._held(value, entry, functools.partial(container.__setitem__, key))
                else:
                    self._value(value, entry)

    def _callable_or_object(self, value: Any, name: str) -> None:
        if isinstance(value, functools.partial):
            for each in (value.func, value.args, value.keywords):
                self._value(each, name)
        elif isinstance(value, MethodType):
            self._value(value.__self__, name)
            self._value(value.__func__, name)
        elif isinstance(value, FunctionType):
            self._function(value, name)
        elif isinstance(value, BuiltinFunctionType):
            self.draws_globally |= _is_global_generator(value.__self__)
        elif isinstance(value, nn.Module):
            self._module(value, name)
        elif not is_closed(value):
            self._object(value, name)
        else:
            self._note(name, f"{type(value).__qualname__}{position_of(value)}")

    def _module(self, module: nn.Module, name: str) -> None:
        for key, child in module._modules.items():
            if child is not None:
                self._value(child, f"{name}.{key}" if name else key)
        words = name or "the model"
        self._note(f"the class of {words}", type(module).__qualname__)
        self._remember(functools.partial(_rebind, module._buffers, dict(module._buffers), frozenset()))
        for key, buffer in module._buffers.items():
            if buffer is not None:
                self._value(buffer, f"the buffer {key!r} of {words}")
        for key, parameter in module._parameters.items():
            if parameter is not None:  # a hook of the backward pass may keep something there
                own = [each for each in type(parameter).__mro__ if each.__module__.startswith("lockstep.")]
                kept = [name for each in own for name in inspect.get_annotations(each)]
                self._slots(vars(parameter), f"the parameter {key!r} of {words}", leave_out=kept)
        hooks = [each for kind in _HOOKS for each in vars(module).get(kind, {}).values()]
        own = [each for each in hooks if is_users_module(getattr(each, "__module__", None) or "")]
        self._note(f"the hooks of {words}", repr([getattr(each, "__qualname__", "") for each in own]))
        for hook in hooks:
            self._value(hook, f"a hook of {words}")
        home = type(module).__module__
        if not home.startswith("lockstep.") or home.startswith("lockstep.models."):
            self._slots(vars(module), words, leave_out=_OF_TORCH)
            self._value(type(module), words)

    def _object(self, value: Any, name: str) -> None:
        self._note(name, type(value).__qualname__)
        if isinstance(getattr(value, "__dict__", None), dict):
            self._slots(vars(value), name)
        for key, held in slots_of(value).items():
            put = functools.partial(_set, value, key)
            self._remember(functools.partial(put, held))
            self._held(held, f"the attribute {key!r} of {name}", put)
        self._value(type(value), name)

    def _slots(self, held: dict[str, Any], owner: str, leave_out: Iterable[str] = ()) -> None:
        """The attributes of an object, each of which may be bound anew."""
        if self._restorable:
            kept = {key: value for key, value in held.items() if key not in leave_out}
            self._remember(functools.partial(_rebind, held, kept, frozenset(leave_out)))
        for key, value in list(held.items()):
            if key not in leave_out:
                words = f"the attribute {key!r} of {owner}"
                self.places[id(held), key] = words, value
                self._held(value, words, functools.partial(held.__setitem__, key))

    def _class(self, cls: type) -> None:
        for each in cls.__mro__:
            module = getattr(each, "__module__", "")
            if (id(each) in self._seen and each is not cls) or not is_users_module(module):
                continue
            named = class_name(each, self._named)
            self._seen[id(each)] = each, each.__qualname__
            for key, value in list(vars(each).items()):
                if key.startswith("__") and key not in ("__call__", "__init__"):
                    continue
                if isinstance(value, staticmethod | classmethod):
                    value = value.__func__
                elif isinstance(value, property):
                    value = value.fget
                words = f"the class attribute {key!r} of {named}"
                if isinstance(value, FunctionType):
                    self._value(value, f"{named}.{key}")
                elif is_plain(value):
                    put = functools.partial(_set, each, key)
                    self._remember(functools.partial(put, value))
                    self._held(value, words, put)
                elif not callable(value):
                    self._value(value, words)

    def _function(self, function: FunctionType, name: str) -> None:
        code = function.__code__
        if not is_users_code(code, function.__module__ or ""):
            return
        words = name or function.__qualname__
        *outer, _ = itertools.accumulate(code.co_qualname.split(_INNER), lambda one, two: one + _INNER + two)
        for key, cell in zip(code.co_freevars, function.__closure__ or ()):
            self._cell(cell, f"the variable {key!r} of {words}", [(each, key) for each in outer])
        for values in (function.__defaults__, function.__kwdefaults__):
            self._value(values, f"a default of {words}")
        self._slots(vars(function), words)
        names = frozenset(names_in(code))
        for key in names & function.__globals__.keys():
            self._global(function.__globals__, key, names)

    def _cell(self, cell: CellType, name: str, places: Iterable[Place]) -> None:
        try:
            held = cell.cell_contents
        except ValueError:  # it has no value yet
            return
        self.places |= dict.fromkeys(places, (name, held))
        put = functools.partial(_set, cell, "cell_contents")
        self._remember(functools.partial(put, held))
        self._held(held, name, put)

    def _global(self, space: dict[str, Any], key: str, names: frozenset[str]) -> None:
        """One global that code names; ``names`` are all that it names, attributes of modules among them."""
        value = space[key]
        if value is os.environ or (value is os and names & {"environ", "getenv"}):
            for variable, text in os.environ.items():
                self._note(f"the environment variable {variable!r}", short_text(text))
            return
        if isinstance(value, ModuleType):
            is_numpys = value is np.random or (value is np and "random" in names)
            self.draws_globally |= value is random or is_numpys
            if is_users_module(value.__name__) and id(value) not in self._seen:
                self._seen[id(value)] = value, key
                for inner in names & vars(value).keys():
                    self._global(vars(value), inner, names)
            return
        words = f"the global variable {key!r}"
        words = told_apart(space, words, f"{words} of {space.get('__name__')}", self._named)
        self.places[id(space), key] = words, value
        if not isinstance(value, type | FunctionType):
            self._remember(functools.partial(_bind, space, key, value))
        self._held(value, words, functools.partial(space.__setitem__, key))


def draws_globally(*roots: Any) -> bool:
    """True if the code of these modules and functions names NumPy's or Python's global generator of random numbers."""
    found = Snapshot({str(number): root for number, root in enumerate(roots)}, restorable=False)
    return found.draws_globally


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Code, and that of inner functions."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes_in(inner)


def names_in(code: CodeType) -> Iterator[str]:
    """The globals and attributes that code names, that of inner functions included."""
    return (name for each in codes_in(code) for name in each.co_names)


def is_users_code(code: CodeType, module: str) -> bool:
    """Returns whether code of a module, by its name, is the user's own."""
    return not code.co_filename.startswith(LIBRARIES) and is_users_module(module)


def is_closed(value: Any) -> bool:
    """True for an object whose attributes are its own affair."""
    kind = type(value)
    if issubclass(kind, NAMESPACES):
        return False
    package = kind.__module__.partition(".")[0]
    return issubclass(kind, _CLOSED) or package in CLOSED_PACKAGES or kind.__module__ in _CLOSED_MODULES


def _is_global_generator(value: Any) -> bool:
    """True for the generators that ``random.random()`` and the like draw from, whose state is keyed in a step."""
    known = (random._inst, np.random.mtrand._rand, torch.default_generator, *torch.cuda.default_generators)
    return any(value is each for each in known)


def _set_tensor(tensor: Tensor, put: Callable[[Any], object], values: Tensor) -> None:
    if tensor.shape == values.shape:
        tensor.detach().copy_(values)
    else:  # it has grown, so another one has its name
        put(values.clone())


def _put_back(tensor: Tensor, values: Tensor) -> None:
    if tensor.shape != values.shape:
        tensor.data = values.clone()
    elif digest_tensor(tensor) != digest_tensor(values):
        tensor.detach().copy_(values)


def is_users_object(value: Any) -> bool:
    """True for an object of a class of the user's own, or of a namespace of Python's, whose attributes are his."""
    return issubclass(type(value), NAMESPACES) or (
        is_users_module(type(value).__module__) and not is_closed(value)
    )


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object as they are stored, those in slots aside; none for one that has no dict."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return held if isinstance(held, dict) else {}


def slots_of(value: Any) -> dict[str, Any]:
    """The attributes of an object that are in slots of its classes."""
    found = {}
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for key in (slots,) if isinstance(slots, str) else tuple(slots):
            is_private = key.startswith("__") and not key.endswith("__")
            name = f"_{cls.__name__.lstrip('_')}{key}" if is_private else key
            if key not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def entries_of(container: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """The entries as they are stored: a class of the user's may make something else of them when it is asked."""
    return OrderedDict.items(container) if isinstance(container, OrderedDict) else dict.items(container)


def as_stored(container: Any) -> Any:
    """The container; of a tuple whose class answers otherwise when it is asked, as e3nn's, what it holds."""
    kind = type(container)
    if not issubclass(kind, tuple) or (kind.__len__, kind.__iter__) == (tuple.__len__, tuple.__iter__):
        return container
    return tuple(tuple.__iter__(container))


def refill(container: Any, entries: Any) -> None:
    """Gives a list, deque, set or dict these entries, as they are stored; one that has them is left alone."""
    if isinstance(container, dict):
        now = [*entries_of(container)]
        same = (a == c and b is d for (a, b), (c, d) in zip(now, entries.items()))
        if len(now) == len(entries) and all(same):
            return
        base = OrderedDict if isinstance(container, OrderedDict) else dict
        base.clear(container)
        for key, value in entries.items():
            base.__setitem__(container, key, value)
        return
    container.clear()
    if isinstance(container, set):
        container.update(entries)
    else:
        container.extend(entries)


def _shrink(container: Any, entries: Any) -> None:
    """Takes out what was added to some entries; values that were set anew stay."""
    if isinstance(container, dict):
        for key in [key for key in container if key not in entries]:
            dict.__delitem__(container, key)
    elif isinstance(container, set):
        container.intersection_update(entries)
    else:
        while len(container) > len(entries):
            container.pop()


def _rebind(held: dict[str, Any], kept: dict[str, Any], leave_out: frozenset[str]) -> None:
    for key in [key for key in held if key not in kept and key not in leave_out]:
        del held[key]
    for key, value in kept.items():
        if held.get(key, _rebind) is not value:
            held[key] = value


def _bind(space: dict[str, Any], key: str, value: Any) -> None:
    if space.get(key, _bind) is not value:
        space[key] = value


def _set(owner: Any, key: str, value: Any) -> None:
    if getattr(owner, key, _set) is not value:
        setattr(owner, key, value)


def without_key(place: str) -> str:
    """The words of a place without the key of an entry: ``the attribute 'table' of the model``."""
    return place.partition("[")[0]


def told(changes: Mapping[str, tuple[str, str]], most: int = 3) -> str:
    """Changes for a message: each place with its value before and after."""
    return shorten([f"{name} (from {before} to {after})" for name, (before, after) in changes.items()], most)
