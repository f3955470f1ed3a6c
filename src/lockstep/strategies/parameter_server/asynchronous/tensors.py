"""Tensors as the bytes of messages, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.buffers import RunningBuffers


def as_bytes(tensor: Tensor) -> bytes | memoryview:
    """The bits of a tensor; they may be the tensor's own memory."""
    flat = tensor.detach().contiguous().cpu().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def from_bytes(body: bytearray | memoryview, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat tensor, shape (n,); on a CPU it is the message's own memory. ``ValueError`` for odd sizes."""
    if not len(body):
        return torch.empty(0, dtype=dtype, device=device)
    return torch.frombuffer(body, dtype=dtype).to(device)


class ModelBuffers:
    """The running buffers of a model as bytes, of whatever types they are.

    Args:
        model: on its device.
        declared: name patterns of running buffers beside BatchNorm's.
    """

    def __init__(self, model: nn.Module, declared: Sequence[str]) -> None:
        self._model, self._names = model, sorted(RunningBuffers.names(model, declared))
        self.nbytes = sum(buffer.nbytes for buffer in self._held())

    def as_bytes(self) -> bytes:
        """Their values."""
        return b"".join(bytes(as_bytes(buffer)) for buffer in self._held())

    def set(self, body: memoryview) -> None:
        """Sets their values from what ``as_bytes`` gave."""
        place = 0
        for buffer in self._held():
            part = bytearray(body[place : place + buffer.nbytes])
            buffer.copy_(from_bytes(part, buffer.dtype, buffer.device).view(buffer.shape))
            place += buffer.nbytes

    def _held(self) -> list[Tensor]:
        named = dict(self._model.named_buffers())
        return [named[name] for name in self._names]
