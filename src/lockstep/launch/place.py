"""Where the ranks of this host stand in the world: their numbers, and where all ranks meet."""

from __future__ import annotations

import os
from dataclasses import dataclass

LOOPBACK = "lo" if os.uname().sysname == "Linux" else "lo0"


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of one host in the run; ranks are numbered host by host."""

    run_id: str
    world_size: int
    """Ranks of all hosts."""
    node: int = 0
    nodes: int = 1
    first_rank: int = 0
    """The lowest rank of this host."""
    rendezvous: str = ""
    """Where all ranks meet, as ``tcp://HOST:PORT``; empty: in a file of the run directory."""
    interface: str = LOOPBACK
    """The network interface for the ranks' data."""
