"""What a way of training promises about its result."""

from __future__ import annotations

import enum


class Level(enum.Enum):
    """How closely a result agrees with the same recipe on one device."""

    BITWISE = "A"
    """Equal bits after every step."""
    TOLERANCE = "B"
    """Equal within a stated bound; same data, same meaning."""
    STATISTICAL = "C"
    """The same quality at the end."""
