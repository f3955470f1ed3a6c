"""Reads a checkpoint after every byte of it has been verified; nothing in it can run code.

A checkpoint that this process is still writing in the background is waited for first.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils._pytree import tree_map

from lockstep.checkpoint.folder import committed_or_linked, step_of
from lockstep.checkpoint.manifest import MANIFEST, RECORD, Manifest, tensor_files
from lockstep.checkpoint.record import decode
from lockstep.checkpoint.state import CheckpointState
from lockstep.errors import CheckpointError
from lockstep.runtime.stop_signals import wait_for_critical_threads
from lockstep.text import grouped

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


def load_tensors(paths: Iterable[Path]) -> dict[str, Tensor]:
    """The tensors of some files, on the CPU; ``CheckpointError`` where rows of one do not fit together.

    They lie in the files, which are mapped into memory, until they are read.
    """
    rows = grouped(item for path in paths for item in safetensors.torch.load_file(path).items())
    return {name: _joined(name, parts) for name, parts in rows.items()}


def _joined(name: str, rows: list[Tensor]) -> Tensor:
    if len(rows) == 1:
        return rows[0]
    if len({(part.dtype, part.shape[1:], part.dim() > 0) for part in rows}) > 1 or not rows[0].dim():
        forms = ", ".join(f"{part.dtype} {list(part.shape)}" for part in rows)
        raise CheckpointError(f"The rows of {name!r} do not make up one tensor: {forms}. Use another checkpoint.")
    return JoinedRows(rows)


class JoinedRows(Tensor):
    """A tensor whose rows lie in several files: some of them can be taken without reading the others.

    Whatever else is done with it is done with an ordinary tensor of all rows, made for that alone.
    """

    _parts: list[Tensor]

    def __new__(cls, parts: list[Tensor]) -> JoinedRows:
        """Makes one of parts that agree in all but their first dimension."""
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        made = Tensor._make_subclass(cls, torch.empty(shape, dtype=parts[0].dtype, device="meta"))
        made._parts = parts
        return made

    def __init__(self, parts: list[Tensor]) -> None:
        """See ``__new__``."""

    def rows(self, taken: slice) -> Tensor:
        """Some consecutive rows; a view where they lie in one file."""
        start, stop, _ = taken.indices(self.shape[0])
        found, begin = [], 0
        for part in self._parts:
            own = part[max(start - begin, 0) : max(stop - begin, 0)]
            begin += part.shape[0]
            if own.shape[0]:
                found.append(own)
        return found[0] if len(found) == 1 else torch.cat(found) if found else self._parts[0][:0]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Answers what needs no values; everything else is asked of an ordinary tensor."""
        if getattr(func, "__self__", func) in _OF_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and isinstance(args[1], slice) and args[1].step is None:
            return args[0].rows(args[1])

        def whole(value: Any) -> Any:
            return torch.cat(value._parts) if isinstance(value, JoinedRows) else value

        with torch._C.DisableTorchFunctionSubclass():
            return func(*tree_map(whole, args), **tree_map(whole, dict(kwargs or {})))


_OF_SHAPE: frozenset[Any] = frozenset(
    {Tensor.shape, Tensor.dtype, Tensor.ndim, Tensor.nbytes, Tensor.dim, Tensor.numel, Tensor.size}
)
"""The attributes that a tensor without values has as well."""
