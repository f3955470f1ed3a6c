"""Sends values from stage to stage: tensors of any shape and stride, in tuples, lists, dicts, and classes of fields.

Nothing infers shapes beforehand, so no module is called once more than in training. The first value of a kind goes out
with its description in front; after that both sides know it, and only tensors are sent. A kind is what decides the
shapes, such as the shapes of the model's input, which every rank of a pipeline knows.

    sender     [head][description]   [tensor] [tensor]      [tensor] [tensor]      [tensor] ...
                first of a kind                              same kind

Strides and alignment are part of the description: the receiver computes on the same layout, and so with the same
kernels. A named tuple or a dataclass goes as a dict of its fields with the name of its class, which the receiver has
imported too.
"""

from __future__ import annotations

import json
import math
import sys
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_map,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from lockstep.data.reader import ALIGNMENT
from lockstep.errors import ConfigError
from lockstep.strategies.pipeline.links import OTHER_FREEZING, Arrival, GroupLink, SharedMemoryLink
from lockstep.strategies.sharding import has_no_gaps
from lockstep.text import grouped

_CLASS = "lockstep, an object of "
"""Begins the key of a dict that stands for an object, before the module and the name of its class."""
_SAME = "tensor "
"""Begins what stands for a tensor that was there before, ahead of its place."""

_BEGINS = 0x6C6F636B73746570
"""The first word of a description, which no tensor is likely to have."""

_SOUND: set[str] = set()
"""Texts that give the structures again that they were made of."""


class _CannotSend(Exception):
    """A value of some class, with a remark, cannot be sent."""


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a value, in the order in which they are sent; one that is there twice is sent once."""
    if isinstance(value, Tensor):
        return [value]
    found = {id(leaf): leaf for leaf in _flatten(value)[0] if isinstance(leaf, Tensor)}
    return [*found.values()]


def _flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a value and its structure, in which named tuples and dataclasses are dicts."""
    leaves, structure = tree_flatten(value, is_leaf=_is_object)
    return tree_flatten(_as_dicts(value)) if any(map(_is_object, leaves)) else (leaves, structure)


def _is_object(value: Any) -> bool:
    """Returns whether a value is a named tuple or a dataclass, which have fields by name."""
    if isinstance(value, tuple):
        return hasattr(value, "_fields")
    return is_dataclass(value) and not isinstance(value, type | dict)


def _as_dicts(value: Any) -> Any:
    """The value with dicts in place of named tuples and dataclasses."""
    return tree_map(_as_dict, value, is_leaf=_is_object)


def _as_dict(value: Any) -> Any:
    if not _is_object(value):
        return value
    cls = type(value)
    if _class_of(key := f"{_CLASS}{cls.__module__}:{cls.__qualname__}") is not cls:
        raise _CannotSend(cls.__name__, " whose class is defined within a function (move it to the top of its file)")
    names = getattr(cls, "_fields", None) or [each.name for each in fields(value)]
    return {key: {name: _as_dicts(getattr(value, name)) for name in names}}


def _as_objects(value: Any) -> Any:
    """Undoes ``_as_dicts``."""
    return tree_map(_as_object, value, is_leaf=_is_named)


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and str(next(iter(value))).startswith(_CLASS)


def _as_object(value: Any) -> Any:
    if not _is_named(value):
        return value
    ((key, held),) = value.items()
    cls, held = _class_of(key), {name: _as_objects(each) for name, each in held.items()}
    if issubclass(cls, tuple):
        return cls._make(held.values())
    made = object.__new__(cls)  # as copy.copy makes one: its __init__ may take other arguments
    for name, each in held.items():
        object.__setattr__(made, name, each)
    return made


def _class_of(key: str) -> Any:
    """The class that a key stands for; None if nobody has imported it by that name."""
    module, _, name = key.removeprefix(_CLASS).partition(":")
    try:
        return attrgetter(name)(sys.modules[module])
    except (AttributeError, KeyError):
        return None


