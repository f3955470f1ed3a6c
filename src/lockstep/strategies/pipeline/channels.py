"""Sends values from stage to stage: tensors of any shape and stride, in tuples, lists and dicts.

Nothing infers shapes beforehand, so no module is called once more than in training. The first value of a kind goes out
with its description in front; after that both sides know it, and only tensors are sent. A kind is what decides the
shapes, such as the shapes of the model's input, which every rank of a pipeline knows.

    sender     [length][description] [tensor] [tensor]      [tensor] [tensor]      [tensor] ...
                first of a kind                              same kind

Strides are part of the description: the receiver computes on the same layout, and so with the same kernels.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from lockstep.errors import ConfigError


@dataclass(frozen=True)
class TensorSpec:
    """Everything about a tensor except its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    needs_gradient: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The form of a tensor."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(tuple(tensor.shape), tensor.stride(), dtype, tensor.requires_grad)

    @property
    def is_packed(self) -> bool:
        """True if the tensor fills its memory without holes, in some order of its dims."""
        expected = 1
        for stride, size in sorted(zip(self.strides, self.shape)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def packed(self, tensor: Tensor) -> Tensor:
        """A tensor of this spec as flat memory that can be sent."""
        data = tensor.detach()
        return data.as_strided((data.numel(),), (1,)) if self.is_packed else data.contiguous().view(-1)

    def empty(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """A tensor of this spec, if it is packed, and the flat memory that receives its numbers."""
        dtype = getattr(torch, self.dtype)
        whole = (
            torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device)
            if self.is_packed
            else torch.empty(self.shape, dtype=dtype, device=device)
        )
        return whole, whole.as_strided((whole.numel(),), (1,))

    def spread(self, whole: Tensor) -> Tensor:
        """The received tensor with the strides that the sent one had."""
        if self.is_packed:
            return whole
        repeated = tuple(1 if stride == 0 else size for size, stride in zip(self.shape, self.strides))
        laid_out = torch.empty_strided(repeated, self.strides, dtype=whole.dtype, device=whole.device)
        for dim, size in enumerate(repeated):
            whole = whole.narrow(dim, 0, size)
        laid_out.copy_(whole)
        return laid_out if repeated == self.shape else laid_out.expand(self.shape)


@dataclass(frozen=True)
class Description:
    """Everything about a value except the numbers in its tensors."""

    structure: str
    leaves: tuple[TensorSpec | str, ...]
    """A spec for each tensor, JSON for anything else."""

    @classmethod
    def of(cls, value: Any, name: str) -> tuple[Description, list[Tensor]]:
        """The description of a value, and its tensors."""
        leaves, structure = tree_flatten(value)
        try:
            specs = tuple(
                TensorSpec.of(leaf) if isinstance(leaf, Tensor) else json.dumps(leaf) for leaf in leaves
            )
            text = treespec_dumps(structure)
        except (TypeError, NotImplementedError) as error:
            raise ConfigError(
                f"The stage that ends with {name!r} returns {type(value).__name__}, but only tensors, numbers, "
                "strings, and tuples, lists and dicts of them can be sent to the next stage. Cut the model elsewhere "
                "with pipeline.split."
            ) from error
        return cls(text, specs), [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    @property
    def specs(self) -> list[TensorSpec]:
        """Those of the tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    def value(self, tensors: list[Tensor]) -> Any:
        """The value with these tensors."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, TensorSpec) else json.loads(leaf) for leaf in self.leaves]
        return tree_unflatten(leaves, treespec_loads(self.structure))

    def encode(self) -> bytes:
        """As JSON."""
        leaves = [leaf if isinstance(leaf, str) else list(vars(leaf).values()) for leaf in self.leaves]
        return json.dumps([self.structure, leaves]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Description:
        """From JSON."""
        structure, leaves = json.loads(data)
        specs = tuple(
            leaf if isinstance(leaf, str) else TensorSpec(tuple(leaf[0]), tuple(leaf[1]), leaf[2], leaf[3])
            for leaf in leaves
        )
        return cls(structure, specs)


class PipelineChannel:
    """One direction between two ranks; what one sends, the other must receive, in the same order.

    Args:
        group: of both ranks. On CUDA the channels of a rank need groups of their own: NCCL runs what goes through one
            group in order, so two ranks that first send to each other would wait for ever.
        peer: global rank of the other.
        tag: tells channels of one group apart, where the backend knows tags.
        device: where the tensors are.
        name: of the module before the cut, for errors.
    """

    def __init__(
        self, group: dist.ProcessGroup, peer: int, tag: int, device: torch.device, name: str
    ) -> None:
        self._group, self._peer, self._tag, self._device, self._name = group, peer, tag, device, name
        self.bytes_sent = 0
        self._known: dict[Hashable, Description] = {}
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._posted: deque[tuple[Hashable, list[tuple[dist.Work, Tensor]]]] = deque()

    def send(self, kind: Hashable, value: Any) -> None:
        """Sends a value; does not wait."""
        description, tensors = Description.of(value, self._name)
        known = self._known.get(kind)
        if known is None:
            self._known[kind] = description
            text = torch.frombuffer(bytearray(description.encode()), dtype=torch.uint8).to(self._device)
            self._start_send(torch.tensor([len(text)], device=self._device))
            self._start_send(text)
        elif known != description:
            raise ConfigError(
                f"The tensors after {self._name!r}, where a stage ends, differ in shape, strides or type between "
                "micro-batches with the same input shapes. Cut the model elsewhere with "
                "pipeline.split."
            )
        for spec, tensor in zip(description.specs, tensors):
            self._start_send(spec.packed(tensor))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

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
        for work, _ in parts:
            work.wait()
        description = self._known[kind]
        return description, [spec.spread(whole) for spec, (_, whole) in zip(description.specs, parts)]

    def flush(self) -> None:
        """Waits until all that was sent has arrived."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _receive_description(self) -> Description:
        length = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._start_receive(length).wait()
        text = torch.zeros(int(length), dtype=torch.uint8, device=self._device)
        self._start_receive(text).wait()
        return Description.decode(bytes(text.tolist()))

    def _post(self, description: Description) -> list[tuple[dist.Work, Tensor]]:
        places = [spec.empty(self._device) for spec in description.specs]
        return [(self._start_receive(flat), whole) for whole, flat in places]

    def _start_receive(self, tensor: Tensor) -> dist.Work:
        work = dist.irecv(tensor, self._peer, group=self._group, tag=self._tag)
        assert work is not None
        return work

    def _start_send(self, tensor: Tensor) -> None:
        work = dist.isend(tensor, self._peer, group=self._group, tag=self._tag)
        assert work is not None
        self.bytes_sent += tensor.nbytes
        self._sent.append((work, tensor))
