"""Texts by which Lockstep recognises torch: error messages that have no type of their own, and frames of stacks.

No other module compares a message of torch. Check a new version of torch against these two tables;
``tests/runtime/test_torch_internals.py`` does so for the installed one. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True)
class TorchMessage:
    """A message that torch raises with a less specific type."""

    texts: tuple[str, ...]
    """The message contains one of them."""
    raised_as: str
    meaning: str
    seen_in: str = "2.13.0"
    """The version of torch."""

    def is_in(self, text: str) -> bool:
        """Returns whether a text contains this message."""
        return any(part in text for part in self.texts)


LOADER_TIMED_OUT = TorchMessage(
    ("DataLoader timed out after",),
    "RuntimeError",
    "No worker of a DataLoader has answered within its timeout; the workers are still there.",
)
MANY_WORKERS = TorchMessage(
    ("This DataLoader will create",), "UserWarning", "More loader workers than cores were asked for."
)
NO_VALUES_HERE = TorchMessage(
    ("meta", "DTensor"),
    "RuntimeError or NotImplementedError",
    "An operator was given a tensor without values in this process, or a part of one.",
)
LOST_PEER = TorchMessage(
    (
        "Connection closed by peer",  # gloo, RuntimeError
        "Connection reset by peer",  # gloo, and a store as DistNetworkError
        "Broken pipe",  # the same
        "Read error",  # gloo
        "Write error",  # gloo
        "remote process exited",  # NCCL, DistBackendError: a type that also stands for wrong use
        "ncclRemoteError",  # NCCL, DistBackendError
        "Socket closed",  # gloo
    ),
    "RuntimeError, DistBackendError or DistNetworkError",
    "The process at the other end of a connection is gone.",
)


class FrameKind(Enum):
    """The meaning of a frame of torch."""

    COLLECTIVE = auto()
    """It waits for other ranks in the collective that the function is named after."""
    RENDEZVOUS = auto()
    """It waits for other ranks to connect."""
    WRAPPER = auto()
    """Nothing; it lies between a call and what it calls."""
    AUTOGRAD = auto()
    """It is in C++, and waits for other ranks there if a collective is under way."""
    WAITS_FOR_WORKER = auto()
    """It waits for a worker of a DataLoader."""
    READS_SAMPLES = auto()
    """It is a worker of a DataLoader and reads."""


@dataclass(frozen=True)
class TorchFrame:
    """Frames of torch that mean the same."""

    kind: FrameKind
    file: str
    """The end of the path; a folder where it ends in a slash."""
    functions: tuple[str, ...] = ()
    """Empty: all of the file."""
    seen_in: str = "2.13.0"
    """The version of torch."""

    def fits(self, file: str, function: str) -> bool:
        """Returns whether a frame is one of these."""
        here = (
            f"/{self.file}" in f"/{file}" if self.file.endswith("/") else f"/{file}".endswith(f"/{self.file}")
        )
        return here and (not self.functions or function in self.functions)


FRAMES = (
    TorchFrame(FrameKind.COLLECTIVE, "torch/distributed/distributed_c10d.py"),
    TorchFrame(FrameKind.RENDEZVOUS, "torch/distributed/rendezvous.py"),
    TorchFrame(FrameKind.WRAPPER, "torch/distributed/c10d_logger.py"),
    TorchFrame(FrameKind.AUTOGRAD, "torch/autograd/graph.py"),
    TorchFrame(FrameKind.AUTOGRAD, "torch/autograd/__init__.py"),
    TorchFrame(FrameKind.AUTOGRAD, "torch/nn/parallel/"),
    TorchFrame(
        FrameKind.WAITS_FOR_WORKER,
        "torch/utils/data/dataloader.py",
        ("_next_data", "_get_data", "_try_get_data"),
    ),
    TorchFrame(FrameKind.READS_SAMPLES, "torch/utils/data/_utils/fetch.py", ("fetch",)),
)


def kind_of_frame(file: str, function: str) -> FrameKind | None:
    """Returns the kind of a frame, if it is a known one of torch."""
    return next((frame.kind for frame in FRAMES if frame.fits(file, function)), None)
