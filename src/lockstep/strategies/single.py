"""One device: all micro-batches in turn. The reference that every other strategy is compared with."""

from __future__ import annotations

from lockstep.levels import Level
from lockstep.strategies.replicated import Replicated


class Single(Replicated):
    """Runs the K micro-batches of a step one after the other on one device.

    device 0:  k0 k1 k2 k3 k4 k5 k6 k7 | update
    """

    name = "single"
    level = Level.BITWISE
