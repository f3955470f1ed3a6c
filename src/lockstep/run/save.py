"""Writes the checkpoints of a run, also where it is asked to stop, and takes weights for all ranks.

The main process writes; where every process holds rows of the model, each writes its own. ``resumption`` loads them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import checkpoint
from lockstep.checkpoint.sharded import prepare_sharded
from lockstep.config.checks import file_path
from lockstep.config.options import RunOptions
from lockstep.core.atomic import sole_use, told_holder
from lockstep.core.world import World
from lockstep.distributed.collectives import broadcast_tensors, drop_process_groups, exchange_device, gather_json
from lockstep.distributed.process_group import open_group
from lockstep.errors import CheckpointError, ConfigError
from lockstep.models.weights import compare
from lockstep.run.checks.calls import gather_agreed
from lockstep.run.live_variables import changed_and_read_after_loops
from lockstep.run.prepare import PreparedModel
from lockstep.run.resumption import ENDED_FOLDERS, note
from lockstep.run.state import RunState
from lockstep.runtime.control import Stopped, StopReason
from lockstep.runtime.stop_signals import wait_for_critical_threads
from lockstep.strategies import IndependentStrategy, Strategy
from lockstep.text import shorten

if TYPE_CHECKING:
    from lockstep.run.run import Run

logger = logging.getLogger(__name__)

_LOCK = "writer.lock"
_CLAIMED = set[Path]()
"""The folders that runs of this process write to."""
_TIMEOUT = timedelta(hours=2)
"""The time that the quickest rank waits for the slowest disk, at most."""


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time."""

    def __init__(self, options: RunOptions, world: World) -> None:
        self._options, self._world = options, world
        self.background = checkpoint.BackgroundWriter()
        self._group: dist.ProcessGroup | None = None
        self._claims: dict[Path, tuple[ExitStack, int]] = {}
        """By run folder: its lock, and the number by which the disk knows the lock's file."""

    def open_group(self, strategy: Strategy) -> None:
        """Opens a process group for writers, where every process is one. Collective."""
        several = strategy.all_ranks is not None and self._options.directory is not None
        if several and strategy.own_rows() is not None:
            self._group = open_group(backend="gloo", timeout=_TIMEOUT)

    def release(self) -> None:
        """Waits for what is being written, and drops the process group."""
        self.background.finish()
        drop_process_groups(self)
        for folder in [*self._claims]:
            self._give_up(folder)
            ENDED_FOLDERS.add(folder)

    def _give_up(self, folder: Path) -> None:
        claim, _ = self._claims.pop(folder)
        _CLAIMED.discard(folder)
        claim.close()

    def _claim(self, directory: Path) -> None:
        """Keeps other processes from writing to a folder from now on; ``CheckpointError`` where one does so."""
        folder, claim = directory.resolve(), ExitStack()
        if folder in self._claims and self._claims[folder][1] != _inode(folder / _LOCK):
            logger.warning(
                "Since the last save of this run, the file %s was removed, or its whole folder was removed or moved. "
                "The run goes on and writes its next checkpoints there.",
                directory / _LOCK,
            )
            self._give_up(folder)
        if folder in _CLAIMED:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            claim.enter_context(sole_use(folder / _LOCK))
        except BlockingIOError as error:
            raise CheckpointError(
                f"Another run writes its checkpoints to {directory} and is still going on{told_holder(error)}. Each "
                "would resume from those of the other, and delete them. Nothing was written: end one of them, or give "
                "it another directory=."
            ) from None
        except OSError:
            return  # what is wrong with the folder is said where the checkpoint is written
        self._claims[folder] = claim, _inode(folder / _LOCK)
        _CLAIMED.add(folder)

    def write(self, directory: Path | str, run: RunState, fingerprint: str, *, wait: bool) -> Path | None:
        """Writes the state as it stands to the run folder, in the background unless told to ``wait``. Collective.

        Returns:
            The checkpoint's folder, on the main process; None on the others.
        """
        if problem := file_path(directory):
            raise ConfigError(f"The directory of run.save {problem}")
        directory = require_readable(Path(directory).expanduser())
        is_main, wait = self._world.is_main, wait or not self._options.save_in_background
        if not is_main and run.strategy.replicated:
            return None
        self.background.finish()
        if is_main:
            self._claim(directory)
        if self._group is not None and (path := self._write_rows(directory, run, fingerprint, wait)):
            return path if is_main else None
        state = run.capture(fingerprint, keep=is_main)
        if not is_main:
            return None
        prepared = checkpoint.prepare(directory, state, step=run.position.step, keep=self._options.keep)
        if wait:
            return prepared.write()
        return self.background.write(prepared, owned=not run.strategy.replicated)

    def _write_rows(self, directory: Path | str, run: RunState, fingerprint: str, wait: bool) -> Path | None:
        """As ``write``, by all ranks; None, from then on, where they do not see one folder."""
        rows, rank, group = run.strategy.own_rows(), self._world.rank, self._group
        assert rows is not None and group is not None
        prepared = prepare_sharded(
            directory,
            run.capture(fingerprint, keep=rank == 0, rows=rows),
            step=run.position.step,
            rank=rank,
            ranks=self._world.world_size,
            exchange=lambda value: gather_json(value, group, torch.device("cpu")),
            keep=self._options.keep,
        )
        if prepared is None:
            self.release()
            if rank == 0:
                logger.warning(
                    "The hosts do not share the folder %s, so checkpoints are gathered and written by rank 0. To write "
                    "them by all ranks, and to resume on all hosts, give a folder that all see.",
                    directory,
                )
            return None
        return prepared.write() if wait else self.background.write(prepared)


