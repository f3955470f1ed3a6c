"""Walks through epochs and steps, and knows at every moment where a run stands: the ``Position`` of a checkpoint.

    epochs   |------------ 0 ------------|------------ 1 ------------|
    steps    | 0 | 1 | 2 | 3 |  after    | 0 | 1 |
                                                 ^ a checkpoint here holds (epoch 1, 2 steps done, inside)

Leaving the steps early ends the epoch if the loop over ``epochs`` goes on; otherwise a run can resume there. The code
after the last step of an epoch, such as an evaluation, can run again: ``go_back`` moves to the end of the steps, from
where a resumed run repeats it.

A loop may take batches ahead, as ``(batch,) = run.batches(data)``, ``list(run.batches(data))`` and prefetchers do. Its
steps are done once their own backward passes have run, whichever batch was taken last.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from inspect import CO_GENERATOR, GEN_CLOSED, getgeneratorstate
from numbers import Integral
from threading import get_ident
from types import FrameType, GeneratorType
from typing import Any

from lockstep.core.plan import StepPlan
from lockstep.data.batch import Batch
from lockstep.errors import CheckpointError, ConfigError
from lockstep.run.live_variables import Places, places_of_frames
from lockstep.run.loop_state import LoopState
from lockstep.runtime.events import NO_EVENTS, StepEvents
from lockstep.text import plural, shorten

logger = logging.getLogger(__name__)
Read = Callable[[int, int], Iterator[Batch]]
"""The steps of an epoch from a position on."""


@dataclass
class Position:
    """The place in a run. A checkpoint stores it whole; there is no other iterator state."""

    epoch: int = 0
    """The epoch that is trained, or will be next."""
    done: int = 0
    """Steps of that epoch that are done."""
    step: int = 0
    """Optimizer steps done since the run began."""
    inside: bool = False
    """True within the epoch until its batches are read: the code after them has not run yet."""
    samples: int = 0
    """Size of the data set that the epoch reads; 0 before the first."""

    @property
    def is_begun(self) -> bool:
        """True within the epoch, some of whose steps are done."""
        return self.inside and self.done > 0

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """Moves to a stored position; ``CheckpointError`` if it is not a valid one."""
        here = self.as_dict()
        sound = stored.keys() == here.keys() and all(
            type(stored[name]) is type(own) and stored[name] >= 0 for name, own in here.items()
        )
        if not sound:
            raise CheckpointError(
                f"The checkpoint has no valid position in a run: {dict(stored)}. Use another checkpoint."
            )
        for name, value in stored.items():
            setattr(self, name, value)

    def as_dict(self) -> dict[str, int | bool]:
        """The entries, ready for JSON."""
        return asdict(self)


class EpochSteps(Iterator[Batch]):
    """Iterates over the steps of an epoch; ``len()`` is the number of steps that were left when it was made."""

    def __init__(self, steps: Generator[Batch], count: int) -> None:
        self._steps, self._count = steps, count

    def __iter__(self) -> Generator[Batch]:
        if getgeneratorstate(self._steps) == GEN_CLOSED:
            raise ConfigError(
                "The steps that run.batches gave are over, and a loop begins them again, as a cycle() of one's own "
                "does. Call run.batches(data) anew for each epoch."
            )
        return self._steps

    def __next__(self) -> Batch:
        return next(self._steps)

    def __len__(self) -> int:
        return self._count

    def close(self) -> None:
        """Ends the epoch here, as ``break`` does."""
        self._steps.close()


_EPOCH = "Take what belongs to an epoch by its number, which run.epochs gives, as in rates[epoch]."
_PLACE = "The place of a step is batch.plan.position; to read data sets together write run.batches((one, other))."
_MOST_AROUND = 6


def _is_interactive() -> bool:
    """Returns True in a notebook or a console, where a loop that an error has ended is run again."""
    return hasattr(sys, "ps1")


def _tell_begun_anew(running: FrameType, done: int, where: str, remedy: str) -> None:
    """Names what is iterated together with a generator, which is running, and restarts where a resumed run goes on.

    ``enumerate``, ``zip`` and the like around ``run.batches`` are in no variable, so they are looked for among the
    objects that refer to the generators: that one and those that read it, such as a progress bar's.
    """
    found: list[str] = []
    frames, frame = [running], running.f_back
    while frame is not None and (frame.f_code.co_flags & CO_GENERATOR or frame.f_globals is globals()):
        frames.append(frame)
        frame = frame.f_back
    inner: list[Any] = [each for each in gc.get_objects() if type(each) is GeneratorType and each.gi_frame in frames]
    known = set(map(id, inner))
    for _ in range(_MOST_AROUND):
        around = [each for each in gc.get_referrers(*inner) if id(each) not in known]
        inner = [each for each in around if isinstance(each, tuple | Iterator)]
        known |= {id(around), id(inner), *map(id, inner)}
        for each, kind in zip(inner, map(type, inner)):
            if kind is itertools.islice or (kind is enumerate and int(each.__reduce__()[1][1]) < done):
                found.append(f"the count of {kind.__name__}")
            elif kind in (zip, itertools.zip_longest, map):
                held = [one for one in gc.get_referents(*gc.get_referents(each)) if id(one) not in known]
                found += [f"the {type(one).__name__} in {kind.__name__}" for one in held if isinstance(one, Iterator)]
        if not inner:
            break
    if found:
        logger.warning(
            "The run goes on at %s, and %s begins anew there, so that what depends on it is not what it would have "
            "been without the stop. %s",
            *(where, shorten(list(dict.fromkeys(found)), 4), remedy),
        )


class EpochLoop:
    """The loops of a run; callbacks are told where steps begin and end. Nothing here is collective."""

    _is_finalizing = staticmethod(sys.is_finalizing)
    """Bound here: by then the globals of modules may be gone."""

    def __init__(self, events: StepEvents = NO_EVENTS, *, is_alone: bool = True) -> None:
        self.position, self._events, self._is_alone = Position(), events, is_alone
        self._variables = LoopState({}, is_main=False)
        self._key: Callable[[str, int], None] = lambda place, number: None
        self._check_start: Callable[[], None] = lambda: None
        self._note_end: Callable[[bool], None] = lambda ends_loop: None
        self._current: Batch | None = None
        self.backward_passes = 0
        """The number of backward passes over the current step that are done."""
        self._is_ahead = False
        """True while the loop takes batches ahead."""
        self._unused_from = 0, 0
        """The epoch and its step from which on none has had a backward pass: epochs may differ in their lengths."""
        self._used = 0
        """The number of steps before that one."""
        self._saved_before = 0, 0
        """The same when the last checkpoint was written."""
        self.is_resumed = False
        """True where the position comes from a checkpoint, until the first loop over steps."""
        self.has_passed = False
        """True in a resumed run after a loop over epochs that had been over before its checkpoint."""
        self._epoch_loops = 0
        """The number of loops over epochs that have begun."""
        self._walks = 0
        """The number of loops over steps that have begun."""
        self._reader: int | None = None
        """The thread that reads the newest of them, until it is over."""
        self.in_epochs = False
        """True within a loop over epochs."""
        self.stops_at_end = False
        """True once the run was asked to stop, and does so at the end of the epoch's body."""
        self._is_rest = False
        """True if the last loop was left early, so that the next one goes on there unless an epoch begins first."""
        self._own: tuple[int, bool] | None = None
        """The step before the first loop over steps that is in none over epochs, and ``is_resumed`` there."""
        self._last_epoch = self._finished_epoch = self._last_place = -1
        """The last epoch of the loop over epochs, the newest whose steps are done, and the last place in an epoch."""
        self._gradients: object = ()
        """True where gradients wait for the step of their optimizer."""
        self._left_waiting = False
        """True where they did so as the last loop over steps was left early."""
        self._back: Position | None = None
        """The position to which ``go_back`` moves; None where a resumed run could not repeat what came since."""

    def attach(
        self,
        variables: LoopState,
        key_random_numbers: Callable[[str, int], None],
        check_start: Callable[[], None],
        note_end: Callable[[bool], None],
    ) -> None:
        """Tells the arguments from here on where the user's code goes on.

        Args:
            key_random_numbers: called with a place in the loop and its number, before the user's code goes on there.
            check_start: called where it asks for the first step of an epoch.
            note_end: called after the last step of an epoch, and after the epoch: with True if it was the last one.
        """
        self._variables, self._key = variables, key_random_numbers
        self._check_start, self._note_end = check_start, note_end

    def epochs(self, count: int, at_end: Callable[[], None] = lambda: None) -> Iterator[int]:
        """The epochs from where the run stands up to ``count``; ``at_end`` is called at the end of the loop's body."""
        if not isinstance(count, Integral) or count < 0:
            raise ConfigError(f"run.epochs takes the number of epochs, 0 or more, and was given {count!r:.60}.")
        if count <= self.position.epoch and self._walks:
            logger.warning(
                "run.epochs(%d) has nothing to do: it counts from the beginning of the run, which has done %s. For "
                "more of them write run.epochs(run.position.epoch + %d).",
                *(count, plural(self.position.epoch, "epoch"), count),
            )
        self._tell_steps_before(count)
        first = self._last_epoch + 1
        self.in_epochs, self._last_epoch = True, int(count) - 1
        self._epoch_loops += 1
        newest = self._epoch_loops
        if self._finished_epoch == self.position.epoch < count:
            if not _is_interactive():
                raise ConfigError(
                    f"run.epochs({count}) was called after another loop over run.epochs was left by break, at the end "
                    f"of epoch {self.position.epoch + 1}. A resumed run would not know which of the two to go on with. "
                    "Write one loop, and choose what an epoch does by its number, or by what run.extra has."
                )
            self._finished_epoch = -1  # the body goes on after its steps
        try:
            while self.position.epoch < count:
                self._is_rest = False
                self._key("epoch", self.position.epoch)
                self._variables.begin_epoch()
                self.position.inside = True
                if self.is_resumed and (done := self.position.epoch - first) > 0:
                    _tell_begun_anew(sys._getframe(), done, f"epoch {self.position.epoch + 1}", _EPOCH)
                yield self.position.epoch
                if newest != self._epoch_loops:
                    raise ConfigError(
                        "Two loops over run.epochs run at once, one within the other, and both count the epochs of the "
                        "run. Make the outer one over range()."
                    )
                self.count_step()
                at_end()
                self._next_epoch()
                self._back = replace(self.position)
                self._note_end(self.position.epoch >= count)
            self._key("epoch", count)  # what the script draws next, also where no epoch was left
            if self.is_resumed:
                self._variables.end_epochs()
        except GeneratorExit:
            self.position.inside = self.position.is_begun or self.left_early
            raise
        finally:
            self.in_epochs = False

    def _tell_steps_before(self, count: int) -> None:
        """Warns of steps that were taken since the last loop over epochs; ``ConfigError`` in a resumed run."""
        position, (before, is_resumed), self._own = self.position, self._own or (math.inf, False), None
        if position.step > before and position.epoch < count:
            words = (
                f"Steps were made in a loop of the script's own before run.epochs({count}), and count as part of the "
                f"run, which goes on at step {position.done} of epoch {position.epoch + 1} of {count}. A resumed run "
                "makes other steps there. Let a search, as for a learning rate, be a run of its own: run.close(), "
                "then lockstep.init and a model made anew. Put training into run.epochs."
            )
            if is_resumed:
                raise ConfigError(words)
            logger.warning("%s", words)

    def steps_left(self, steps_per_epoch: int) -> int:
        """How many steps of the epoch a loop that begins now will walk."""
        current, done = self._current, self.position.done
        self._last_place = steps_per_epoch - 1
        return steps_per_epoch - (current.plan.position + 1 if current and self.backward_passes else done)

    def steps(self, read: Read, after: Callable[[], None]) -> Generator[Batch]:
        """The steps from where the run stands to the end of the epoch; ``after`` is called when one is over."""
        return self._steps(read, after, places_of_frames())

    def _steps(self, read: Read, after: Callable[[], None], asked: Places) -> Generator[Batch]:
        position = self.position
        self._require_step_made()
        self._check_start()
        self._variables.begin_steps(asked, any_left=position.done <= self._last_place)
        self.count_step()
        if self.in_epochs and self._finished_epoch == position.epoch:
            raise self._all_steps_done()
        if not self.in_epochs:
            self._note_own_loop()
        goes_on = self.is_resumed and position.done > 0
        if self.is_resumed:
            self._unused_from, self._used = (position.epoch, position.done), position.step
        self.is_resumed, is_rest, self._is_rest = False, self._is_rest, False
        self._walks, self._reader = self._walks + 1, get_ident()
        walk = self._walks
        position.inside, self._back = True, None
        begun = position.step - position.done
        try:
            for batch in read(position.epoch, position.done):
                self._require_newest(walk)
                batch = _numbered(batch, begun)
                is_rest = False
                self._current, self.backward_passes = batch, 0
                for call in self._events.step_begin:
                    call(batch)
                self._key("batch", batch.plan.step)
                if goes_on:
                    goes_on, done = False, batch.plan.position
                    _tell_begun_anew(sys._getframe(), done, f"step {done} of epoch {position.epoch + 1}", _PLACE)
                yield batch
                self._require_newest(walk)
                for call in self._events.step_end:
                    call(batch)
                self.count_step(even_if_unused=True)
                after()
        except GeneratorExit:
            if walk == self._walks and not self._is_finalizing():
                self.count_step()
                self._is_rest, self._reader, self._left_waiting = True, None, bool(self._gradients)
                if self.in_epochs:
                    position.inside = False
                self._variables.end_steps()
            raise
        if is_rest:
            raise self._all_steps_done()
        self._variables.end_steps()
        self._reader = None
        self._back = replace(position, inside=True)
        self._note_end(False)
        position.inside, self._finished_epoch = False, position.epoch
        self._key("epoch end", position.epoch)
        self.end_epoch()

    def _require_step_made(self) -> None:
        """Raises ``ConfigError`` in a notebook whose last loop was left while gradients waited for their step."""
        if self._left_waiting and self._gradients and _is_interactive():
            raise ConfigError(
                f"The loop over run.batches was left between run.backward and optimizer.step() of step "
                f"{self.position.step - 1}, which counts as done. Before the loop goes on, make that step with "
                "optimizer.step() and what follows it, or leave it out with optimizer.zero_grad()."
            )
        self._left_waiting = False

    def _note_own_loop(self) -> None:
        """Notes a loop over steps that is in none over ``epochs``; warns of it in a resumed run."""
        position = self.position
        if self.is_resumed and position.epoch:
            logger.warning(
                "The run was resumed in epoch %d, in a loop of the script's own. One over range(N) begins at 0 and "
                "trains %s more than it would have: write for epoch in run.epochs(N), or, where each pass of it has "
                "several loops over batches, begin it at a count in run.extra. What a pass draws at random before its "
                "first run.batches is not what it would have drawn without the stop: draw it from a generator that is "
                "seeded by the number of the pass.",
                *(position.epoch + 1, plural(position.epoch, "epoch")),
            )
        self._own = self._own or (position.step, self.is_resumed)

    @property
    def left_early(self) -> bool:
        """True after steps of a loop over epochs that were left early, until others begin, or the next epoch."""
        return self.in_epochs and self._is_rest

    def end_epoch(self) -> None:
        """Ends an epoch whose steps are over, or were left early, unless a loop over ``epochs`` does so."""
        if not self.in_epochs:
            self._next_epoch()

    @property
    def can_go_back(self) -> bool:
        """True where a resumed run can repeat everything since the end of the steps, or of the epoch."""
        return self._back is not None

    def go_back(self) -> None:
        """Moves back to the end of the steps, or of the epoch; the parameters must still be those of that moment."""
        assert self._back is not None, "the run stands within the steps of an epoch"
        vars(self.position).update(vars(self._back))

    @property
    def place(self) -> str:
        """The loop whose body a resumed run would not finish: "body" of the steps, "epoch", or none."""
        if self.position.is_begun:
            is_body = self._current is None and self._finished_epoch != self.position.epoch
            return "body" if is_body else ""
        return "epoch" if self.in_epochs and self.position.done else ""

    @property
    def next_epoch(self) -> int | None:
        """The epoch after this one, where it is known that it will come."""
        following = self.position.epoch + 1
        return following if self.in_epochs and following <= self._last_epoch else None

    def is_last_step(self, plan: StepPlan) -> bool:
        """True for the last step of a loop over ``epochs``."""
        return self.in_epochs and (plan.epoch, plan.position) == (self._last_epoch, self._last_place)

    @property
    def is_after_last_step(self) -> bool:
        """True after the last step of an epoch, until the next epoch begins."""
        return self._current is None and self.position.done == self._last_place + 1

    def count_step(self, *, even_if_unused: bool = False) -> None:
        """Counts the current step as done, once; before its backward pass it is still to be done."""
        if self._current is None or not (self.backward_passes or even_if_unused):
            return
        if not self._is_ahead:
            self.position.done = self._current.plan.position + 1
            self.position.step += 1
        self._current = None

    def begin_backward(self, plan: StepPlan, waiting: object = ()) -> int:
        """The number of this pass over its step, from 0; ``waiting``: gradients to which it adds, if there are any."""
        if not self._is_alone and self._reader not in (None, get_ident()):
            raise ConfigError(
                "run.backward was called while another thread reads run.batches. On several processes both exchange "
                "values, which must happen in one order. Call both in one thread; run.batches reads ahead in processes "
                "of its own (see prefetch and workers)."
            )
        place, self._gradients = (plan.epoch, plan.position), waiting
        if place >= self._unused_from:
            current = self._current
            self._is_ahead = current is None or (current.plan.epoch, current.plan.position) != place
            if self.backward_passes and (self._is_ahead or not waiting):
                self.backward_passes = 0
        elif place < self._saved_before and plan.epoch <= self._finished_epoch and self._current is None:
            raise ConfigError(
                f"run.backward was given the batch of step {plan.step} again, and the checkpoint of run.save() counts "
                "that step as done: a resumed run would go on with other bits. For further steps call run.batches "
                "again; itertools.cycle repeats old ones. Put run.save() after the last pass over a batch."
            )
        return self.backward_passes

    def note_save(self) -> None:
        """Notes that a checkpoint of the run as it stands was written."""
        self._saved_before = self._unused_from

    def end_backward(self, plan: StepPlan) -> None:
        """Counts a backward pass, and counts its step as done where the loop takes batches ahead."""
        self.backward_passes += 1
        (epoch, done), count = self._unused_from, plan.position + 1
        if (plan.epoch, plan.position) < self._unused_from:
            return
        self._unused_from = plan.epoch, count
        if not self._is_ahead:
            self._used = self.position.step + 1
            return
        self._used += count - done if plan.epoch == epoch else count
        is_last = plan.position >= self._last_place
        for position in filter(None, (self.position, self._back)):
            position.epoch, position.done, position.step = plan.epoch, count, self._used
        self.position.inside = not is_last
        if is_last and self._current is None:
            self.end_epoch()

    def _next_epoch(self) -> None:
        position = self.position
        position.epoch, position.done, position.inside = position.epoch + 1, 0, False
        self._is_rest = False

    def _all_steps_done(self) -> ConfigError:
        remedy = (
            "Call it once per epoch; join several data sets with torch.utils.data.ConcatDataset, or let each loop be "
            "an epoch: for number in run.epochs(2 * N), with number % 2. Without run.epochs, as in a loop over the "
            "steps of an environment, each run.batches is the next epoch."
            if self.in_epochs
            else "The loop before was left at the last step, by break or as next(iter(run.batches(data))) does, which "
            "does not end an epoch. Let the loop end by itself, as (batch,) = run.batches(data) does with a single "
            "step, or loop over run.epochs(N), where break ends an epoch."
        )
        return ConfigError(
            f"run.batches was called again in epoch {self.position.epoch + 1}, whose steps are all done. {remedy}"
        )

    def _require_newest(self, walk: int) -> None:
        if walk != self._walks:
            raise ConfigError(
                "Two loops over run.batches run at once, as with zip(). Read one; let each sample of its data set hold "
                "what both gave."
            )


def _numbered(batch: Batch, begun: int) -> Batch:
    """A batch whose step is numbered in the run, of whose steps ``begun`` came before its epoch.

    A plan knows only its own data set: its numbers repeat where epochs have other lengths or were left early. What is
    drawn at random is keyed by them.
    """
    number = begun + batch.plan.position
    return batch if batch.plan.step == number else replace(batch, plan=replace(batch.plan, step=number))
