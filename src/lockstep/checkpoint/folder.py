"""The checkpoints of a run folder: which are committed, which is best, which may go."""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.manifest import read_sealed, seal
from lockstep.checkpoint.record import JSON
from lockstep.core.atomic import remove_folder, write_whole
from lockstep.errors import CheckpointError

BEST = "best.json"
_STEP = re.compile(r"step-(\d{8,18})(?:-(\d{1,9}))?")


@dataclass(frozen=True)
class Best:
    """The best step so far, by an evaluated metric."""

    step: int
    metric: str
    value: float


def step_of(path: Path) -> tuple[int, int] | None:
    """Step and attempt that a checkpoint's folder name states; None for any other name."""
    match = _STEP.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 1)) if match else None


def name_of(directory: Path, step: int) -> Path:
    """A folder for ``step`` that does not exist yet, and comes after all others: ``step-00000450``.

    It is ``step-00000450-2`` where a checkpoint of this step or a later one is there: a training has begun again in the
    folder, or has gone on from an earlier checkpoint. Those that follow are called so, too.
    """
    last, attempt = newest_step(directory)
    attempt += step <= last
    return directory / (f"step-{step:08d}" + (f"-{attempt}" if attempt > 1 else ""))


def committed(directory: Path) -> list[Path]:
    """The checkpoints of a run folder in the order in which they were written; links and anything else are left out."""
    return [path for path in committed_or_linked(directory) if not path.is_symlink()]


def committed_or_linked(directory: Path) -> list[Path]:
    """The checkpoints of a run folder, and links that somebody has put in place of one, in the same order."""
    try:
        found = [(key[::-1], path) for path in directory.iterdir() if (key := step_of(path)) is not None]
        return [path for _, path in sorted(found) if path.is_dir() or path.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}.") from error


def newest_step(directory: Path) -> tuple[int, int]:
    """Step and attempt of the checkpoint that was written last, or of a link to it; -1 and 1 where there is none."""
    paths = committed_or_linked(directory)
    return (step_of(paths[-1]) if paths else None) or (-1, 1)


def write_best(directory: Path, best: Best) -> None:
    """Records which step is best, atomically. That step's checkpoint is kept from then on."""
    body: dict[str, JSON] = {"step": best.step, "metric": best.metric, "value": repr(float(best.value))}
    write_whole(directory / BEST, seal(body))


def read_best(directory: Path) -> Best | None:
    """The recorded best step; None if none was recorded, ``CheckpointError`` if the record was altered."""
    path = directory / BEST
    if not path.exists():
        return None
    body = read_sealed(path)
    step, metric, value = body.get("step"), body.get("metric"), body.get("value")
    if isinstance(step, int) and isinstance(metric, str) and isinstance(value, str):
        with suppress(ValueError):
            return Best(step, metric, float(value))
    raise CheckpointError(f"{path} does not hold a step, a metric and its value. Remove it, or use a copy.")


def prune(directory: Path, *, keep: int | None, protect: Collection[int] = ()) -> list[Path]:
    """Deletes all but the ``keep`` newest steps, the best one and those of ``protect``; returns what went.

    As many of later steps than the newest checkpoint stay: an earlier training has left them. An attempt that a newer
    one of the same step replaced goes. ``keep=None`` keeps every step.
    """
    paths, newest = committed(directory), dict[int, Path]()
    for path in paths:
        step, _ = step_of(path) or (-1, 1)
        newest.pop(step, None)  # its newest attempt decides its place
        newest[step] = path
    steps, kept = [*newest], {*newest, *protect}
    if keep is not None and steps:
        made = [step for step in steps if step <= steps[-1]]
        ahead = [step for step in steps if step > steps[-1]]
        kept = {*made[-keep:], *ahead[-keep:], *protect}
    if (record := read_best(directory)) is not None:
        kept.add(record.step)
    stay = {newest[step] for step in kept & newest.keys()}
    gone = [path for path in paths if path not in stay]
    for path in gone:
        remove_folder(path)
    return gone
