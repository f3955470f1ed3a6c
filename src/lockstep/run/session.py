"""The process of a run: its place in the world, its device, its global random generators, and the process group."""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lockstep.core.world import World, threads_of_environment
from lockstep.distributed.process_group import open_process_group
from lockstep.errors import ConfigError, LockstepError
from lockstep.runtime import stop_signals
from lockstep.runtime.devices import choose_device, collectives_for
from lockstep.runtime.error_record import about_own_backward
from lockstep.runtime.events import StepEvents
from lockstep.runtime.heartbeat import Heartbeat, Membership
from lockstep.runtime.torch_internals import LOST_PEER

logger = logging.getLogger(__name__)
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Numbers of two settings of glibc's ``mallopt``, from ``malloc.h``."""
_MOST_MAPPED = 1 << 16
"""Blocks that glibc maps on their own at a time, as it does by default."""
_SMALL_SEED = 2**32
"""Seeds that people choose are smaller. A process that nobody seeded has 53 random bits, and Lockstep plants 63."""


def keep_freed_memory() -> bool:
    """Asks glibc to hold on to what this process frees, up to its end; False beside another C library."""
    # No block is mapped on its own, which would be unmapped when freed; and the end of the heap is never cut off.
    return _set_malloc(_M_MMAP_MAX, 0) and _set_malloc(_M_TRIM_THRESHOLD, -1)


@contextmanager
def returning_freed_memory(device: torch.device) -> Iterator[None]:
    """A context in which large blocks are given back when they are freed, so that they leave no holes in the heap.

    For large tensors one after the other, of each of which a part stays.
    """
    keeps = device.type == "cpu" and _set_malloc(_M_MMAP_MAX, _MOST_MAPPED)
    yield
    if keeps:
        _set_malloc(_M_MMAP_MAX, 0)


def _set_malloc(setting: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(setting, value))
    except AttributeError:  # musl has no such settings
        return False


_left_by_runs = set[int]()
"""The seeds of torch at the ends of the runs of this process, which follow from those of the runs."""


def seed_unless_seeded(seed: int) -> WeakSet[nn.Module]:
    """Seeds torch, NumPy and ``random``, unless the script has seeded torch itself.

    Returns:
        The modules with parameters that exist already, where torch has drawn numbers that no seed decides.
    """
    built: WeakSet[nn.Module] = WeakSet()
    generator = torch.default_generator
    if generator.initial_seed() < _SMALL_SEED:
        return built
    untouched = torch.Generator().manual_seed(generator.initial_seed()).get_state()
    is_decided = generator.initial_seed() in _left_by_runs or torch.equal(generator.get_state(), untouched)
    if not is_decided:
        # The type is asked: isinstance() may run code of objects that import themselves when looked at.
        modules = (each for each in gc.get_objects() if issubclass(type(each), nn.Module))
        built.update(each for each in modules if vars(each).get("_parameters"))
    torch.manual_seed(seed)
    np.random.seed(seed % _SMALL_SEED)
    random.seed(seed)
    return built


def warn_if_unseeded(model: nn.Module, unseeded: WeakSet[nn.Module]) -> None:
    """Warns of a model that is made of modules ``seed_unless_seeded`` has returned."""
    if not unseeded.isdisjoint(model.modules()):
        logger.warning(
            "The model was built before lockstep.init, and no seed decided its random numbers: the next run will begin "
            "with other weights, unless they are all loaded from a file. Build the model after "
            "lockstep.init(seed=...), or call torch.manual_seed(0) first."
        )


def warn_if_begun(stepped: Sequence[str]) -> None:
    """Warns of optimizers and schedulers, by name, that have taken steps in a run that begins."""
    if stepped:
        logger.warning(
            "%s had taken steps before run.prepare, and this run begins at epoch 0 and step 0. From them follow "
            "the order of the samples and what dropout draws. To continue a run write lockstep.init(directory=..., "
            "resume='auto') and run.save(), which keep its place.",
            " and ".join(stepped),
        )


