"""Brings the data of micro-batches to the device, beside what the device computes.

    host            | give k0 | give k1 | give k2 | ...          kernels are queued, not waited for
    compute stream  | forward, backward of k0 | of k1            waits for a copy just before what needs it
    copy stream     | k0 || k1 |                                 out of page-locked memory, while k0 is computed

The first copy of a step runs while the device still does the step before it, unless the loop reads a loss in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.data.nested import map_leaves


class Delivery:
    """Copies to one device; on CUDA over a stream of its own, so that no copy waits for kernels queued before it.

    Args:
        device: where data is wanted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = (
            torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch's stub
        )

    def __call__(self, data: Any) -> Any:
        """The same data with its tensors on the device, and whatever else has a method ``to``.

        On CUDA the current stream waits for the copies; the process does not, if they come from page-locked memory.
        """
        if self._device.type == "cpu":
            return data
        if self._stream is None:
            return map_leaves(data, self._moved)
        delivered = map_leaves(data, self._copied)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return delivered

    def _moved(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self._device, non_blocking=True)
        return value.to(self._device) if hasattr(value, "to") else value

    def _copied(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            return self._moved(value)  # over the current stream: nothing can record an object's tensors
        with torch.cuda.stream(self._stream):
            copied = value.to(self._device, non_blocking=True)
        copied.record_stream(torch.cuda.current_stream(self._device))
        return copied
