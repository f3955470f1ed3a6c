"""Small linear pictures of tensors: sums of entries with fixed random signs.

Since the picture of a sum is the sum of the pictures, which weighted sum of the ranks' gradients was used can be
computed from a few numbers per parameter (a count sketch: Charikar, Chen and Farach-Colton, 2002).
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.fingerprint import digest_tensor
from lockstep.verify.plain.record import Measure

LENGTH = 16
"""Numbers per tensor; a smaller tensor is its own picture."""


class Sketcher:
    """Measures tensors. The signs follow from a tensor's name and size, so they are equal on every rank and run."""

    def __init__(self) -> None:
        self._signs: dict[str, Tensor] = {}

    def measure(self, name: str, tensor: Tensor, *, bits: bool = True) -> Measure:
        """Digest (if ``bits``), norm and sketch of a tensor."""
        values = tensor.detach().to(torch.float64).reshape(-1)
        digest = digest_tensor(tensor) if bits else ""
        return Measure(digest, float(values.norm()), tuple(self._sketch(name, values).tolist()))

    def _sketch(self, name: str, values: Tensor) -> Tensor:
        if values.numel() <= LENGTH:
            return values
        signs = self._signs.get(name)
        if signs is None or signs.numel() != values.numel() or signs.device != values.device:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn = torch.randint(0, 2, values.shape, generator=generator, dtype=torch.int8)
            signs = self._signs[name] = (2 * drawn - 1).to(values.device)
        missing = -values.numel() % LENGTH
        return functional.pad(values * signs, (0, missing)).view(-1, LENGTH).sum(0)
