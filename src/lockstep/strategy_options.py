"""The ways to train by name, and what each of them can be told. Free of torch.

The options of a strategy are one frozen dataclass, a ``lockstep.checks.Checked``. ``RunOptions`` and ``JobConfig`` have
a field of the strategy's name for it, so it is a table of the job file, and a dict in ``lockstep.init``.
"""

from __future__ import annotations

from typing import Any

from lockstep.errors import ConfigError, nearest
from lockstep.mesh import Mesh

STRATEGIES = ("single", "ddp")
"""Every ``--strategy``."""

SYNC_BATCH_NORM = ("single", "ddp")
"""The strategies in which a process runs its whole share of a step in one forward pass if asked to."""

OPTIONS: dict[str, Any] = {}
"""The class of options of each strategy that has some; a field of that name in ``RunOptions`` and ``JobConfig``."""

_AXES = {"single": "data", "ddp": "data"}
"""The axis of the mesh along which a strategy lays all its ranks."""


def mesh_of(strategy: str, mesh: str, world_size: int) -> Mesh:
    """How a strategy lays out a world of this size.

    Args:
        strategy: one of ``STRATEGIES``.
        mesh: ``data=2,pipeline=2`` for ``hybrid``; empty for the others.
        world_size: number of processes.

    Raises:
        ConfigError: strategy and mesh do not go together, or the mesh does not fit the world.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"strategy {strategy!r} is not known.{nearest(strategy, STRATEGIES)}")
    if strategy == "hybrid":
        if not mesh:
            raise ConfigError("strategy 'hybrid' needs a mesh, such as mesh='data=2,pipeline=2'.")
        laid_out = Mesh.parse(mesh)
        laid_out.check_world(world_size)
        return laid_out
    if mesh:
        raise ConfigError(f"mesh={mesh!r} belongs to strategy 'hybrid', and the strategy is {strategy!r}.")
    return Mesh.single(_AXES[strategy], world_size)
