"""The state that a model or a function keeps from one call to the next, beside parameters and registered buffers.

    model      attributes of its modules, and of the objects that they hold
    function   variables of its closure, globals it names, defaults and attributes; of a method, its object's attributes
    both       generators of random numbers among these, and containers, entry by entry

``Snapshot`` describes all that it finds as text by name, so that two can be compared, and puts it back as it was. It
looks into the user's own code only: functions and classes of installed packages are left out, their objects are not.
"""

from __future__ import annotations

import functools
import inspect
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.core.fingerprint import digest_tensor
from lockstep.core.generators import encoded_state, set_encoded_state
from lockstep.core.users_code import globals_in, homes_of, is_users_function, is_users_module, names_in
from lockstep.core.values import (
    CONTAINERS,
    ENTRY,
    VARIABLE,
    Part,
    Place,
    attributes_of,
    class_name,
    globals_of,
    inside,
    is_closed,
    is_plain,
    octets_of,
    of_class,
    parts_of_tensor,
    position_of,
    refill,
    set_octets,
    short_digest,
    short_text,
    stored_in,
    text_of_array,
    text_of_octets,
    text_of_plain,
    text_of_size,
    text_of_table,
    text_of_tensor,
    told_apart,
)
from lockstep.numerics.hooks import gradient_hooks
from lockstep.text import shorten

_NUMBERS = (bool, int, float, complex, np.generic)
_OF_TORCH = vars(nn.Module()).keys() - {"training"}
ALIAS = "what is "
"""Begins the text of a place whose object was found at another before."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_TRANSPARENT = (functools.partial, MethodType, BuiltinFunctionType, ContextVar, threading.local)
"""Objects of Python's that are looked into, though their classes are not."""
_HELD_OPTIMIZERS = ("torch.", "lockstep.")
"""The packages whose optimizers keep nothing that a checkpoint lacks."""
_MOST_PLACES = 50_000
_MOST_ENTRIES = 1_000
_MOST_DEPTH = 50
_MOST_BYTES = 256 << 20


@functools.cache
def _of_optimizers() -> Collection[str]:
    """The attributes of every optimizer but its state; not at import, as the first optimizer leaves a mark in torch."""
    return vars(torch.optim.Optimizer([torch.zeros(1)], {})).keys() - {"state"}


class Kind(Enum):
    """The kind of a value, as far as it matters for what its change means."""

    NUMBER = "number"
    GENERATOR = "generator"
    TENSOR = "tensor"
    OTHER = "other"