@dataclass(frozen=True)
class TensorSpec:
    """Everything about a tensor except its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    needs_gradient: bool
    offset: int
    """How many numbers after a multiple of 64 bytes it begins: products of matrices and vectors depend on that."""

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The form of a tensor."""
        if tensor.layout is not torch.strided or tensor.is_conj():
            kind = "conjugate" if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")
            raise _CannotSend("Tensor", f" that is {kind} (resolve_conj() or to_dense() makes an ordinary one)")
        if type(tensor) not in (Tensor, nn.Parameter):
            raise _CannotSend(type(tensor).__name__, " that is a class of tensors (as_subclass(torch.Tensor))")
        dtype = str(tensor.dtype).removeprefix("torch.")
        offset = tensor.data_ptr() % ALIGNMENT // tensor.element_size()
        return cls(tuple(tensor.shape), tensor.stride(), dtype, tensor.requires_grad, offset)

    @property
    def is_packed(self) -> bool:
        """True if the tensor fills its memory without holes, in some order of its dims."""
        return has_no_gaps(self.shape, self.strides)

    def packed(self, tensor: Tensor) -> Tensor:
        """A tensor of this spec as flat memory that can be sent."""
        data = tensor.detach()
        return data.as_strided((data.numel(),), (1,)) if self.is_packed else data.contiguous().view(-1)

    def empty(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """A tensor of this spec, if it is packed, and the flat memory that receives its numbers."""
        if self.is_packed:
            whole = self._place(self.shape, device)
        else:
            whole = torch.empty(self.shape, dtype=getattr(torch, self.dtype), device=device)
        return whole, whole.as_strided((whole.numel(),), (1,))

    def received(self, whole: Tensor) -> Tensor:
        """The tensor whose numbers have arrived, with the strides and the offset that the sent one had."""
        return whole if self.is_packed else self.copied(whole, whole.device)

    def copied(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A copy on a device with the strides and the offset of the spec."""
        repeated = tuple(1 if stride == 0 and size else size for size, stride in zip(self.shape, self.strides))
        laid_out = self._place(repeated, device)
        for dim, size in enumerate(repeated):
            tensor = tensor.narrow(dim, 0, size)
        laid_out.copy_(tensor, non_blocking=True)
        return laid_out if repeated == self.shape else laid_out.expand(self.shape)

    def _place(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Memory for a tensor of this shape, with the strides and the offset."""
        dtype = getattr(torch, self.dtype)
        if not self.offset:
            return torch.empty_strided(shape, self.strides, dtype=dtype, device=device)
        last = sum((size - 1) * stride for size, stride in zip(shape, self.strides))
        memory = torch.empty(self.offset + last + 1, dtype=dtype, device=device)
        return memory.as_strided(shape, self.strides, self.offset).data  # no view, for autograd


@dataclass(frozen=True)
class Description:
    """Everything about a value except the numbers in its tensors."""

    structure: str
    """Empty for a tensor."""
    leaves: tuple[TensorSpec | str, ...]
    """A spec for each tensor when it comes first, JSON for anything else."""
    overlapping: tuple[int, ...] = field(default=(), compare=False)
    """The places of tensors that share elements where they were made; they do not where they are received."""

    @classmethod
    def of(cls, value: Any, name: str) -> tuple[Description, list[Tensor]]:
        """The description of a value, and its tensors."""
        try:
            if isinstance(value, Tensor):
                return cls("", (TensorSpec.of(value),)), [value]
            leaves, structure = _flatten(value)
            places: dict[int, int] = {}
            found: list[TensorSpec | str] = []
            tensors: list[Tensor] = []
            for leaf in leaves:
                if not isinstance(leaf, Tensor):
                    found.append(_text(leaf))
                elif id(leaf) in places:
                    found.append(f"{_SAME}{places[id(leaf)]}")
                else:
                    places[id(leaf)] = len(tensors)
                    found.append(TensorSpec.of(leaf))
                    tensors.append(leaf)
            text = treespec_dumps(structure)
            if text not in _SOUND and _structure(text) != structure:
                raise _CannotSend("dict", " that has other keys than strings and numbers")
            _SOUND.add(text)
            return cls(text, tuple(found)), tensors
        except (_CannotSend, NotImplementedError, TypeError) as error:
            kind = type(value).__name__
            inner, remark = error.args if isinstance(error, _CannotSend) else (kind, "")
            raise ConfigError(
                f"The stage that ends with {name!r} returns {kind}{f' with {inner}' if inner != kind else ''}{remark}, "
                "but only tensors, numbers, strings, and tuples, lists, dicts, named tuples and dataclasses of them "
                "can be sent to the next stage. Cut the model elsewhere with pipeline.split."
            ) from error

    @property
    def specs(self) -> list[TensorSpec]:
        """Those of the tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    def value(self, tensors: list[Tensor]) -> Any:
        """The value with these tensors."""
        if not self.structure:
            return tensors[0]
        given, structure = iter(tensors), _structure(self.structure)
        assert structure is not None, "it was looked at when it was sent"
        leaves = [
            next(given)
            if isinstance(leaf, TensorSpec)
            else tensors[int(leaf.removeprefix(_SAME))]
            if leaf.startswith(_SAME)
            else json.loads(leaf)
            for leaf in self.leaves
        ]
        return _as_objects(tree_unflatten(leaves, structure))

    def encode(self) -> bytes:
        """As JSON."""
        leaves = [leaf if isinstance(leaf, str) else list(vars(leaf).values()) for leaf in self.leaves]
        return json.dumps([self.structure, leaves, self.overlapping]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Description:
        """From JSON."""
        structure, leaves, overlapping = json.loads(data)
        specs = tuple(
            leaf if isinstance(leaf, str) else TensorSpec(tuple(leaf[0]), tuple(leaf[1]), *leaf[2:]) for leaf in leaves
        )
        return cls(structure, specs, tuple(overlapping))


def _overlapping(tensors: list[Tensor]) -> tuple[int, ...]:
    """The places of tensors that share elements with another one; of views of one memory it is counted out."""
    filled = ((each.untyped_storage().data_ptr(), place) for place, each in enumerate(tensors) if each.numel())
    return tuple(
        each
        for group in grouped(filled).values()
        if len(group) > 1 and _share_elements([tensors[place] for place in group])
        for each in group
    )


def _share_elements(views: list[Tensor]) -> bool:
    size = views[0].element_size()
    if any(view.element_size() != size for view in views):
        return True
    taken = torch.zeros(views[0].untyped_storage().nbytes() // size, dtype=torch.bool)
    for view in views:
        shape = tuple(1 if stride == 0 else length for length, stride in zip(view.shape, view.stride()))
        place = taken.as_strided(shape, view.stride(), view.storage_offset())
        if place.any():
            return True
        taken.put_(
            torch.arange(len(taken)).as_strided(shape, view.stride(), view.storage_offset()),
            torch.ones_like(place),
        )
    return False


@lru_cache
def _structure(text: str) -> TreeSpec | None:
    """The structure that a text stands for; None if some key of a dict is no longer one."""
    try:
        return treespec_loads(text)
    except TypeError:
        return None


def _text(leaf: Any) -> str:
    """A plain value as JSON."""
    if type(leaf) not in (bool, int, float, str, type(None)):
        raise _CannotSend(type(leaf).__name__, "")
    return json.dumps(leaf)


class PipelineChannel:
    """One direction between two ranks; what one sends, the other must receive, in the same order.

    Args:
        link: that takes the tensors there.
        name: of the module before the cut, for errors.
    """

    def __init__(self, link: GroupLink | SharedMemoryLink, device: torch.device, name: str) -> None:
        self._link, self._device, self._name = link, device, name
        self.bytes_sent = 0
        self._known: dict[Hashable, Description] = {}
        self._posted: deque[tuple[Hashable, list[tuple[Arrival, Tensor]]]] = deque()

    def send(self, kind: Hashable, value: Any) -> None:
        """Sends a value; does not wait."""
        description, tensors = Description.of(value, self._name)
        known = self._known.get(kind)
        if known is None:
            description = self._known[kind] = replace(description, overlapping=_overlapping(tensors))
            text = torch.frombuffer(bytearray(description.encode()), dtype=torch.uint8).to(self._device)
            self._send(torch.tensor([_BEGINS, len(text)], device=self._device))
            self._send(text)
        elif known != description:
            raise ConfigError(
                f"The tensors after {self._name!r}, where a stage ends, differ in shape, strides, place in memory or "
                "type, or in which of them get a gradient, between micro-batches with the same input shapes. Cut the "
                "model elsewhere with pipeline.split."
            )
        for spec, tensor in zip(description.specs, tensors):
            self._send(spec.packed(tensor))

    def expect(self, kind: Hashable) -> None:
        """Makes room for a value that will be received, if it is known what it looks like; does not wait."""
        if kind in self._known:
            self._posted.append((kind, self._post(self._known[kind])))

    def receive(self, kind: Hashable) -> tuple[Description, list[Tensor]]:
        """Waits for the next value; gives its description and its tensors."""
        if self._posted:
            posted, parts = self._posted.popleft()
            assert posted == kind, "values are received in another order than they were expected in"
        else:
            if kind not in self._known:
                self._known[kind] = self._receive_description()
            parts = self._post(self._known[kind])
        for arrival, _ in parts:
            arrival()
        description = self._known[kind]
        return description, [spec.received(whole) for spec, (_, whole) in zip(description.specs, parts)]

    def flush(self) -> None:
        """Waits until all that was sent has arrived."""
        self._link.flush()

    def _receive_description(self) -> Description:
        head = torch.zeros(self._words_of_head(), dtype=torch.int64, device=self._device)
        self._link.receive(head)()
        begins, length = head[:2].tolist()
        if begins != _BEGINS:
            raise ConfigError(OTHER_FREEZING)
        text = torch.zeros(length, dtype=torch.uint8, device=self._device)
        self._link.receive(text)()
        return Description.decode(bytes(text.tolist()))

    def _words_of_head(self) -> int:
        """The room for the head of a description, in int64: two words, and what else the sender might send.

        gloo ends the process where a message is larger than its room. NCCL wants both of one size.
        """
        if self._device.type != "cpu" or not isinstance(self._link, GroupLink):
            return 2
        specs = [spec for description in self._known.values() for spec in description.specs]
        sizes: list[int] = [math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize for spec in specs]
        return max([16, *sizes]) // 8 + 1

    def _post(self, description: Description) -> list[tuple[Arrival, Tensor]]:
        places = [spec.empty(self._device) for spec in description.specs]
        return [(self._link.receive(flat), whole) for whole, flat in places]

    def _send(self, tensor: Tensor) -> None:
        self._link.send(tensor)
        self.bytes_sent += tensor.nbytes
