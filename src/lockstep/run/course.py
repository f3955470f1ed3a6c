"""Walks through epochs and steps, and knows at every moment where a run stands.

    epochs   |------------ 0 ------------|------------ 1 ------------|
    steps    | 0 | 1 | 2 | 3 |  after    | 0 | 1 |
                                                 ^ a checkpoint here holds (epoch 1, 2 steps done, inside)

Leaving the steps early ends the epoch if the loop over ``epochs`` goes on, and else is a place to resume at.

What comes after the last step of an epoch, such as an evaluation, can be done again: ``go_back`` moves to where a
resumed run has no step left to do in the epoch, and does all that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lockstep.data.batch import Batch
from lockstep.errors import ConfigError
from lockstep.run.position import Position

Read = Callable[[int, int], Iterator[Batch]]
"""The steps of an epoch from a position on."""


class Course:
    """The loops of a run. Nothing here is collective."""

    def __init__(self) -> None:
        self.position = Position()
        self._current: Batch | None = None
        self._backward_passes = 0
        self._walk = 0
        self._in_epochs = self._left_early = False
        self._last_epoch = self._finished_epoch = -1
        self._back: Position | None = None

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs from where the run stands up to ``count``."""
        self._in_epochs, self._last_epoch = True, count - 1
        try:
            while self.position.epoch < count:
                yield self.position.epoch
                self.count_step()
                self._next_epoch()
                self._back = replace(self.position)
        except GeneratorExit:
            self.position.inside = self.position.inside or self._left_early
            raise
        finally:
            self._in_epochs = False

    def steps(self, read: Read, after: Callable[[], None]) -> Iterator[Batch]:
        """The steps from where the run stands to the end of the epoch.

        Args:
            read: gives them.
            after: called when a step is over.
        """
        position = self.position
        self.count_step()
        self._require_first_pass()
        self._walk += 1
        walk = self._walk
        position.inside, self._left_early, self._back = True, False, None
        try:
            for batch in read(position.epoch, position.done):
                self._require_newest(walk)
                self._current, self._backward_passes = batch, 0
                yield batch
                self._require_newest(walk)
                self.count_step(even_if_unused=True)
                after()
        except GeneratorExit:
            if walk == self._walk:
                self._leave_early()
            raise
        self._back = replace(position, inside=True)
        position.inside, self._finished_epoch = False, position.epoch
        if not self._in_epochs:
            self._next_epoch()

    @property
    def can_go_back(self) -> bool:
        """Whether all since the end of the steps, or of the epoch, can be done again by a run that is resumed."""
        return self._back is not None

    def go_back(self) -> None:
        """Moves there; the parameters must still be those of that moment."""
        assert self._back is not None, "the run stands within the steps of an epoch"
        vars(self.position).update(vars(self._back))

    @property
    def next_epoch(self) -> int | None:
        """The epoch after this one, where it is known that it will come."""
        following = self.position.epoch + 1
        return following if self._in_epochs and following <= self._last_epoch else None

    @property
    def turn(self) -> int:
        """How many backward passes over the current step are done."""
        return self._backward_passes

    def end_backward(self) -> None:
        """Says that a backward pass over the current step is done."""
        self._backward_passes += 1

    def count_step(self, *, even_if_unused: bool = False) -> None:
        """Counts the current step as done, once; before its backward pass it is still to be done."""
        if self._current is None or not (self._backward_passes or even_if_unused):
            return
        self.position.done = self._current.plan.position + 1
        self.position.step += 1
        self._current = None

    def _next_epoch(self) -> None:
        position = self.position
        position.epoch, position.done, position.inside = position.epoch + 1, 0, False
        self._left_early = False

    def _leave_early(self) -> None:
        self.count_step()
        if self._in_epochs:
            self.position.inside, self._left_early = False, True

    def _require_first_pass(self) -> None:
        if self._in_epochs and self._finished_epoch == self.position.epoch:
            raise ConfigError(
                f"run.batches was called again in epoch {self.position.epoch}, whose steps are all done. Call it once "
                "per epoch; join several data sets with torch.utils.data.ConcatDataset."
            )

    def _require_newest(self, walk: int) -> None:
        if walk != self._walk:
            raise ConfigError(
                "Two loops over run.batches run at once, as with zip(). Read one; let each sample of its data set hold "
                "what both gave."
            )
