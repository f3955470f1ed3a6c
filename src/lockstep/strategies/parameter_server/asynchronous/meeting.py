"""Where all processes of an asynchronous run wait for each other, because the loop needs one result of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import ConfigError


@dataclass(frozen=True)
class Meeting:
    """What came of a meeting of all living processes."""

    values: list[Any]
    """What each rank gave, by rank; None of those that are gone."""
    living: list[int]
    """Ranks of the workers that are there."""
    bodies: dict[int, bytes | bytearray | memoryview] = field(default_factory=dict)
    """What ranks sent beside it; on the first server alone."""


def require_same(rank: int, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` where a rank came to another meeting than this one.

    Args:
        rank: who came.
        theirs: what it said: ``label`` and ``number`` of its meeting.
        mine: of this rank's.
    """
    if (theirs.get("label"), theirs.get("number")) != (mine["label"], mine["number"]):
        raise ConfigError(
            f"Rank {rank} came to its meeting {theirs.get('number')} ({theirs.get('label')}) while this rank holds its "
            f"meeting {mine['number']} ({mine['label']}). Every rank must make the same calls in the same order."
        )