def world_of_process() -> World:
    """The world as the environment has it; ``ConfigError`` where torch's process group has more processes."""
    world = World.from_environment()
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > world.world_size == 1:
        raise ConfigError(
            f"torch's process group has {dist.get_world_size()} processes, and lockstep.init knows of 1: each would "
            "train by itself. It reads RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE in the environment: set them "
            "in the function that mp.spawn starts, or start the script with lockstep run or torchrun."
        )
    return world


class RunSession:
    """Opens the process group for the life of the process, or joins the one that is open.

    Args:
        threads: CPU threads of this process; None for what the launcher set, or 1.
        timeout: seconds after which a collective fails.
        devices: how many consecutive GPUs each process uses.
    """

    def __init__(self, world: World, threads: int | None, timeout: float, devices: int = 1) -> None:
        self.world = world
        self.device = choose_device(world, devices)
        self.threads = threads if threads is not None else threads_of_environment(os.environ)
        torch.set_num_threads(self.threads)
        if hasattr(torch._C, "_jit_set_fusion_strategy"):  # the public function warns that it is deprecated
            # By default torch.jit compiles functions again at later calls: bits would depend on the calls before.
            torch._C._jit_set_fusion_strategy([])
        if self.device.type == "cpu":
            keep_freed_memory()
        self.events = StepEvents()
        """The callbacks of the run."""
        self.heartbeat = Heartbeat.open(world, self.events)
        if threading.current_thread() is threading.main_thread():
            if world.launcher in ("torchrun", "slurm", "mpi"):
                stop_signals.install(self.heartbeat.control, alone=True)
            if world.launcher != "lockstep" and getattr(sys.excepthook, "func", None) is not _explain:
                sys.excepthook = partial(_explain, world.rank, sys.excepthook)
        self._stack = ExitStack()
        if world.world_size > 1 and not dist.is_initialized():
            backend = collectives_for(self.device)
            self._stack.enter_context(open_process_group(world, backend=backend, timeout=timeout))
            atexit.register(self._close_at_exit)
        self.group = dist.group.WORLD if world.world_size > 1 else None
        self.before_close: Callable[[], None] | None = None
        """Called before the group is closed."""
        self.is_closed = False

    def leave_process_group(self, *, is_expendable: bool) -> None:
        """Leaves the process group, if this session opened it, and continues alone. Collective.

        Args:
            is_expendable: whether the run continues without this process if it is killed.
        """
        self.group = None
        gc.collect()
        self._stack.close()
        if is_expendable:
            self.heartbeat.set_membership(Membership.INDEPENDENT)

    def require_open(self) -> None:
        """Raises ``ConfigError`` after ``close``: a process alone would continue with its own part of the work."""
        if self.is_closed:
            raise ConfigError("The run was ended by run.close(). Call that last, or begin another: lockstep.init(...).")

    def close(self) -> None:
        """Leaves the process group in agreement with the other ranks. Collective."""
        self.is_closed = True
        _left_by_runs.add(torch.default_generator.initial_seed())
        atexit.unregister(self._close_at_exit)
        if self.before_close is not None:
            self.before_close()
        self.group = None
        gc.collect()  # cycles hold on to groups too
        self._stack.close()

    def _close_at_exit(self) -> None:
        """A rank that ends with an uncaught error must not wait for the others."""
        if not hasattr(sys, "last_value"):
            try:
                self.close()
            except RuntimeError as error:
                if not LOST_PEER.is_in(str(error)):
                    raise
                logger.error(_LOST_PEER, self.world.rank)


_LOST_PEER = "Rank %d lost the connection to a rank that was gone. The error of that rank is the cause."


def _explain(
    rank: int,
    former: Callable[..., Any],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Prints an uncaught error; of a lost connection a line, since without a supervisor all ranks share a terminal."""
    if about := about_own_backward(error, None):
        error.add_note(about)
    if isinstance(error, RuntimeError) and not isinstance(error, LockstepError) and LOST_PEER.is_in(str(error)):
        logger.error(_LOST_PEER, rank)
    else:
        former(kind, error, trace)
