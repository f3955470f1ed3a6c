"""The values that optimizers and modules keep beside ``state_dict()``. Checkpoints hold those that have changed.

    numbers, texts, tensors, arrays, generators        by value
    lists, dicts, sets, the user's own objects         entry by entry, put back in place: others may refer to them
    functions, what is too large or has odd keys       not held: a run that has changed one is not resumed
    layers, parameters, files, data sets               left out: they are stored elsewhere, or no state

Tensors of optimizers are not held here; ``unsaved_tensors`` names those that are in no ``state_dict()``.
``UnheldPlaces`` of ``lost_variables`` watches what no checkpoint holds, such as globals that the model reads.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import re
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.record import JSON, decode, encode
from lockstep.checkpoint.state import ATTRIBUTE, has_extra_state, named_state, with_strides, wrapped_optimizers
from lockstep.core.fingerprint import checksum, memory_of, sum_of_bits
from lockstep.core.generators import encoded_state, set_encoded_state
from lockstep.core.values import (
    CONTAINERS,
    Part,
    attributes_of,
    entries_in,
    inside,
    inside_object,
    is_plain,
    is_users_object,
    octets_of,
    reached_from,
    refill,
    set_octets,
    stored_in,
    text_of_plain,
)
from lockstep.distributed.collectives import gather_json
from lockstep.errors import ConfigError
from lockstep.numerics.hidden_state import without_key
from lockstep.numerics.running_buffers import persistent_buffers
from lockstep.strategies import Strategy
from lockstep.strategies.absent import AbsentTensor, users_attributes
from lockstep.strategies.sharding import has_no_gaps

if TYPE_CHECKING:
    from lockstep.run.prepare import Parts

Place = tuple[str, str]
"""An object, as ``"module layers.0"``, and its attribute."""
_First = Mapping[str, Callable[[], Any]]
_OF_TORCH = (
    *("_opt_called", "_step_count", "_numel_cache", "_step_supports_amp_scaling", "_zero_grad_profile_name"),
    *("_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured", "_is_full_backward_hook"),
)
"""Attributes by which torch's own optimizers, schedulers and modules know what they do in this process."""
_REGISTERED = ("_parameters", "_buffers", "_modules")
_OF_BASES = frozenset(vars(nn.Module())) - {"training"} | {"state", "param_groups"}
_MOST_NUMBERS, _LEAST_BYTES = 4_096, 64 << 20
"""Numbers of a tensor that is held as text; bytes of all other tensors together, if the model has fewer."""
_MOST_ENTRIES, _MOST_DEPTH = 100_000, 20
"""Of the values that one attribute holds."""
_STRIDES = "strides of its tensors"
"""Stands for an attribute: how a module's parameters and buffers lie in memory. Bits of products depend on it."""
_LEFT_OUT: JSON = ["left out"]
_MISSING = object()
_ATTRIBUTE = re.compile(r"(?:the attribute '\w+' of )*(the attribute '\w+' of [^\[\]]*)(?:\[.*)?")
"""The name of an attribute of a module, or of what it holds."""
_CONTAINER_TYPES: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (list, tuple, dict, set, frozenset, deque, OrderedDict, Counter, torch.Size)
}


