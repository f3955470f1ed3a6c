"""Writes checkpoints on a thread while training goes on.

    main thread   | step | save: check, copy | step | step | step | save: wait, check, copy | step
    writer                                   | wait for copies, write, commit, prune |      | write ...

At most one is on its way. What goes wrong with it is raised by the next call, on the thread that trains.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
from collections.abc import Collection
from pathlib import Path

from lockstep.checkpoint.sharded import ShardedOrder
from lockstep.checkpoint.snapshot import Snapshot, snapshot
from lockstep.checkpoint.state import CheckpointState
from lockstep.checkpoint.writer import Order, prepare
from lockstep.errors import EXIT_DATA, LockstepError
from lockstep.launch.unfinished import Unfinished


class BackgroundWriter:
    """Writes one checkpoint at a time; one process of the run has one."""

    def __init__(self) -> None:
        self._thread: _Writing | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is on its way."""
        return self._thread is not None and self._thread.is_alive()

    def write(
        self,
        directory: Path | str,
        state: CheckpointState,
        *,
        step: int,
        keep: int | None = None,
        protect: Collection[int] = (),
        owned: bool = False,
    ) -> Path:
        """Begins to write ``state`` and returns the folder that the checkpoint will have once it is whole.

        What can be known to fail fails at once, as with ``checkpoint.write``; waits for the one before.

        Args:
            directory: as for ``checkpoint.write``.
            state: what to write; copied, so that it may change afterwards.
            step: as for ``checkpoint.write``.
            keep: as for ``checkpoint.write``.
            protect: as for ``checkpoint.write``.
            owned: whether the tensors belong to the caller alone and will not change, so that no copy is needed.
        """
        self.finish()
        return self.carry_out(prepare(directory, state, step=step, keep=keep, protect=protect), owned=owned)

    def carry_out(self, order: Order | ShardedOrder, *, owned: bool = False) -> Path:
        """Begins to carry out a prepared order; as ``write``, which prepares one."""
        self.finish()
        self._thread = _Writing(order, Snapshot(order.state) if owned else snapshot(order.state))
        atexit.register(self._finish_at_exit)
        self._thread.start()
        return order.path

    def check(self) -> None:
        """Raises what went wrong with the last checkpoint, once; never waits for one on its way."""
        if not self.busy:
            self.finish()

    def finish(self) -> None:
        """Waits for the checkpoint on its way, if there is one, and raises what went wrong with it, once."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join()
        atexit.unregister(self._finish_at_exit)
        if thread.error is not None:
            raise thread.error

    def _finish_at_exit(self) -> None:
        """A program that ends without a last look must not seem to have saved what it has not."""
        try:
            self.finish()
        except Exception as error:
            code = error.exit_code if isinstance(error, LockstepError) else EXIT_DATA
            print(f"lockstep: {error}", file=sys.stderr)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)


class _Writing(Unfinished):
    """The thread of one checkpoint."""

    def __init__(self, order: Order | ShardedOrder, taken: Snapshot) -> None:
        super().__init__(name=f"checkpoint of step {order.step}")
        self._order, self._taken = order, taken
        self.error: Exception | None = None
        """What went wrong, once the thread has ended."""

    def run(self) -> None:
        """Writes; gives the copy's memory back."""
        try:
            dataclasses.replace(self._order, state=self._taken.wait()).carry_out()
        except Exception as error:
            self.error = error
        finally:
            del self._order, self._taken
