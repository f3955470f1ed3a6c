"""Writes one checkpoint by all the processes that hold rows of it, each its own files.

    rank 0   refuse what cannot be written | make a hidden folder |      | write, digest |       | manifest, rename |
    rank r   refuse ...                    |                      | see  | write, digest |       |                  |
                                           ^ exchange             ^      ^               ^ exchange                 ^

An error on one rank is raised on all ranks, and nothing is committed. Exchanges are those of one
thread at a time, over a process group that nothing else uses, so training continues meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.manifest import FileEntry, file_names
from lockstep.checkpoint.state import CheckpointState
from lockstep.checkpoint.writer import PreparedCheckpoint, not_written, prepare, require_dense, write_tensors
from lockstep.core.atomic import folder_aside
from lockstep.errors import CheckpointError, LockstepError

Exchange = Callable[[Any], list[Any]]
"""Gives the values of all ranks, by rank, from this rank's, which survives JSON. Collective."""


@dataclass(frozen=True, kw_only=True)
class PreparedShards:
    """A checkpoint whose folder is ready for all ranks; nothing of it is written yet."""

    state: CheckpointState
    """This rank's rows."""
    path: Path
    """The checkpoint's folder once it is committed."""
    aside: Path
    """The hidden folder."""
    step: int
    names: tuple[str, str]
    """Of this rank's files."""
    exchange: Exchange
    whole: PreparedCheckpoint | None
    """The commit, on rank 0; None elsewhere."""
    opened: ExitStack
    """Removes the hidden folder, on rank 0."""

    def write(self) -> Path:
        """Writes this rank's files, commits once all have, and returns the checkpoint's folder. Collective.

        Raises:
            CheckpointError: some rank could not; raised on all, and nothing new is left.
        """
        try:
            with self.opened:
                files = _agreed(self.exchange, self._write_files)
                _agreed(self.exchange, lambda: self._commit(files))
        except RuntimeError as error:
            raise CheckpointError(
                f"The checkpoint of step {self.step} was not committed, because a rank left while it was written: "
                f"{str(error).partition(chr(10))[0]}"
            ) from error
        return self.path

    def _write_files(self) -> dict[str, list[Any]]:
        with not_written(self.step, self.path.parent):
            files = write_tensors(self.aside, self.state, self.names)
        return {name: [entry.size, entry.sha256] for name, entry in files.items()}

    def _commit(self, files: list[dict[str, list[Any]]]) -> None:
        if self.whole is None:
            return
        with not_written(self.step, self.path.parent):
            self.whole.commit(self.aside, {name: FileEntry(*entry) for each in files for name, entry in each.items()})
        self.whole.prune()


def prepare_sharded(
    directory: Path | str,
    state: CheckpointState,
    *,
    step: int,
    rank: int,
    ranks: int,
    exchange: Exchange,
    keep: int | None = None,
) -> PreparedShards | None:
    """Checks that the state can be written and makes the folder. Collective.

    Args:
        directory: the run folder; made if it does not exist.
        state: this rank's rows of each tensor, which make up the whole in the order of the ranks; the record is rank
            0's.
        step: as for ``checkpoint.write``.
        rank: number of this process.
        ranks: how many there are.
        exchange: over a process group that nothing else uses.
        keep: as for ``checkpoint.write``.

    Returns:
        None on all ranks where some do not see the folder that rank 0 made: their hosts share no file system.

    Raises:
        ConfigError: the state holds something that a checkpoint cannot.
        CheckpointError: the folder cannot be written or has no room, or another rank refused its rows.
    """
    directory = Path(directory)
    sizes = _agreed(exchange, lambda: _size(state))
    opened, prepared = ExitStack(), list[PreparedCheckpoint]()

    def begin() -> list[str]:
        prepared.append(prepare(directory, state, step=step, keep=keep, tensor_bytes=sum(sizes)))
        with not_written(step, directory):
            aside = opened.enter_context(folder_aside(prepared[0].path))
        return [prepared[0].path.name, aside.name]

    path, aside = (directory / name for name in _agreed(exchange, begin if rank == 0 else list)[0])
    if not all(_agreed(exchange, aside.is_dir)):
        opened.close()
        return None
    return PreparedShards(
        state=state,
        path=path,
        aside=aside,
        step=step,
        names=file_names(rank, ranks),
        exchange=exchange,
        whole=prepared[0] if rank == 0 else None,
        opened=opened,
    )


def _size(state: CheckpointState) -> int:
    require_dense({**state.model, **state.optimizer})
    return state.tensor_bytes


def _agreed(exchange: Exchange, action: Callable[[], Any]) -> list[Any]:
    """Runs ``action`` and returns its result from each rank; an error on one rank is raised on all. Collective."""
    value, failure = None, None
    try:
        value = action()
    except LockstepError as error:
        failure = error
    answers = exchange([value, None if failure is None else str(failure)])
    if failure is not None:
        raise failure
    for rank, (_, problem) in enumerate(answers):
        if problem is not None:
            raise CheckpointError(f"Rank {rank}: {problem}")
    return [value for value, _ in answers]