class Values:
    """The values that some objects keep in attributes now, as JSON in which every list begins with a value's kind.

    ``first`` gives by path the objects that there were at first: one that has taken another's place is marked as new.
    Without ``is_whole`` this process may have a part of a parameter; tensors on parameters are left out then.
    """

    def __init__(self, holders: Mapping[str, Any], first: _First | None = None, *, is_whole: bool = True) -> None:
        self.found: dict[Place, JSON] = {}
        self.arrays, self.fractions = defaultdict[Place, list[JSON]](list), defaultdict[Place, list[JSON]](list)
        """The tensors and arrays, and the numbers with a fraction within objects and containers, by attribute."""
        self.tensors: dict[str, Tensor] = {}
        """Tensors of more numbers than are held as text, by path."""
        self.large: dict[Place, list[str]] = {}
        """Their paths, by attribute."""
        self.objects: dict[str, Any] = {}
        """Objects by the path at which each was found first."""
        self.unheld: set[Place] = set()
        """Attributes with something that cannot be held."""
        self.absent: set[Place] = set()
        """Attributes whose tensors another process has."""
        modules = {name: each for name, each in holders.items() if isinstance(each, nn.Module)}
        own = (each for m in modules.values() for each in (m._parameters, persistent_buffers(m)))
        registered = [tensor for held in own for tensor in held.values() if tensor is not None]
        self._known = {id(each) for each in holders.values() if not isinstance(each, Tensor)}
        self._memory = {memory for each in registered if (memory := _memory_of(each))}
        self._room = max(_LEAST_BYTES, sum(each.nbytes for each in registered))
        self._first, self._paths = first, dict[int, str]()
        self._place, self._entries, self._has_tensors = ("", ""), 0, True
        for name, holder in holders.items():
            self._has_tensors = _has_tensors(holder, is_whole)
            for key, value in _attributes(holder).items():
                self._place, self._entries = (name, key), 0
                self.found[name, key] = self._value(value, f"{name}|{key}")

    def _value(self, value: Any, path: str, depth: int = 0) -> JSON:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value  # type: ignore[no-any-return]
        if kind is int:
            return ["int", hex(value)]
        if kind is float:
            self.fractions[self._place] += [repr(value)] if depth else []
            return float(value) if math.isfinite(value) else ["float", repr(value)]
        if kind is bytes:
            return ["bytes", value.hex()]
        if issubclass(kind, Enum):
            return ["enum", str(value.name)]
        if issubclass(kind, np.generic) and not value.dtype.hasobject:
            return ["scalar", value.dtype.str, value.tobytes().hex()]
        if issubclass(kind, int | float | complex | str | bytes | torch.dtype | torch.device):
            return self._unheld()  # of a class of the user's, or which JSON does not distinguish
        if id(value) in self._known:
            return _LEFT_OUT
        if id(value) in self._paths:
            return ["same", self._paths[id(value)]]
        self._paths[id(value)], self.objects[path] = path, value
        if (state := encoded_state(value)) is not None:
            return ["generator", json.dumps(state)]
        found = self._object(value, path, depth)
        is_new = self._first is not None and (path not in self._first or self._first[path]() is not value)
        return ["new", found] if is_new and found != _LEFT_OUT else found

    def _object(self, value: Any, path: str, depth: int) -> JSON:
        kind = type(value)
        if issubclass(kind, Tensor | Optimizer | type | FunctionType | BuiltinFunctionType):
            if not self._has_tensors:
                return _LEFT_OUT
            return self._tensor(value, path) if issubclass(kind, Tensor) else self._unheld()
        if issubclass(kind, np.ndarray):
            return self._array(value, path)
        if issubclass(kind, list | tuple | dict | set | frozenset | deque):
            return self._container(value, path, depth)
        if (octets := octets_of(value)) is not None and len(octets) <= _MOST_NUMBERS:
            return ["octets", octets.hex()]
        if not (is_users_object(value) or issubclass(kind, nn.Module)):
            return self._unheld()
        fields = _fields_of(value)
        self._entries += len(fields)
        if self._entries > _MOST_ENTRIES or depth > _MOST_DEPTH:
            return self._unheld()
        every = ([key, self._value(each.value, f"{path}.{key}", depth + 1)] for key, each in fields.items())
        held: JSON = [pair for pair in every if pair[1] != _LEFT_OUT]
        return ["object", kind.__qualname__, held] if held else _LEFT_OUT

    def _tensor(self, tensor: Tensor, path: str) -> JSON:
        if isinstance(tensor, AbsentTensor):
            self.absent.add(self._place)
            return _LEFT_OUT
        if tensor.is_meta:
            return _LEFT_OUT
        memory = _memory_of(tensor)
        if memory is None or memory in self._memory or tensor.is_quantized:
            return self._unheld()
        plain = tensor.detach().resolve_conj().resolve_neg()
        if tensor.numel() <= _MOST_NUMBERS:
            dtype, numbers = str(tensor.dtype).removeprefix("torch."), memory_of(plain).hex()
            return self._laid_out(["numbers", dtype, [*tensor.shape], numbers, tensor.is_cpu], tensor)
        if tensor.grad_fn is not None or tensor.nbytes > self._room:  # the output of a layer, or too large
            return self._unheld()
        self._room -= tensor.nbytes
        self.tensors[path] = plain
        self.large.setdefault(self._place, []).append(path)
        return self._laid_out(["tensor", path, f"{int(checksum(plain)):x}", tensor.is_cpu], tensor)

    def _laid_out(self, found: list[JSON], tensor: Tensor) -> JSON:
        self.arrays[self._place].append(found)
        is_usual = tensor.is_contiguous() or not has_no_gaps(tensor.shape, tensor.stride())
        return found if is_usual else ["strided", list(tensor.stride()), found, tensor.is_cpu]

    def _array(self, array: Any, path: str) -> JSON:
        if isinstance(array, np.memmap):
            return _LEFT_OUT
        has_more = array.dtype.hasobject or array.dtype.fields or attributes_of(array)  # as a mask
        if has_more or array.nbytes > self._room:
            return self._unheld()
        numbers = torch.tensor(np.frombuffer(array.tobytes("A"), dtype=np.uint8))
        return ["array", array.dtype.str, list(array.shape), self._tensor(numbers, path), bool(array.flags.fnc)]

    def _container(self, value: Any, path: str, depth: int) -> JSON:
        pairs, most = entries_in(value), getattr(value, "maxlen", None)
        kind = type(value).__qualname__ + (f" {most}" if type(value) is deque and most is not None else "")
        self._entries += len(pairs)
        if attributes_of(value):  # of a subclass: entries are held, and these are not
            self.unheld.add(self._place)
        if self._entries > _MOST_ENTRIES or depth > _MOST_DEPTH:
            return self._unheld()
        entries = [each for _, each in pairs]
        keys: list[JSON] = []
        try:
            if isinstance(value, dict):
                keys = [encode(key, path) for key, _ in pairs]
            elif isinstance(value, set | frozenset):
                return ["set", kind, sorted((encode(each, path) for each in entries), key=json.dumps)]
        except ConfigError:  # objects are not found again by value
            return self._unheld()
        names = [json.dumps(key) for key in keys] or range(len(entries))
        held = [self._value(each, f"{path}.{name}", depth + 1) for name, each in zip(names, entries)]
        if held and all(each == _LEFT_OUT for each in held):
            return _LEFT_OUT  # as a list of layers
        return ["dict", kind, keys, held] if isinstance(value, dict) else ["list", kind, held]

    def _unheld(self) -> JSON:
        self.unheld.add(self._place)
        return _LEFT_OUT


