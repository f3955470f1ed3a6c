"""Makes sure that every rank reads the same data set, and a resumed run the one it was reading."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.errors import CheckpointMismatch
from lockstep.plan import SamplePlan
from lockstep.run.position import Position
from lockstep.run.start import require_equal_settings


class AgreedData:
    """The data sets that all ranks have been asked about.

    Args:
        group: the ranks; None for a world of one.
        device: where their exchange takes place.
        position: notes the size of the data set, for checkpoints.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, position: Position) -> None:
        self._group, self._device, self._position = group, device, position
        self._agreed: set[SamplePlan] = set()
        self._resumed_samples = 0

    def resume(self) -> None:
        """Says that the position comes from a checkpoint."""
        self._resumed_samples = self._position.samples if self._position.done else 0

    def require(self, plan: SamplePlan, photos: str = "") -> None:
        """Raises where a checkpoint within an epoch, or another rank, is about another data set. Collective.

        Args:
            plan: of the set.
            photos: what its photos are decoded to, as a hash; empty for other sets.
        """
        before, self._resumed_samples = self._resumed_samples, 0
        if before not in (0, plan.samples):
            raise CheckpointMismatch(
                f"The checkpoint stands at step {self._position.done} of an epoch over {before} samples, and the data "
                f"set has {plan.samples}. Resume with the data set that was trained on."
            )
        self._position.samples = plan.samples
        if self._group is not None and plan not in self._agreed:
            seen = {
                "samples": plan.samples,
                "shuffle": plan.shuffle,
                "drop_last": plan.drop_last,
                "pixels of photos": photos,
            }
            require_equal_settings(seen, self._group, self._device)
            self._agreed.add(plan)
