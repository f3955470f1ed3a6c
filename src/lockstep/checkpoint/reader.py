"""Reads a checkpoint after every byte of it has been verified; nothing in it can run code.

A checkpoint that this process is still writing in the background is waited for first.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from lockstep.checkpoint.folder import committed_or_linked, step_of
from lockstep.checkpoint.manifest import MANIFEST, RECORD, Manifest, decode, load_tensors, tensor_files
from lockstep.checkpoint.state import CheckpointState
from lockstep.errors import CheckpointError
from lockstep.runtime.stop_signals import wait_for_critical_threads

logger = logging.getLogger(__name__)


class Restored(NamedTuple):
    """A checkpoint that was read, and its folder."""

    path: Path
    state: CheckpointState


def verify(path: Path | str) -> Manifest:
    """Compares every byte of a checkpoint with its manifest; ``CheckpointError`` names what differs."""
    wait_for_critical_threads()
    path = Path(path)
    if not path.is_dir() or (step_of(path) is None and not (path / MANIFEST).exists()):
        raise CheckpointError(
            f"There is no checkpoint at {path}. Give the folder of one, such as RUN/step-00000450, or a run folder."
        )
    manifest = Manifest.read(path)
    manifest.verify(path)
    named = step_of(path)
    if named is not None and named[0] != manifest.step:
        raise CheckpointError(f"{path} holds step {manifest.step}: it was renamed. Give it the name of its step again.")
    return manifest


def read(path: Path | str) -> CheckpointState:
    """Reads one checkpoint to the CPU, on any number of processes; each that calls it gets the whole state."""
    path = Path(path)
    files = tensor_files(verify(path).files)
    assert files is not None  # the manifest was verified
    try:
        model, optimizer = (load_tensors([path / name for name in names]) for names in files)
        record = json.loads((path / RECORD).read_bytes())
        progress, aliases, records = decode(record["progress"]), record["aliases"], record["optimizers"]
        sound = all(isinstance(part, dict) for part in (progress, aliases, records))
        sound = sound and set(aliases.values()) <= set(model)
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} is not a checkpoint that Lockstep wrote: {error}. Use another one.") from error
    if not sound:
        raise CheckpointError(f"{path / RECORD} does not hold a progress record. Use another checkpoint.")
    return CheckpointState(model, optimizer, progress, aliases, records)


def read_progress(path: Path | str) -> dict[str, Any]:
    """The numbers and texts of one checkpoint, without its tensors; empty where they cannot be read."""
    try:
        return dict(decode(json.loads((Path(path) / RECORD).read_bytes())["progress"]))
    except (ValueError, KeyError, TypeError, RecursionError, OSError, CheckpointError):
        return {}


def read_newest(directory: Path | str, *, written_by: str = "") -> Restored | None:
    """Reads the newest checkpoint of a run folder that is sound; None if there is none.

    A broken one, or a link in place of one, is skipped with a warning. ``CheckpointError`` lists them where all
    are: starting again without a word would throw the run's work away.

    Args:
        directory: the run folder.
        written_by: id of the run whose checkpoints count; empty for those of any.
    """
    wait_for_critical_threads()
    refused: list[str] = []
    for path in reversed(committed_or_linked(Path(directory))):
        try:
            if path.is_symlink():
                raise CheckpointError(
                    f"{path} is a link, and was not read. Put the folder itself there, or name it: "
                    f"resume={str(path)!r}."
                )
            state = read(path)
        except CheckpointError as error:
            logger.warning("Checkpoint skipped: %s", error)
            refused.append(str(error))
        else:
            if not written_by or state.progress.get("run") == written_by:
                return Restored(path, state)
    if not refused:
        return None
    raise CheckpointError(
        f"No checkpoint in {directory} can be used:\n"
        + "\n".join(f"  {reason}" for reason in refused)
        + "\nStart in another folder to train from the beginning."
    )