class Snapshot:
    """The state that the given objects keep now.

    Args:
        roots: modules and functions by the words that messages call them by; "" for a model, whose modules then have
            their own names.
        known: tensors that others look after, such as buffers; parameters are always left out.
        restorable: whether ``restore`` will be called; otherwise nothing is copied.
        gradients: whether hooks of the parameters' gradients are looked at, as those of modules are.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        known: Iterable[Tensor] = (),
        *,
        restorable: bool = True,
        gradients: bool = True,
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
        self._restorable, self._gradients, self._bytes = restorable, gradients, 0
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
        """Sets numbers and tensors to what an earlier snapshot found, and takes out what containers have got since.

        The latest found first: an entry before its container, which may lose it.
        """
        with torch.no_grad():
            for name in filter(values.__contains__, reversed(self._setters)):
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

    def _held(self, part: Part, name: str) -> None:
        """Looks at what a variable, an attribute or an entry holds."""
        value = part.value
        self._value(value, name)
        if isinstance(value, type | FunctionType | BuiltinFunctionType):
            self._note(name, f"{value.__module__}.{value.__qualname__}")
        elif not self._restorable or part.is_fixed:
            return
        elif isinstance(value, _NUMBERS):
            self._setters[name] = value, part.put
        elif isinstance(value, Tensor) and name in self._setters:
            self._setters[name] = self._setters[name][0], functools.partial(_put_back, value, put=part.put)

    def _value(self, value: Any, name: str) -> None:
        if value is None or is_plain(value):
            self._note(name, text_of_plain(value), Kind.NUMBER if isinstance(value, _NUMBERS) else Kind.OTHER)
            return
        if id(value) in self._seen:
            first = self._seen[id(value)][1]  # two functions may read one global
            if first != name and not isinstance(value, type | FunctionType | nn.Module):
                self._note(name, f"{ALIAS}{first}")
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
        elif _is_global_generator(value):
            self.draws_globally = True
        elif (state := encoded_state(value)) is not None:
            self._note(name, f"state {short_digest(repr(state).encode())}", Kind.GENERATOR)
            self._remember(functools.partial(set_encoded_state, value, state))
        elif (octets := octets_of(value)) is not None:
            self._note(name, text_of_octets(octets), Kind.TENSOR)
            self._remember(functools.partial(set_octets, value, octets))
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, nn.Module):
            self._module(value, name)
        elif isinstance(value, FunctionType):
            self._function(value, name or value.__qualname__)
        elif isinstance(value, (np.ndarray, *CONTAINERS, *_TRANSPARENT)):
            if isinstance(value, np.ndarray):
                self._array(value, name)
            elif isinstance(value, CONTAINERS):
                self._container(value, name)
            self._inside(value, name)
        elif isinstance(value, torch.optim.Optimizer) and not type(value).__module__.startswith(_HELD_OPTIMIZERS):
            self._note(name, type(value).__qualname__)  # its hooks may keep curvature for its steps (K-FAC)
            self._inside(value, name, _of_optimizers())
        elif (text := text_of_table(value)) or is_closed(value):
            self._note(name, text or f"{type(value).__qualname__}{position_of(value)}")
        else:
            self._note(name, type(value).__qualname__)
            self._inside(value, name)

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
        if self._bytes + array.nbytes > _MOST_BYTES:
            return
        self._bytes += array.nbytes
        if not array.dtype.hasobject:
            self._note(name, text_of_array(array), Kind.TENSOR)
        if self._restorable and array.flags.writeable:
            self._remember(functools.partial(array.__setitem__, ..., array.copy()))

    def _container(self, value: Any, name: str) -> None:
        stored = stored_in(value)
        if isinstance(value, set | frozenset):
            self._note(name, f"{len(stored)} entries {short_text(repr(sorted(map(repr, stored))))}")
        elif isinstance(value, list | deque | dict) or len(stored) > _MOST_ENTRIES:
            self._note(name, text_of_size(value, _MOST_ENTRIES)[0])
        if self._restorable and isinstance(value, list | deque | dict | set):
            kind: Any = next(each for each in (dict, set, list) if each is list or isinstance(value, each))
            entries = kind(stored)
            self._remember(functools.partial(refill, value, entries))
            self._setters[name] = entries, functools.partial(_shrink, value)

    def _inside(self, value: Any, name: str, leave_out: Collection[str] = ()) -> None:
        """Looks at the parts of a value; each attribute may be rebound, except those in ``leave_out``."""
        held = attributes_of(value)
        if self._restorable:
            kept = {key: each for key, each in held.items() if key not in leave_out}
            self._remember(functools.partial(_rebind, held, kept, frozenset(leave_out)))
        is_set = isinstance(value, set | frozenset)
        for part in inside(value, leave_out, _MOST_ENTRIES):
            how, holder, key, each = part
            if is_set and (each is None or is_plain(each)):
                continue  # ``_container`` has its text
            words = part.words(name)
            self.places[id(holder), key] = words, each
            if how == VARIABLE:
                self.places |= {(home, key): (words, each) for home in homes_of(value.__code__)}
            is_known = holder is held or (how == ENTRY and holder is value)  # put back together
            if not (is_known or part.is_fixed):
                self._remember(functools.partial(part.put, each))
            self._held(part, words)
        if is_users_module(type(value).__module__):
            self._value(type(value), name)

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
            if parameter is not None and (self._restorable or vars(parameter)):  # as hooks may
                own = [each for each in type(parameter).__mro__ if each.__module__.startswith("lockstep.")]
                kept = [name for each in own for name in inspect.get_annotations(each)]
                self._inside(parameter, f"the parameter {key!r} of {words}", kept)
        hooks = [each for kind in _HOOKS for each in vars(module).get(kind, {}).values()]
        trained = [each for each in module._parameters.values() if self._gradients and each is not None]
        hooks += [each for one in trained for kind in gradient_hooks(one) for each in kind.values()]
        own = [each for each in hooks if is_users_module(getattr(each, "__module__", None) or "")]
        self._note(f"the hooks of {words}", repr([getattr(each, "__qualname__", "") for each in own]))
        for hook in hooks:
            self._value(hook, f"a hook of {words}")
        home = type(module).__module__
        if not home.startswith("lockstep.") or home.startswith("lockstep.models."):
            self._inside(module, words, _OF_TORCH)

    def _class(self, cls: type) -> None:
        known = {id(each) for each in cls.__mro__ if each is not cls and id(each) in self._seen}
        for part in of_class(cls):
            _, owner, key, value = part
            if id(owner) in known or (key.startswith("__") and key not in ("__call__", "__init__")):
                continue
            self._seen[id(owner)] = owner, owner.__qualname__
            named = class_name(owner, self._named)
            if isinstance(value, FunctionType):
                self._value(value, f"{named}.{key}")
            else:
                self._remember(functools.partial(part.put, value))
                self._held(part, part.words(named))

    def _function(self, function: FunctionType, name: str) -> None:
        if is_users_function(function):
            self._inside(function, name)
            names = names_in(function.__code__)
            for part in globals_of(globals_in(function.__code__), function.__globals__, names):
                self._global(part, names)
        else:  # what a function of torch's wraps, as torch.no_grad() does, or calls, as a hook of several gradients
            for each in (part.value for part in inside(function) if isinstance(part.value, FunctionType)):
                self._value(each, name)

    def _global(self, part: Part, names: frozenset[str]) -> None:
        """One global that code names; ``names`` are all that it names, attributes of modules among them."""
        _, space, key, value = part
        if value is os.environ or (value is os and names & {"environ", "getenv"}):
            for variable, text in os.environ.items():
                self._note(f"the environment variable {variable!r}", short_text(text))
        elif isinstance(value, ModuleType):
            is_random = value is random or value is np.random
            self.draws_globally |= is_random or (value is np and "random" in names)
        else:
            words = part.words("")
            words = told_apart(space, words, f"{words} of {space.get('__name__')}", self._named)
            self.places[id(space), key] = words, value
            if not isinstance(value, type | FunctionType):
                self._remember(functools.partial(part.put, value))
            self._held(part, words)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context without gradients, with every module in evaluation mode; each gets its own mode back afterwards.

    Where a module has a ``train`` of its own, in which layers with LoRA merge their weights, it is called as well. Then
    the module's parameters, which would follow from the merged ones up to rounding, get their values back.
    """
    modes = [(module, module.training) for module in model.modules()]
    names = [(module._parameters, {*module._parameters}) for module, _ in modes]
    own = [(module, training) for module, training in modes if type(module).train is not nn.Module.train]
    held = [each for module, _ in own for each in module.parameters(recurse=False)]
    values = [(each, each.detach().clone()) for each in held if type(each) is nn.Parameter and not each.is_meta]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in own:
            module.train(training)
        for module, training in modes:
            module.training = training
        for each, value in values:
            _put_back(each, value)
        for parameters, before in names:  # a forward pass may set an attribute to a parameter, as that of WeightDrop
            for name in parameters.keys() - before:
                del parameters[name]


