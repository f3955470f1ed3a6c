"""Writes checkpoints on a thread while training continues.

    main thread   | step | save: check, copy | step | step | step | save: wait, check, copy | step
    writer                                   | wait for copies, write, commit, prune |      | write ...

At most one checkpoint is being written. An error in it is raised by the next call, on the thread that trains.
"""

from __future__ import annotations

import atexit
import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lockstep.checkpoint.sharded import PreparedShards
from lockstep.checkpoint.state import CheckpointState
from lockstep.checkpoint.writer import PreparedCheckpoint
from lockstep.runtime.devices import current_stream, gpu, is_gpu
from lockstep.runtime.output import end_with
from lockstep.runtime.stop_signals import CriticalThread


def snapshot(state: CheckpointState) -> tuple[CheckpointState, list[torch.cuda.Event]]:
    """Copies all tensors of a state to the host, in row order; the copy is whole once each GPU's event has passed.

    What lies on a GPU goes to page-locked memory without holding up the host: the copies stand in the queue of the
    current stream, so the optimizer's next update comes after them.
    """
    copied = dataclasses.replace(state, model=_copies(state.model), optimizer=_copies(state.optimizer))
    tensors = [*state.model.values(), *state.optimizer.values()]
    devices = sorted({t.device.index for t in tensors if is_gpu(t.device)})
    return copied, [current_stream(gpu(device)).record_event() for device in devices]


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _copy(tensor.detach()) for name, tensor in tensors.items()}


def _copy(tensor: Tensor) -> Tensor:
    if not is_gpu(tensor.device):
        return tensor.to("cpu").clone(memory_format=torch.contiguous_format)
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)


class BackgroundWriter:
    """Writes one checkpoint at a time; one process of the run has one."""

    def __init__(self) -> None:
        self._thread: _Writing | None = None

    @property
    def busy(self) -> bool:
        """True while a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def write(self, prepared: PreparedCheckpoint | PreparedShards, *, owned: bool = False) -> Path:
        """Begins to write a checkpoint, and returns the folder that it will have once it is whole.

        Waits for the previous checkpoint. The state is copied, unless it is ``owned``: nobody changes it afterwards.
        """
        self.finish()
        state, copied = (prepared.state, []) if owned else snapshot(prepared.state)
        self._thread = _Writing(dataclasses.replace(prepared, state=state), copied)
        atexit.register(self._finish_at_exit)
        self._thread.start()
        return prepared.path

    def check(self) -> None:
        """Raises the error of the last checkpoint, once; never waits for one that is being written."""
        if not self.busy:
            self.finish()

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, if any, and raises its error, once."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join()
        atexit.unregister(self._finish_at_exit)
        if thread.error is not None:
            raise thread.error

    def _finish_at_exit(self) -> None:
        """Ends the process with an error code if the last checkpoint failed and nobody asked for its result."""
        try:
            self.finish()
        except Exception as error:
            end_with(error)


class _Writing(CriticalThread):
    """The thread of one checkpoint."""

    def __init__(self, prepared: PreparedCheckpoint | PreparedShards, copied: list[torch.cuda.Event]) -> None:
        super().__init__(name=f"checkpoint of step {prepared.step}")
        self._prepared, self._copied = prepared, copied
        self.error: Exception | None = None
        """The error, once the thread has ended."""

    def run(self) -> None:
        """Writes the checkpoint, then frees the copy."""
        try:
            for event in self._copied:
                event.synchronize()
            self._prepared.write()
        except Exception as error:
            self.error = error
        finally:
            del self._prepared
