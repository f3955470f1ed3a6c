"""Which steps of a run are written down."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lockstep.errors import ConfigError

DEFAULT = "10:5"
"""Past the first steps, in which memory is allocated and workers start."""

_FORM = re.compile(r"(\d{1,18}):(\d{1,18})")


@dataclass(frozen=True)
class Window:
    """Steps of this process, counted from 0 at its start, also where it resumed a run."""

    first: int
    count: int

    @staticmethod
    def matches(text: str) -> bool:
        """Whether a word has the form of a window."""
        return _FORM.fullmatch(text) is not None

    @classmethod
    def parse(cls, text: str) -> Window:
        """Reads ``FIRST:COUNT``, such as ``10:5``.

        Raises:
            ConfigError: it is none, or holds no step.
        """
        found = _FORM.fullmatch(text)
        if found is None or not int(found[2]):
            raise ConfigError(
                f"profile {text!r} is no range of steps. Write FIRST:COUNT, for example {DEFAULT}, which leaves out 10 "
                "steps and then writes down 5; 0:5 begins with the first."
            )
        return cls(int(found[1]), int(found[2]))
