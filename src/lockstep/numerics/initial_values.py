"""Models that are built without values, and get them later, tensor by tensor: ``with run.empty_model():``.

    while the model is built     tensors lie on the device "meta"; each operator that makes or changes one is noted
    run.prepare                  the operators that lead to one tensor are computed, with random numbers keyed by the
                                 seed and the operator's number; a process keeps its part and frees the rest

So no process ever holds more than its part of the model and one whole parameter, and the values are those of the same
model on one process. Tensors are identified by their memory, so views and ``.data`` are followed.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.core.fingerprint import digest_tensor
from lockstep.core.seeding import derive_seed
from lockstep.errors import ConfigError
from lockstep.numerics.compilation import DispatchMode
from lockstep.runtime.torch_internals import NO_VALUES_HERE

_TRUNCATED = nn.init._no_grad_trunc_normal_
_IS_META: Any = Tensor.is_meta
_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)
"""Functions that make tensors of given numbers, which the device "meta" forgets without a word to a dispatch mode."""


@dataclass(frozen=True)
class _View:
    """A tensor without values: its memory, and its place there."""

    memory: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def __repr__(self) -> str:
        return f"{self.dtype} {tuple(self.size)} {self.stride} at {self.offset}"

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """The same place in real memory."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _Operation:
    """One call of an operator, with ``_View`` in place of tensors without values."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    read: frozenset[int]
    """The memory of what it is given."""
    made: dict[int, _View]
    """Its results in new memory, by their place among the results."""

    @property
    def leaves_as_is(self) -> bool:
        """True if it makes memory that may hold anything."""
        return self.function is not _TRUNCATED and "empty" in self.function.overloadpacket.__name__

    @property
    def name(self) -> str:
        return "trunc_normal_" if self.function is _TRUNCATED else str(self.function)


class InitialValues:
    """How the values of tensors are made; see ``recording`` and ``fill``."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._operations: list[_Operation] = []
        self._writers: dict[int, list[int]] = {}
        """The numbers of the operations that make or change each piece of memory."""
        self._memory: dict[int, torch.UntypedStorage] = {}
        """Keeps the memory's identity from being used again."""
        self._built: dict[int, tuple[Tensor, int]] = {}
        """The tensors that had no values when the context ended, by id, and how often each had been changed by then."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which new tensors get no values, and what would make them is noted.

        Raises:
            ConfigError: a value is asked for.
        """
        advice = (
            "A tensor's values were asked for while the model was built without values. Make that tensor with "
            "device='cpu', such as torch.linspace(0, 1, 12, device='cpu'), or build the model outside of "
            "run.empty_model()."
        )
        with NO_VALUES_HERE.explained(advice), torch.device("meta"), _AsOnDevice(self._note), _Recorder(self._note):
            yield
        # The type is asked: isinstance() may run code of objects that import themselves when looked at.
        tensors = (each for each in gc.get_objects() if issubclass(type(each), Tensor))
        self._built = {id(each): (each, each._version) for each in tensors if self.knows(each)}

    def knows(self, tensor: Tensor) -> bool:
        """Returns whether a tensor has no values yet, and gets them from here."""
        return _is_empty(tensor) and _memory_of(tensor) in self._memory

    def fill(self, named: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
        """Gives values to tensors that have none, which stay the same objects; leaves others as they are.

        Raises:
            ConfigError: names a tensor that was changed since it was built, or that nothing gives values to.
        """
        by_memory: dict[int, dict[int, tuple[str, Tensor]]] = {}
        for name, tensor in named:
            if self.knows(tensor):
                by_memory.setdefault(_memory_of(tensor), {}).setdefault(id(tensor), (name, tensor))
        for memory, members in by_memory.items():
            for name, tensor in members.values():
                self._require_values(name, tensor)
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                storage = self._replay(memory)
            for _, tensor in members.values():
                give_values(tensor, _view_of(tensor).of(storage).to(device))

    def _require_values(self, name: str, tensor: Tensor) -> None:
        """Raises ``ConfigError`` where the values of a tensor cannot be those that its code gave it."""
        if tensor._version != self._built.pop(id(tensor), (tensor, 0))[1]:
            raise ConfigError(
                f"{name!r} was changed after the model was built, where it is not recorded. Initialise the model "
                "within run.empty_model()."
            )
        writers = (self._operations[number] for number in self._writers[_memory_of(tensor)])
        if isinstance(tensor, nn.Parameter) and all(each.leaves_as_is for each in writers):
            raise ConfigError(
                f"Nothing gave values to {name!r}, as after torch.empty alone, so it would begin with whatever its "
                "memory holds. Initialise it within run.empty_model(), such as by nn.init.zeros_."
            )

    def digest(self) -> str:
        """SHA-256 of all that was noted, equal where all values will be; empty where nothing was."""
        if not self._operations:
            return ""
        found, names = hashlib.sha256(), dict[int, int]()

        def text(value: Any) -> str:
            if isinstance(value, _View):
                return f"{names.setdefault(value.memory, len(names))} {value!r}"
            return digest_tensor(value) if isinstance(value, Tensor) else repr(value)

        for each in self._operations:
            parts = tree_leaves((each.args, each.kwargs, each.made))
            found.update(f"{each.name} {[text(part) for part in parts]}\n".encode())
        return found.hexdigest()

    def _note(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Notes a call of an operator, where it makes or changes what has no values."""
        given = [each for each in tree_leaves((args, kwargs)) if _is_empty(each)]
        read = frozenset(map(_memory_of, given))
        made = {
            place: _view_of(each)
            for place, each in enumerate(tree_leaves(result))
            if _is_empty(each) and _memory_of(each) not in read
        }
        written = tree_leaves(_written(function, args, kwargs))
        changed = {_memory_of(each) for each in written if _is_empty(each)}
        if not made and not changed:
            return
        if any(isinstance(each, torch.Generator) for each in tree_leaves((args, kwargs))):
            raise ConfigError(
                "A model that is built under run.empty_model() draws from a generator of its own, whose numbers follow "
                "from what was drawn before. Leave the generator out: Lockstep keys the numbers by the seed."
            )
        for each in (*given, *tree_leaves(result)):
            if _is_empty(each):
                self._memory.setdefault(_memory_of(each), each.untyped_storage())
        for memory in changed | {view.memory for view in made.values()}:
            self._writers.setdefault(memory, []).append(len(self._operations))
        kept_args, kept_kwargs = tree_map(_kept, (args, kwargs))
        self._operations.append(_Operation(function, kept_args, kept_kwargs, read, made))

    def _leading_to(self, memory: int) -> list[int]:
        """The numbers of the operations that some memory's values follow from, in order."""
        chosen: set[int] = set()
        until: dict[int, int] = {}
        pending = [(memory, len(self._operations))]
        while pending:
            each, bound = pending.pop()
            if bound <= until.get(each, 0):
                continue
            until[each] = bound
            for number in self._writers.get(each, ()):
                if number < bound and number not in chosen:
                    chosen.add(number)
                    pending += [(other, number) for other in self._operations[number].read]
        return sorted(chosen)

    def _replay(self, memory: int) -> torch.UntypedStorage:
        """Computes what was noted for some memory."""
        found: dict[int, torch.UntypedStorage] = {}

        def real(value: Any) -> Any:
            if isinstance(value, _View):
                if value.memory not in found:
                    raise ConfigError(
                        f"A tensor of shape {tuple(value.size)} from which the model's values follow was put on the "
                        "device 'meta' outside of run.empty_model(), so its values are unknown. Make it inside."
                    )
                return value.of(found[value.memory])
            return torch.device("cpu") if isinstance(value, torch.device) else value

        for number in self._leading_to(memory):
            each = self._operations[number]
            if each.function is _TRUNCATED or torch.Tag.nondeterministic_seeded in each.function.tags:
                torch.default_generator.manual_seed(derive_seed(self._seed, "initial", number))
            results = tree_leaves(each.function(*tree_map(real, each.args), **tree_map(real, each.kwargs)))
            for place, view in each.made.items():
                result = results[place]
                if (result.stride(), result.storage_offset()) != (view.stride, view.offset):
                    result = torch.empty_strided(view.size, view.stride, dtype=view.dtype).copy_(result)
                found[view.memory] = result.untyped_storage()
                if each.leaves_as_is:
                    result.zero_()
        return found[memory]


class _Recorder(DispatchMode):
    """Tells a function of every operator that is called."""

    def __init__(self, note: Callable[[Any, Any, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's stub
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(func, args, kwargs or {}, result)
        return result


class _AsOnDevice(TorchFunctionMode):
    """Keeps code from taking the ways that torch has for the device "meta", on which values are forgotten."""

    def __init__(self, note: Callable[[Any, Any, Any, Any], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__self__", None) is _IS_META:
            caller = sys._getframe(1)
            if caller.f_code is _TRUNCATED.__code__:  # it draws until all are within the bounds
                given = [caller.f_locals[name] for name in inspect.signature(_TRUNCATED).parameters]
                self._note(_TRUNCATED, tuple(given), {}, given[0])
                return True
            return False
        if func not in _OF_NUMBERS or kwargs.get("device") is not None or isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        trained = kwargs.pop("requires_grad", False)
        return func(*args, **{**kwargs, "device": "cpu"}).to("meta").requires_grad_(trained)


def without_values(tensor: Tensor) -> Tensor:
    """A tensor of the same form on the device "meta".

    ``torch.empty_like`` computes that form in Python there, and imports sympy for it: half a second of each process.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return torch.empty_like(tensor, device="meta", requires_grad=False)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def empty_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model that have no values, by name: parameters, buffers, and attributes of modules."""
    for prefix, module in model.named_modules():
        for key, tensor in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(tensor, Tensor) and tensor.is_meta:
                yield f"{prefix}.{key}" if prefix else key, tensor


def give_values(tensor: Tensor, values: Tensor) -> None:
    """Gives memory to a tensor that has none, which stays the same object."""
    if isinstance(tensor, nn.Parameter):
        values = nn.Parameter(values, requires_grad=tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, values)  # what torch.utils.swap_tensors calls


def move_model(model: nn.Module, initial_values: InitialValues | None, device: torch.device) -> nn.Module:
    """Moves a model to a device; of what has no values yet, all but its parameters gets them."""
    parameters = set(map(id, model.parameters()))
    if initial_values is not None:
        others = ((name, each) for name, each in empty_tensors(model) if id(each) not in parameters)
        initial_values.fill(others, device)
    return model._apply(lambda each: each if each.is_meta else each.to(device))  # type: ignore[no-any-return,no-untyped-call]  # torch's stub


def _is_empty(value: Any) -> bool:
    """Returns whether a value is a tensor without values; ``is_meta`` is answered otherwise while a model is built."""
    return isinstance(value, Tensor) and value.device.type == "meta"


def _memory_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _view_of(tensor: Tensor) -> _View:
    return _View(_memory_of(tensor), tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _kept(value: Any) -> Any:
    """An argument as it is noted: a copy of values, which may be changed later."""
    if not isinstance(value, Tensor):
        return value
    return _view_of(value) if _is_empty(value) else value.detach().clone()


def _written(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator changes."""
    if function is _TRUNCATED:
        return [args[0]]
    named = [
        (each, args[place] if place < len(args) else kwargs.get(each.name))
        for place, each in enumerate(function._schema.arguments)
    ]
    return [value for each, value in named if each.alias_info is not None and each.alias_info.is_write]
