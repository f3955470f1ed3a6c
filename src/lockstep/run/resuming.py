"""Finds the checkpoint that a run goes on from, and takes it up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from lockstep import checkpoint
from lockstep.checkpoint import CheckpointState
from lockstep.errors import CheckpointError, LockstepError
from lockstep.launch.unfinished import wait_for_unfinished
from lockstep.run.options import RunOptions
from lockstep.run.saving import Saved

logger = logging.getLogger(__name__)


def settle(directory: Path | str | None) -> None:
    """Waits for what this process still writes, and removes from the run folder what killed ones have left."""
    wait_for_unfinished()
    if directory is not None:
        checkpoint.clean(Path(directory))


def take_up(
    saved: Saved, options: RunOptions, fingerprint: Callable[[], str], *, restarted: bool = False
) -> bool:
    """Resumes as the options say; whether there was something to resume.

    Args:
        saved: the run.
        options: what to resume, and under which conditions.
        fingerprint: gives the run's.
        restarted: the launcher has started the same run before, so its own newest checkpoint comes first.
    """
    found = _own_newest(options, saved.run_id) if restarted and options.resume != "auto" else None
    if found is None and options.resume:
        found = find(options.resume, options.directory)
    if found is None:
        return False
    path, state = found
    written, position = _restore(saved, path, state, options.force_context), saved.position
    if not position.inside and position.done:
        position.epoch, position.done = position.epoch + 1, 0
    if fingerprint() != written:
        raise CheckpointError(f"{path} loaded, but its parameters do not have the fingerprint it states.")
    logger.info("Resumed from %s: epoch %d, step %d.", path, position.epoch + 1, position.step)
    return True


def _restore(saved: Saved, path: Path, state: CheckpointState, force_context: bool) -> str:
    """As ``Saved.restore``; a record that passes its checksums and is not one of a run is refused as a whole."""
    try:
        return saved.restore(state, force_context)
    except LockstepError:
        raise
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        AssertionError,
    ) as error:
        raise CheckpointError(
            f"{path} holds no state of a run that could be taken up ({type(error).__name__}: {str(error)[:200]}). Use "
            "another checkpoint."
        ) from error


def find(resume: str, directory: Path | str | None) -> tuple[Path, CheckpointState] | None:
    """The checkpoint that ``resume`` names ("auto": the newest sound one of the run folder, if any)."""
    if resume == "auto":
        newest = checkpoint.read_newest(Path(directory)) if directory is not None else None
        return (newest.path, newest.state) if newest is not None else None
    return Path(resume), checkpoint.read(resume)


def _own_newest(options: RunOptions, run_id: str) -> tuple[Path, CheckpointState] | None:
    """The newest sound checkpoint that this very run has written; those of earlier runs in the folder do not count."""
    if options.directory is None or not run_id:
        return None
    own = checkpoint.read_newest(Path(options.directory), written_by=run_id)
    return (own.path, own.state) if own is not None else None