def _inode(file: Path) -> int:
    """The number by which the disk knows a file; 0 where there is none."""
    try:
        return file.stat().st_ino
    except OSError:
        return 0


def clean_up(directory: Path | str | None) -> None:
    """Waits for what this process still writes, and removes from the run folder what killed ones have left."""
    wait_for_critical_threads()
    if directory is None:
        return
    directory = Path(directory)
    checkpoint.clean(directory)
    # A run that only evaluates needs no checkpoint.
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        found = "may not be written to" if there.is_dir() else "is not a folder"
        logger.warning(
            "run.save() will fail: the run folder is %s, and %s %s. Give another directory=.",
            *(directory, there, found),
        )


def require_readable(directory: Path) -> Path:
    """The folder as it is given; ``ConfigError`` where no checkpoint in it could be read again."""
    path = str(directory.absolute())
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"The path of the run folder, {path!r}, is not in UTF-8, and safetensors reads no file there. Give another "
            "directory=."
        ) from None
    return directory


def stop_after_step(run: Run, reason: StopReason) -> None:
    """Ends this process because it was asked to, as ``save_and_stop`` does. Collective.

    After the last step of an epoch, what follows may read what the steps have set, as the loss that is printed: a
    resumed run would not have it. Then a checkpoint is written, and the run stops at the end of the epoch's body.
    """
    loop = run._loop
    is_read = loop.in_epochs and loop.is_after_last_step and bool(changed_and_read_after_loops())
    if isinstance(run.strategy, IndependentStrategy) or not any(run.strategy.gather_records(is_read)):
        save_and_stop(run, reason)
    if run.options.directory is not None:
        run.save(wait=True)
        run._resumption.forget()
    loop.stops_at_end = True


def end_epoch(run: Run, reason: StopReason) -> None:
    """Ends the body of an epoch, and this process if that was waited for and another epoch follows. Collective."""
    run._resumption.require_nothing_since("epoch")
    if not run._loop.stops_at_end:
        return
    if run._loop.next_epoch is not None:
        save_and_stop(run, reason)
    if run.options.directory is not None:
        run.save(wait=True)


def save_and_stop(run: Run, reason: StopReason) -> NoReturn:
    """Saves where there is a run folder, and ends this process because it was asked to. Collective."""
    if run.options.directory is not None and (path := run.save(wait=True)) is not None:
        note(
            "Saved in %s. Continue with the same command and --resume auto, in a script with resume='auto'.",
            path,
        )
    raise Stopped(reason) from None


def weights_of_main(
    weights: Mapping[str, Any], model: PreparedModel, group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, Tensor]:
    """Rank 0's weights on every rank, under all names; ``ConfigError`` where they are not of this model. Collective."""
    wanted, is_main = model.tensors, group is None or dist.get_rank(group) == 0
    problem, given = "", dict[str, Any]()
    if is_main and not isinstance(weights, Mapping):
        problem = f"  a {type(weights).__name__} instead of tensors by name"
    elif is_main:
        given = {name: each for name, each in weights.items() if name not in model.aliases}
        tensors = {name for name, each in given.items() if isinstance(each, Tensor) and not each.is_meta}
        if odd := [name for name in given if name not in tensors or given[name].layout is not torch.strided]:
            problem = f"  no dense tensors with values ({len(odd)}): {shorten(odd, 5)}"
        elif differences := compare(given, wanted):
            problem = differences.describe()
    if problem := gather_agreed(problem, group, device)[0]:
        raise ConfigError(
            f"run.load_state_dict was given weights that are not of the model:\n{problem}\nGive what run.state_dict() "
            "gave on the main process, or load weights of another model before run.prepare."
        )
    if group is None:
        found = {name: given[name].detach() for name in wanted}
    else:
        found, at = {}, exchange_device(group, device)
        for name, spec in wanted.items():
            found[name] = torch.empty(spec.shape, dtype=spec.dtype, device=at)
            if is_main:
                found[name].copy_(given[name].detach())
            broadcast_tensors([found[name]], dist.get_process_group_ranks(group)[0], group)
    return found | {alias: found[name] for alias, name in model.aliases.items()}
