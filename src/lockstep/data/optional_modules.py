"""Imports what only some formats need, with one sentence where it is not installed."""

from __future__ import annotations

import importlib
from typing import Any

from lockstep.errors import ConfigError


def optional_module(name: str, what: str) -> Any:
    """The module ``name``; ``ConfigError`` where it cannot be imported.

    Args:
        name: as in an import statement.
        what: what needs it, for the error.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"{what} needs {package}, which cannot be imported here ({error}). Install it: pip install {package}."
        ) from error