def draws_globally(*roots: Any) -> bool:
    """True if the code of these modules and functions names NumPy's or Python's global generator of random numbers."""
    found = Snapshot({str(number): root for number, root in enumerate(roots)}, restorable=False)
    return found.draws_globally


def _is_global_generator(value: Any) -> bool:
    """True for the generators that ``random.random()`` and the like draw from, whose state is keyed in a step."""
    known = (random._inst, np.random.mtrand._rand, torch.default_generator, *torch.cuda.default_generators)
    return any(value is each for each in known)


def _put_back(tensor: Tensor, values: Tensor, put: Callable[[Any], object] | None = None) -> None:
    """Gives a tensor values; ``put`` puts another in its place where it has grown."""
    if tensor.shape != values.shape:
        (put or functools.partial(setattr, tensor, "data"))(values.clone())
    elif digest_tensor(tensor) != digest_tensor(values):
        tensor.detach().copy_(values)


def _shrink(container: Any, entries: Any) -> None:
    """Takes out what was added to some entries; values that were set since stay."""
    if isinstance(container, dict):
        for key in [key for key, _ in stored_in(container) if key not in entries]:
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


def without_key(place: str) -> str:
    """The words of a place without the key of an entry: ``the attribute 'table' of the model``."""
    return place.partition("[")[0]


def told(changes: Mapping[str, tuple[str, str]], most: int = 3) -> str:
    """Changes for a message: each place with its value before and after."""
    return shorten([f"{name} (from {before} to {after})" for name, (before, after) in changes.items()], most)
