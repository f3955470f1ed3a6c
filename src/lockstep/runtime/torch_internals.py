"""Knowledge of torch that is not public: texts of errors without a type of their own, frames, and two marks.

No other module compares a message of torch. The tables were read off torch 2.13.0; check a new version against them,
as ``tests/runtime/test_torch_internals.py`` does for the installed one. Does not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto

from lockstep.errors import ConfigError
from lockstep.runtime.stack_dump import Mark


@dataclass(frozen=True)
class TorchMessage:
    """A message that torch raises with a less specific type; it contains one of these texts."""

    texts: tuple[str, ...]

    def is_in(self, text: str) -> bool:
        """Returns whether a text contains this message."""
        return any(part in text for part in self.texts)

    @contextmanager
    def explained(self, advice: str) -> Iterator[None]:
        """A context in which a RuntimeError with this message becomes a ``ConfigError``: advice, then torch's text."""
        try:
            yield
        except RuntimeError as error:
            if not self.is_in(str(error)):
                raise
            raise ConfigError(f"{advice} Error from torch: {error}") from error


LOADER_TIMED_OUT = TorchMessage(("DataLoader timed out after",))
"""RuntimeError: no worker of a DataLoader has answered within its timeout; the workers are still there."""
MANY_WORKERS = TorchMessage(("This DataLoader will create",))
"""UserWarning: more loader workers than cores were asked for."""
NO_VALUES_HERE = TorchMessage(("meta",))
"""RuntimeError or NotImplementedError: a tensor has no values in this process, or only a part of them."""
NO_SAVED_TENSORS_HOOKS = TorchMessage(("support saved tensor hooks",))
"""RuntimeError: a transform of torch.func was called where hooks on saved tensors are set."""
NO_SCALE = TorchMessage(("Attempted step but _scale is None", "Attempted unscale_ but _scale is None"))
"""AssertionError: a GradScaler is to step an optimizer, and has scaled no loss."""
NOT_DETERMINISTIC = TorchMessage((" does not have a deterministic implementation",))
"""RuntimeError: an operator has no fixed order of addition; its name in CUDA's sources is the word before."""
OVERWRITTEN = TorchMessage(("modified by an inplace operation",))
"""RuntimeError: a tensor that a backward pass needs was written to after its forward pass."""
USED_UP = TorchMessage(("backward through the graph a second time",))
"""RuntimeError: a backward pass needs what an earlier one has freed."""
OTHER_TYPE = TorchMessage(("dtype", "scalar type", "Input type", "input must have the type"))
"""RuntimeError: an operator was given tensors of several number types."""
NO_THREAD = TorchMessage(("Resource temporarily unavailable", "can't start new thread"))
"""RuntimeError or BlockingIOError: a thread or process could not be started, as C++ and Python say it."""
PEER_IS_LATE = TorchMessage(("Timed out waiting",))
"""RuntimeError of gloo: another process has not answered within the timeout of the process group."""
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
    )
)
"""The process at the other end of a connection is gone."""


def opened_groups() -> bool:
    """True if this process has opened torch's default process group, by a URL or variables, and even if it left it.

    One that was opened with a store, and destroyed, is not seen.
    """
    internals = sys.modules.get("torch.distributed.distributed_c10d")
    return getattr(internals, "_default_pg_init_method", None) is not None


def made_optimizers() -> bool:
    """True if this process has made an optimizer of torch: the first one of a class marks its ``step``."""
    optim = sys.modules.get("torch.optim")
    classes = [] if optim is None else [optim.Optimizer]
    for each in classes:
        classes += each.__subclasses__()
    return any(getattr(each.step, "hooked", False) for each in classes)


class FrameKind(Enum):
    """The meaning of a frame of torch for which there is no ``Mark``."""

    COLLECTIVE = auto()
    """It waits for other ranks in the collective that the function is named after."""
    WRAPPER = auto()
    """Nothing; it lies between a call and what it calls."""
    AUTOGRAD = auto()
    """It is in C++, and waits for other ranks there if a collective is under way."""


@dataclass(frozen=True)
class TorchFrame:
    """Frames of torch that mean the same."""

    kind: FrameKind | Mark
    file: str
    """The end of the path; a folder where it ends in a slash."""
    functions: tuple[str, ...] = ()
    """Empty: all of the file."""

    def fits(self, file: str, function: str) -> bool:
        """Returns whether a frame is one of these."""
        path, end = f"/{file}", f"/{self.file}"
        here = end in path if end.endswith("/") else path.endswith(end)
        return here and (not self.functions or function in self.functions)


FRAMES = (
    TorchFrame(FrameKind.COLLECTIVE, "torch/distributed/distributed_c10d.py"),
    TorchFrame(Mark.WAITS_FOR_RENDEZVOUS, "torch/distributed/rendezvous.py"),
    TorchFrame(FrameKind.WRAPPER, "torch/distributed/c10d_logger.py"),
    TorchFrame(FrameKind.WRAPPER, "torch/distributed/nn/functional.py"),
    TorchFrame(FrameKind.WRAPPER, "torch/autograd/function.py"),
    TorchFrame(FrameKind.AUTOGRAD, "torch/autograd/graph.py"),
    TorchFrame(FrameKind.AUTOGRAD, "torch/autograd/__init__.py"),
    TorchFrame(FrameKind.AUTOGRAD, "torch/nn/parallel/"),
    TorchFrame(Mark.WAITS_FOR_WORKER, "torch/utils/data/dataloader.py", ("_next_data", "_get_data", "_try_get_data")),
    TorchFrame(Mark.READS_SAMPLES, "torch/utils/data/_utils/fetch.py", ("fetch",)),
)


def kind_of_frame(file: str, function: str) -> FrameKind | Mark | None:
    """Returns the kind of a frame, if it is a known one of torch."""
    return next((frame.kind for frame in FRAMES if frame.fits(file, function)), None)
