"""The errors of Lockstep, one tree.

    LockstepError
    ├── ConfigError               options or a program to be changed         exit code 2
    │   └── CheckpointMismatch    a valid checkpoint of another run          exit code 2
    ├── DataError                 a file or sample is invalid                exit code 3
    │   └── CheckpointError       a checkpoint missing, torn or not written  exit code 3
    ├── RankError                 a rank raised, was killed, or left early   exit code 4
    │   └── ReplicaError          ranks that must agree have other bits      exit code 4
    ├── StallError                a rank stopped making progress             exit code 5
    └── NonFiniteError            a loss or gradient is NaN or infinite      exit code 6

A message says what was asked, what was found, and what to do, in that order.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_CONFIG = 2
EXIT_DATA = 3
EXIT_RANK = 4
EXIT_STALLED = 5
EXIT_NON_FINITE = 6
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130


class LockstepError(Exception):
    """Base class of all errors that Lockstep raises on purpose."""

    exit_code = EXIT_RANK


class ConfigError(LockstepError):
    """Options, a command or a program that cannot be carried out as asked; the message says what to change."""

    exit_code = EXIT_CONFIG


class CheckpointMismatch(ConfigError):
    """A valid checkpoint that belongs to another model, recipe or software."""


class DataError(LockstepError):
    """A file, folder or sample is invalid; the message names it."""

    exit_code = EXIT_DATA


class CheckpointError(DataError):
    """A checkpoint is missing, incomplete or altered, and was not used; or it could not be written."""


class RankError(LockstepError):
    """A rank raised, was killed by a signal, or left before the others."""

    exit_code = EXIT_RANK


class ReplicaError(RankError):
    """Ranks that must have the same bits have different ones."""


class StallError(LockstepError):
    """A rank made no progress within its limit, such as ``--stall-limit``."""

    exit_code = EXIT_STALLED


class NonFiniteError(LockstepError):
    """A loss or gradient is NaN or infinite; no step was taken with it."""

    exit_code = EXIT_NON_FINITE


GO_ON_AT_LEVEL_B = "go on at level B with force_context=True, in a job --set checkpoint.force_context=true."
"""The end of messages on checkpoints that were written under other conditions."""


def nearest(asked: object, known: Iterable[str]) -> str:
    """Returns `` Did you mean 'x'? Known: a, b, c.`` for an unknown name, ready to append to a message."""
    names = sorted(  # layer2 before layer10
        filter(None, known),
        key=lambda name: [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)],
    )
    close = difflib.get_close_matches(str(asked), names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Known: {', '.join(names)}."
