"""What may stand between the trainer and the gradients of its steps: a record of them, or a comparison with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from lockstep.data.batch import Batch


class Watcher(Protocol):
    """Gets gradients computed in the handle's place, and may look at them before they are clipped."""

    def backward(self, batch: Batch, loss: Callable[..., Any], *, follows_save: bool) -> Tensor:
        """As ``Run.backward``. Collective.

        Args:
            batch: of the step.
            loss: function of (output, target).
            follows_save: whether a checkpoint holds the state that the step begins with.
        """
