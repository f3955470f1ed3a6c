"""Puts checkpoints of a run on the disk: by the main process, or by every process that holds rows of the model."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep import checkpoint
from lockstep.checkpoint.sharded import prepare_sharded
from lockstep.collectives import gather_json, let_go_of_groups
from lockstep.run.options import RunOptions
from lockstep.run.saving import Saved
from lockstep.world import World

logger = logging.getLogger(__name__)

_PATIENCE = timedelta(hours=2)
"""How long the quickest rank may wait for the slowest disk."""


class Writer:
    """Writes the checkpoints of one run, one at a time.

    Args:
        options: the folder, how many to keep, and whether training goes on meanwhile.
        world: who this process is.
    """

    def __init__(self, options: RunOptions, world: World) -> None:
        self._options, self._world = options, world
        self._background = checkpoint.BackgroundWriter()
        self._group: dist.ProcessGroup | None = None

    def join(self, saved: Saved) -> None:
        """Opens a process group for what the writers tell each other, where every process writes. Collective."""
        several = saved.group is not None and self._options.directory is not None
        if several and saved.strategy.own_rows() is not None:
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is on its way."""
        return self._background.busy

    def check(self) -> None:
        """Raises what went wrong with the last checkpoint, once; never waits for one on its way."""
        self._background.check()

    def finish(self) -> None:
        """Waits for the checkpoint on its way, if there is one, and raises what went wrong with it, once."""
        self._background.finish()

    def release(self) -> None:
        """Lets go of the process group."""
        let_go_of_groups(self)

    def write(self, directory: Path | str, saved: Saved, fingerprint: str, *, wait: bool) -> Path | None:
        """Writes the state as it stands. Collective.

        Args:
            directory: the run folder.
            saved: the run.
            fingerprint: of the model as it stands.
            wait: come back only when the checkpoint is on the disk.

        Returns:
            The checkpoint's folder, on the main process; None on the others.
        """
        is_main, wait = self._world.is_main, wait or not self._options.save_in_background
        if not is_main and saved.strategy.replicated:
            return None
        self.finish()
        if self._group is not None and (path := self._write_rows(directory, saved, fingerprint, wait)):
            return path if is_main else None
        state = saved.capture(fingerprint, keep=is_main)
        if not is_main:
            return None
        step, keep, owned = saved.position.step, self._options.keep, not saved.strategy.replicated
        if wait:
            return checkpoint.write(directory, state, step=step, keep=keep)
        return self._background.write(directory, state, step=step, keep=keep, owned=owned)

    def _write_rows(self, directory: Path | str, saved: Saved, fingerprint: str, wait: bool) -> Path | None:
        """As ``write``, by all ranks; None, from then on, where they do not see one folder."""
        rows, rank = saved.strategy.own_rows(), self._world.rank
        assert rows is not None
        order = prepare_sharded(
            directory,
            saved.capture_rows(fingerprint, rows, first=rank == 0),
            step=saved.position.step,
            rank=rank,
            ranks=self._world.world_size,
            exchange=self._exchange,
            keep=self._options.keep,
        )
        if order is None:
            self.release()
            if rank == 0:
                logger.warning(
                    "The hosts do not share the folder %s, so checkpoints are gathered and written by rank 0. To write "
                    "them by all ranks, and to resume on all hosts, give a folder that all see.",
                    directory,
                )
            return None
        return order.carry_out() if wait else self._background.carry_out(order)

    def _exchange(self, value: object) -> list[object]:
        assert self._group is not None
        return gather_json(value, self._group, torch.device("cpu"))