class _Restoring:
    """Gives objects the values that a checkpoint holds, in place where they have one of the same kind."""

    def __init__(self, now: Values, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._now, self._tensors, self._device = now, tensors, device
        self._objects = dict(now.objects)
        self.is_whole = self.has_tensors = True
        """False once a part had no counterpart here, and where no tensor of the holder is restored."""

    def value(self, stored: Any, own: Any, path: str) -> Any:
        """Returns what to hold in place of ``own``, which may be missing."""
        match stored:
            case ["left out"]:
                return self._lost(own) if own is _MISSING else own
            case ["int", text]:
                return int(text, 0)
            case ["float", text]:
                return float(text)
            case ["bytes", text]:
                return bytes.fromhex(text)
            case ["scalar", dtype, text]:
                return np.frombuffer(bytes.fromhex(text), dtype=dtype)[0]
            case ["enum", name]:
                known = type(own).__members__ if isinstance(own, Enum) else {}
                return known[name] if name in known else self._lost(own)
            case ["same", other]:
                return self._objects.get(other, own)
            case list():
                is_new = stored[0] == "new"
                self._objects[path] = found = self._object(stored[1] if is_new else stored, own, path, is_new)
                return found
        return stored

    def _object(self, stored: list[Any], own: Any, path: str, is_new: bool) -> Any:
        if self._now.objects.get(path) is not own:
            own = _MISSING  # it belongs to another place, too
        match stored:
            case ["generator", state] if encoded_state(own) is not None:
                set_encoded_state(own, json.loads(state))
                return own
            case ["tensor" | "numbers" | "strided", *_, is_on_host] if self.has_tensors:
                # One on the CPU may be what there is before the first step.
                is_there = isinstance(own, Tensor) and not own.is_cpu
                device = own.device if is_there else "cpu" if is_on_host else self._device
                return self._put(self._numbers(stored).to(device), own, is_new)
            case ["array", dtype, shape, content, is_transposed]:  # in memory
                octets = self._numbers(content).numpy().tobytes()
                array = np.frombuffer(octets, dtype=dtype).reshape(shape, order="F" if is_transposed else "C")
                is_like = isinstance(own, np.ndarray) and (own.shape, own.dtype) == (array.shape, array.dtype)
                if is_new or not is_like or own.flags.fnc != is_transposed:
                    return array.copy("K")
                np.copyto(own, array)
                return own
            case ["octets", text] if octets_of(own) is not None:
                own = copy.copy(own) if is_new else own
                set_octets(own, bytes.fromhex(text))
                return own
            case ["set", kind, keys]:
                return self._filled(kind, [decode(each) for each in keys], own, is_new)
            case ["list", kind, entries]:
                held = list(stored_in(own)) if isinstance(own, list | tuple | deque) else []
                held += [_MISSING] * (len(entries) - len(held))
                found = self._parts(range(len(entries)), entries, held, path)
                return self._filled(kind, [each for each in found if each is not _MISSING], own, is_new)
            case ["dict", kind, keys, entries]:
                names = [decode(key) for key in keys]
                entry = dict(stored_in(own)) if isinstance(own, dict) else {}
                held = [entry.get(name, _MISSING) for name in names]
                found = self._parts([json.dumps(key) for key in keys], entries, held, path)
                kept = {name: each for name, each in zip(names, found) if each is not _MISSING}
                return self._filled(kind, kept, own, is_new)
            case ["object", kind, fields] if type(own).__qualname__ == kind:
                own = copy.copy(own) if is_new else own
                has = _fields_of(own)
                for key, each in fields:
                    now = has[key].value if key in has else _MISSING
                    value = self.value(each, now, f"{path}.{key}")
                    if key in has:
                        has[key].put(value)
                    elif value is not _MISSING:
                        object.__setattr__(own, key, value)  # of a frozen class, too
                return own
        return self._lost(own)

    def _parts(self, names: Iterable[Any], stored: list[Any], held: list[Any], path: str) -> list[Any]:
        return [self.value(each, own, f"{path}.{name}") for name, each, own in zip(names, stored, held)]

    def _filled(self, kind: str, entries: Any, own: Any, is_new: bool) -> Any:
        """A container with these entries: the own one, where its kind is the same."""
        kind, _, most = kind.partition(" ")  # of a deque
        if type(own).__qualname__ != kind or (type(own) is deque and own.maxlen != (int(most) if most else None)):
            made = _CONTAINER_TYPES[kind](entries) if kind in _CONTAINER_TYPES else self._lost(own)
            return deque(made, int(most)) if most else made
        if isinstance(own, tuple | frozenset):
            return type(own)(*entries) if hasattr(own, "_fields") else type(own)(entries)
        found = copy.copy(own) if is_new else own
        refill(found, entries)
        return found

    def _numbers(self, stored: list[Any]) -> Tensor:
        if stored[0] == "strided":
            return with_strides(self._numbers(stored[2]), stored[1])
        if stored[0] == "tensor":
            return self._tensors[f"{ATTRIBUTE}{stored[1]}"]
        _, dtype, shape, text, _ = stored
        octets = torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
        return octets.view(getattr(torch, dtype)).reshape(shape)

    def _put(self, tensor: Tensor, own: Any, is_new: bool) -> Any:
        if isinstance(own, AbsentTensor):
            return own  # another process has it
        is_like = isinstance(own, Tensor) and own.shape == tensor.shape and own.dtype == tensor.dtype
        is_like = is_like and (own.stride() == tensor.stride() or not has_no_gaps(own.shape, own.stride()))
        if is_new or not is_like or own.grad_fn is not None or own.is_inference():
            return tensor.clone()
        with torch.no_grad():
            own.copy_(tensor)
        return own

    def _lost(self, own: Any) -> Any:
        self.is_whole = False
        return own


class Attributes:
    """The values that the optimizers, modules and parameters of a run keep, beside what they kept at first.

    ``idle``: attributes that each call sets again and nothing depends on, in words; a resumed run needs none like them.
    ``is_whole``: see ``Values``.
    """

    def __init__(self, parts: Parts, idle: Collection[str] = (), *, is_whole: bool = True) -> None:
        self._parts, self._idle, self._is_whole = parts, idle, is_whole
        first = Values(self._holders(), is_whole=is_whole)
        self._first = {place: json.dumps(value) for place, value in first.found.items()}
        self._objects = {path: reference(value) for path, value in first.objects.items()}
        self.lost: list[str] = []
        """The attributes that the last ``capture`` did not hold, since another process has them, in words."""

    def _holders(self) -> dict[str, Any]:
        optimizers = {f"optimizer {number}": each for number, each in enumerate(self._parts.optimizers)}
        return optimizers | holders_in(self._parts.named_modules)

    def capture(self, strategy: Strategy, tensors: dict[str, Tensor], *, alone: bool = False) -> dict[str, Any]:
        """The values that have changed since, as JSON; large tensors go into ``tensors``. Collective unless ``alone``.

        Where processes differ, the value is that of the first one that has it: a loop changes it on all of them, and
        what calls on a single process leave must not matter.
        """
        now = Values(self._holders(), self._objects, is_whole=self._is_whole)
        held = {place: value for place, value in now.found.items() if value != _LEFT_OUT}
        changed = {
            place: _pruned(value, json.loads(self._first[place])) if place in self._first else value
            for place, value in held.items()
            if json.dumps(value) != self._first.get(place)
        }
        large = {place: value for place, value in changed.items() if place in now.large}
        if not alone and not strategy.replicated and strategy.all_ranks is not None:
            small = [[*place, value] for place, value in changed.items() if place not in large]
            mine = [small, sorted(large), sorted(now.absent)]
            everyone = gather_json(mine, strategy.all_ranks, strategy.device)
            # A process that steps no optimizer, as a worker of a parameter server, knows the first numbers only.
            changed = {(holder, key): value for each, *_ in reversed(everyone) for holder, key, value in each}
            changed |= large
            absent = {(holder, key) for holder, key in everyone[0][2]}
            elsewhere = absent & {(holder, key) for _, places, _ in everyone[1:] for holder, key in places}
            self.lost = sorted(words_of(*place) for place in elsewhere)
        for place, value in large.items():
            text = json.dumps(value)
            used = [path for path in now.large[place] if json.dumps(path) in text]
            tensors.update({f"{ATTRIBUTE}{path}": now.tensors[path] for path in used})
        found = [[*place, changed[place]] for place in {**now.found, **changed} if place in changed]
        idle = sorted({words_of(*place) for place in changed} & set(self._idle))
        return {"held": found, "idle": idle} if found else {}

    def restore(self, stored: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> list[str]:
        """Sets what ``capture`` gave; returns what has no counterpart here, in words.

        Tensors without a counterpart here go to ``device``, unless they were on the CPU.
        """
        holders = self._holders()
        restoring, lost = _Restoring(Values(holders), tensors, device), list[str]()
        for name, key, value in stored.get("held", ()):  # in the order in which they were found
            if (holder := holders.get(name)) is None:
                continue  # an optimizer, where a model predicts
            if key == _STRIDES:
                if not _laid_out_as(holder, json.loads(value)):
                    lost.append(f"the strides of tensors of {name.removeprefix('module ')}")
                continue
            restoring.is_whole, own = True, _attributes(holder).get(key, _MISSING)
            restoring.has_tensors = _has_tensors(holder, self._is_whole)
            found = restoring.value(value, own, f"{name}|{key}")
            if not restoring.is_whole:
                lost += {words_of(name, key)} - set(stored.get("idle", ()))
            elif found is not own:
                is_buffer = isinstance(holder, nn.Module) and key in holder._buffers
                (holder._buffers if is_buffer else vars(holder))[key] = found
        return lost


def _pruned(value: Any, first: Any) -> Any:
    """A value without what it had at first: fields of objects and entries of dicts that the run has not changed."""
    match value, first:
        case ["object", kind, fields], ["object", str() as other, known] if kind == other:
            before = dict(known)
            pairs = [[key, _pruned(each, before.get(key, _MISSING))] for key, each in fields]
            return ["object", kind, [pair for pair in pairs if pair[1] != _LEFT_OUT]]
        case ["dict", kind, keys, entries], ["dict", str() as other, *known] if kind == other:
            names = [json.dumps(key) for key in keys]
            before = dict(zip(map(json.dumps, known[0]), known[1]))
            held = [_pruned(each, before.get(name, _MISSING)) for name, each in zip(names, entries)]
            return ["dict", kind, keys, held]
    return _LEFT_OUT if value == first else value


def holders_in(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Modules and their parameters by names of which ``words_of`` makes the words of a ``Snapshot``."""
    found: dict[str, Any] = {f"module {path}": each for path, each in modules.items()}
    own = ((path, *pair) for path, each in modules.items() for pair in each._parameters.items())
    return found | {f"the parameter {key!r} of {path or 'the model'}": p for path, key, p in own if p is not None}


def _has_tensors(holder: Any, is_whole: bool) -> bool:
    """False where tensors of a holder are stored elsewhere, or ``unsaved_tensors`` names them."""
    return not isinstance(holder, Optimizer) and (is_whole or not isinstance(holder, Tensor))


def _attributes(holder: Any) -> dict[str, Any]:
    """The attributes of an object that are its own, and a module's buffers that no ``state_dict()`` has."""
    if isinstance(holder, Tensor):
        return users_attributes(holder)
    split = [each for each in type(holder).__mro__ if each.__module__.startswith("lockstep.strategies.")]
    left_out = _OF_BASES.union(_OF_TORCH, *map(inspect.get_annotations, split))
    # Names that begin with two underscores are those of torch's notes on what it has wrapped.
    names = [name for name in vars(holder) if name not in left_out and not name.startswith("__")]
    found = {name: vars(holder)[name] for name in names}
    if isinstance(holder, nn.Module):
        found |= {name: holder._buffers.get(name) for name in sorted(holder._non_persistent_buffers_set)}
        if tensors := _with_dims(holder):
            found[_STRIDES] = json.dumps({name: each.stride() for name, each in tensors.items()})
    return found


def _with_dims(module: nn.Module) -> dict[str, Tensor]:
    """The module's own parameters and buffers that have several dims, and their numbers here."""
    own = {**module._parameters, **module._buffers}.items()
    return {name: each for name, each in own if each is not None and _memory_of(each) and each.dim() > 1}


def _laid_out_as(module: nn.Module, strides: Mapping[str, list[int]]) -> bool:
    """Gives tensors the strides that they had; False where one of them is in another process."""
    own = _with_dims(module)
    for name, each in own.items():
        if list(each.stride()) != strides.get(name, list(each.stride())):
            each.data = with_strides(each.data, strides[name])
    return strides.keys() <= own.keys()


def _fields_of(value: Any) -> dict[str, Part]:
    """The attributes of an object of any class as they are stored."""
    left_out = _OF_BASES.difference(_REGISTERED) if isinstance(value, nn.Module) else ()
    return {part.key: part for part in inside_object(value, left_out)}


def _memory_of(tensor: Tensor) -> int | None:
    """Equal for tensors that share memory; None for those whose numbers do not lie in memory here."""
    if (
        type(tensor) not in (Tensor, nn.Parameter)
        or tensor.layout is not torch.strided
        or tensor.is_meta
        or tensor.is_nested
    ):
        return None
    return tensor.untyped_storage().data_ptr() or id(tensor)


def reference(value: Any) -> Callable[[], Any]:
    """A weak reference to an object; for lists and dicts, which allow none, a function that returns the object."""
    try:
        return weakref.WeakMethod(value) if isinstance(value, MethodType) else weakref.ref(value)
    except TypeError:
        return lambda: value


def words_of(holder: str, key: str) -> str:
    """An attribute for a message."""
    return f"the attribute {key!r} of {holder.removeprefix('module ') or 'the model'}"


def unsaved_tensors(optimizer: Optimizer, is_whole: bool) -> dict[str, str]:
    """Tensors that an optimizer of the user's own keeps where no checkpoint looks, by name, as texts.

    Those in its attributes, in entries of ``state`` that belong to no parameter, of which also numbers and texts; and
    where not each process holds them whole, those in optimizers that it wraps, on parameters, and in what its code
    reads, such as a dict of parameters in a global.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return {}
    members = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = named_state(optimizer)
    saved = {id(state) for key, state in optimizer.state.items() if id(key) in members or key in named}
    found: dict[str, str] = {}
    seen = members | saved | {id(optimizer), id(optimizer.state), id(optimizer.param_groups)}
    for inner in wrapped_optimizers(optimizer).values() if is_whole else ():
        found |= unsaved_tensors(inner, is_whole)
        seen |= {id(inner), id(inner.state)}
    todo = [(key, value) for key, value in vars(optimizer).items() if key not in ("defaults", "param_groups")]
    todo += [
        (f"state[{key!r}]" if isinstance(key, str) else "state[...]", value)
        for key, value in optimizer.state.items()
        if id(key) not in members and key not in named
    ]
    if not is_whole:
        todo.append(("", type(optimizer)))
        for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            todo += [(f"{key!r} of parameter {number}", value) for key, value in users_attributes(p).items()]
    while todo:
        name, value = todo.pop(0)
        if is_plain(value):
            found |= {name: text_of_plain(value)} if name.startswith("state[") else {}
        if is_plain(value) or id(value) in seen or (isinstance(value, nn.Module) and not is_whole):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor) and not value.is_meta and not isinstance(value, AbsentTensor):
            found[name] = f"{tuple(value.shape)} {int(sum_of_bits(value))}"
        elif isinstance(value, Optimizer):
            todo.insert(0, (f"{name}.state", value.state))
        else:
            is_code = isinstance(value, FunctionType | type) and not is_whole
            is_open = is_code or isinstance(value, CONTAINERS) or is_users_object(value)
            parts = (reached_from(value, 0) if is_code else inside(value)) if is_open else ()
            todo[:0] = [(part.path(name), part.value) for part in parts]  # what it holds comes next
    return found


def held_places(model: nn.Module) -> Callable[[str], bool]:
    """A function that says whether a checkpoint holds a place, given in the words of a ``Snapshot``."""
    modules = dict(model.named_modules())
    owners = {path or "the model" for path, each in modules.items() if has_extra_state(each)}
    values = Values(holders_in(modules))
    held = {place for place, value in values.found.items() if value != _LEFT_OUT}
    places = {words_of(*place) for place in held - values.unheld}

    def is_held(name: str) -> bool:
        attribute = _ATTRIBUTE.fullmatch(name)
        is_ours = attribute is not None and attribute[1] in places
        return is_ours or without_key(name).rpartition(" of ")[2] in owners

    return is_held
