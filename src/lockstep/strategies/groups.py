"""The process groups of a mesh, seen from one rank."""

from __future__ import annotations

import torch.distributed as dist

from lockstep.mesh import OF_DEVICES, Mesh


class Groups:
    """One group of ranks for each axis of a mesh.

    Args:
        mesh: the layout.
        world: all ranks; None for a world of one.
        axes: the group of this rank along each axis that has more than one rank.
    """

    def __init__(
        self, mesh: Mesh, world: dist.ProcessGroup | None, axes: dict[str, dist.ProcessGroup]
    ) -> None:
        self.mesh, self.world, self._axes = mesh, world, axes
        self.rank = dist.get_rank(world) if world is not None else 0

    @classmethod
    def open(cls, mesh: Mesh, world: dist.ProcessGroup | None) -> Groups:
        """Makes the groups. Collective: every rank of the world must call this, with the same mesh.

        Raises:
            ConfigError: the mesh does not take exactly the ranks of the world.
        """
        mesh.check_world(dist.get_world_size(world) if world is not None else 1)
        axes: dict[str, dist.ProcessGroup] = {}
        for name, size in mesh.axes:
            if name in OF_DEVICES or size == 1 or world is None:
                continue
            if size == mesh.ranks:
                axes[name] = world
                continue
            everyone = dist.get_process_group_ranks(world)
            for line in mesh.lines(name):
                group = dist.new_group([everyone[rank] for rank in line])
                if dist.get_rank(world) in line:
                    axes[name] = group
        return cls(mesh, world, axes)

    def along(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one along ``axis`` only; None if there is no other."""
        return self._axes.get(axis)

    def size(self, axis: str) -> int:
        """How many ranks there are along an axis."""
        return 1 if axis in OF_DEVICES else self.mesh.size(axis)

    def coordinate(self, axis: str) -> int:
        """Where this rank stands along an axis."""
        return self.mesh.coordinate(axis, self.rank)

    def release(self) -> None:
        """Lets go of the groups."""
        self.world, self._axes = None, {}
