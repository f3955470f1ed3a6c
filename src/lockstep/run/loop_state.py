"""The state that the user's loop keeps in variables, over a stop and a resume.

    frames of the user's code,      main         rng, step, history, ema, ...
    the outermost first             Task.train   self.best, ...
                                    Lockstep     run.batches, run.save, ...

Generators of random numbers are stored in checkpoints and restored. Of other variables that the loop will read again
(``Variables.live``) a checkpoint notes the values; ``lost_variables`` compares them with those of a resumed run.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lockstep.core.generators import encoded_state
from lockstep.core.users_code import owners_of, users_frames
from lockstep.numerics.hidden_state import Snapshot
from lockstep.run.changed_names import changed_by_loop
from lockstep.run.frame_variables import Variables
from lockstep.run.live_variables import Places, names_ahead, places_of_frames, read_in_loop
from lockstep.run.lost_variables import LoopNotes, Lost, ResumedLoop, words_in
from lockstep.runtime.events import NO_EVENTS, StepEvents
from lockstep.text import shorten

logger = logging.getLogger(__name__)

_VARIABLE = re.compile(r"\.(?!<)(?![^ ]*: )|\[")
"""Where the name of a variable of a frame ends, and that of an attribute or entry begins."""
_VERSION = re.compile(r"version \d+,? ?")


class LoopState:
    """The state that the loop keeps in variables, over a stop and a resume.

    Texts of variables, which are equal where their values are, are kept by name (see ``Variables``).

    Args:
        known: the ids of objects that checkpoints hold, with their names.
        events: of the run, whose callbacks are looked at.
        settings: gives the numbers with which optimizers step now, and those that say where the run stands.
        hooks: gives those of the optimizers' steps.
    """

    def __init__(
        self,
        known: Mapping[int, str],
        *,
        is_main: bool,
        events: StepEvents = NO_EVENTS,
        settings: Callable[[], Collection[float]] = tuple,
        hooks: Callable[[], Collection[object]] = tuple,
    ) -> None:
        self._known, self._is_main, self._events = known, is_main, events
        self._settings, self._hooks = settings, hooks
        self.lost: dict[str, Lost] = {}
        """The variables that this resumed run has certainly lost, by name."""
        self._still_lost: dict[str, tuple[str, str]] = {}
        """All that it has lost, until the steps of the next epoch begin: their texts at the checkpoint and now."""
        self.unsaved: list[str] = []
        """Optimizers of the loop that step parameters of the run with a state that no checkpoint holds."""
        self._first: dict[str, str] = {}
        self._start: dict[str, str] = {}
        self._entered: dict[str, str] = {}
        self._set_between: set[str] = set()
        self._at_epoch: dict[str, Any] = {}
        self._walks = 0
        """See the fields of ``LoopNotes``; here of all variables."""
        self._places: set[str] = set()
        """The places of the code where loops over steps have begun, as text."""
        self._at_end: dict[str, str] = {}
        """The texts when the steps of the last epoch had ended; of what evaluations have changed, those after them."""
        self._by_reading: set[str] = set()
        """The variables that data sets hold and reading has changed."""
        self._resumed: ResumedLoop | None = None
        """Of a resumed run, until its first steps."""
        self._generators: dict[str, Any] = {}
        """The generators that existed when the steps of the current epoch began."""
        self._measured = set[float]()
        """The results of evaluations before the first step."""
        self._begun: Places = {}
        """Where the code of the frames began the steps of the current epoch."""
        self._given: Places = {}
        """Where it was given the first of them."""
        self._born: dict[str, str] = {}
        """The first texts of attributes and globals that were not there when the steps of this process began."""

    def _look(self, **loop: bool | Places) -> Variables:
        callbacks = *self._events.callbacks, *self._hooks()
        found = Variables.of_loop(self._known, callbacks, begun=self._begun, **loop)
        born = found.texts.keys() - self._first.keys() if self._start else ()
        self._born = {**{name: found.texts[name] for name in born}, **self._born}
        return found

    def resume(self, stored: Mapping[str, Any], *, inside: bool) -> None:
        """Takes what ``capture`` returned. ``inside``: it was written while the batches of an epoch were read."""
        notes = LoopNotes.from_json(stored)
        self._resumed = ResumedLoop(notes, inside=inside, is_main=self._is_main) if stored else None
        self._first, self._walks, self._set_between = dict(notes.first), notes.walks, set(notes.set_between)

    def begin_epoch(self) -> None:
        """Restores the generators' states, once after a resume; called where ``run.epochs`` gives an epoch."""
        found = self._look(enters_loop=True)
        if self._resumed is not None:
            self._resumed.begin_epoch(found)
        self._first = {**found.texts, **self._first}
        self._at_epoch = {name: encoded_state(each) for name, each in found.generators.items()}

    def begin_steps(self, begun: Places | None = None, *, any_left: bool = False) -> None:
        """Notes the variables before the steps of an epoch; warns of those that a resumed run has lost.

        ``begun``: where code has asked for the steps; None: here. ``any_left``: the loop will make a pass.
        """
        resumed, self._begun, self._still_lost = self._resumed, {}, {}
        found = self._look(enters_loop=resumed is not None and any_left)
        self._given = places_of_frames()
        self._begun = begun or self._given
        if (place := str(self._begun)) not in self._places:
            self._places.add(place)
            self._entered = dict(resumed.notes.entered) if resumed else {}
        self._entered = {**found.texts, **self._entered}
        if resumed is not None:
            resumed.begin_steps(found)
            self.lost = resumed.compare(
                found,
                # Outside of the steps a pass of the loop around them has begun.
                found if resumed.inside else self._look(enters_loop=any_left),
                firsts=(self._first, self._entered),
                numbers={*self._settings(), *self._measured},
                set_between=self._set_between,
            )
            resumed.warn_of_unset(any_left=any_left)
            self._resumed, self._still_lost = None, resumed.lost
        self._first = {**found.texts, **self._first}
        self._note_data(found)
        counts = read_in_loop(sorted(found.counted)) if self._is_main and not self._start else ()
        if counts:
            logger.warning(
                "Reading samples changes %s, which the loop reads. Each process and each loader worker reads only some "
                "samples, and a few of them several times, so a count there depends on the number of processes. Count "
                "before the training, or return the count with each sample and take it by run.backward(..., also=).",
                shorten(counts, 3),
            )
        self._start, self._generators, self._at_end = found.texts, found.generators, {}
        self._walks += 1

    def end_epochs(self) -> None:
        """Warns of what a resumed run, which had no step left, has lost and the code after the loop reads."""
        if self._resumed is not None:
            self._resumed.compare_at_end(self._look())

    def note_made(self) -> None:
        """Notes what the first step has made."""
        self._look()

    def note_results(self, results: float | Mapping[str, float]) -> None:
        """Notes what an evaluation gives to the script, which may begin its loop with it."""
        if not self._start:
            self._measured.update(results.values() if isinstance(results, Mapping) else [results])

    def changed_in_data(self, *, in_epoch: bool = False) -> dict[str, str]:
        """The texts, by name, of what data sets hold or read and the loop has changed since the run began.

        ``in_epoch``: since the steps of the current epoch began.
        """
        if not self._start:
            return {}
        found, first = self._look(), self._start if in_epoch else self._first
        texts, names = found.texts, found.of_datasets - self._by_reading
        changed = {name for name in names if texts[name] != first.get(name)}
        return {name: _VERSION.sub("", texts[name]) for name in changed - self._not_by_loop(changed, found)}

    def end_steps(self) -> None:
        """Notes the variables when the steps of an epoch have ended."""
        found = self._look()
        self._note_data(found)
        self._at_end = found.texts

    @contextmanager
    def reading(self, *, alone: bool = False) -> Iterator[None]:
        """Surrounds reads of data sets: what these change meanwhile, such as a cache, is not a change by the loop.

        ``alone``: nothing else runs meanwhile, such as metrics, so what has changed here is never put down to the loop.
        """
        is_noted = alone or self._at_end
        before = self._look().texts.items() if is_noted else None
        yield
        if before is not None:
            found = self._look()
            changed = dict(found.texts.items() - before)
            self._at_end |= changed if self._at_end else {}
            self._by_reading |= changed.keys() & found.of_data if alone else set()

    def seen_in(self, found: Snapshot) -> set[str]:
        """The names in a snapshot of the objects in variables that the loop will use again, which ``capture`` notes.

        Objects are left out if ``Lost`` cannot tell whether a loss reads them, such as iterators.
        """
        variables, ahead, of_inner = self._look(), set[str](), set[str]()
        frames = users_frames()
        for frame, owner in zip(frames[::-1], owners_of(frames)[::-1]):
            code, named = frame.f_code, of_inner & {*frame.f_code.co_cellvars, *frame.f_code.co_freevars}
            for place in (frame.f_lasti, *self._begun.get(code, ())):
                named |= names_ahead(code, place)
            ahead |= {f"{owner}{name}" for name in named}
            of_inner = named.intersection(code.co_freevars)
        names = [n for n in variables.texts if n in variables.live or _VARIABLE.split(n)[0] in ahead]
        entries = [variables.plain[name].place for name in names if name in variables.plain]
        objects = [found.name_of(variables.values[name]) for name in names if variables.held(name)]
        return {*objects, *(found.places[place][0] for place in entries if place in found.places)}

    def _note_data(self, found: Variables) -> None:
        """Notes what the loop has changed in data sets since the steps began, or since they ended.

        Reading samples changes data sets too, but only within the steps. There the code of the loop tells them apart.
        """
        texts, before = found.texts, self._at_end or self._start
        names = found.of_data - self._by_reading
        changed = {name for name in names if before.get(name, texts[name]) != texts[name]}
        if not self._at_end:
            changed = changed & found.of_datasets - self._not_by_loop(changed, found)
        self._set_between |= changed
        self._set_between -= {name for name in names if self._first.get(name) == texts[name]}

    def _not_by_loop(self, names: Collection[str], found: Variables) -> set[str]:
        """Those of the names whose variables neither the code of the loop nor a function that it calls changes."""
        by_loop, others = changed_by_loop() if names else set(), found.other_names
        words = {n: {words_in(n)[0][-1], *others.get(n, ()), *others.get(n.partition("[")[0], ())} for n in names}
        return {name for name in names if by_loop.isdisjoint(words[name])}

    def _is_noted(self, name: str, text: str, found: Variables) -> bool:
        """True if the variable has changed since the run began, or a resumed run may take it from another state."""
        first = self._first.get(name)
        is_of_run = name in found.with_values or type(found.values.get(name)) in (int, float)
        return first is not None and (is_of_run or first != text)

    def capture(self, *, inside: bool = False) -> dict[str, Any]:
        """The loop's part of a checkpoint; called from within the loop, and perhaps while batches are read."""
        if not self._start:
            return {}
        seen, found = self._born, self._look(inside=self._given if inside else {})
        self.unsaved = [
            f"{name} ({type(each).__name__})"
            for name, each in found.optimizers.items()
            if name in found.live and each.state
            if any(id(p) in self._known for group in each.param_groups for p in group["params"])
        ]
        self._note_data(found)
        names = found.live - self._by_reading - self._not_by_loop(found.perhaps_read - self._set_between, found)
        # What is as the stop before this one has left it is lost to the next run as well.
        lost = {name: was for name, (was, now) in self._still_lost.items() if found.texts.get(name) == now}
        texts = (found.texts | lost).items()
        noted = {name: text for name, text in texts if name in names and self._is_noted(name, text, found)}
        # A thread, or a function that has ended, may have had the others.
        generators = {**self._generators, **found.generators}
        # What has the value that it was made with is a cache.
        changed = [name for name in self._born.keys() & names if seen.get(name) != found.texts[name]]
        owners = {name[: end.start()] for name in changed for end in re.finditer(r"[.[]|$", name)}
        born = [name for name in owners & self._born.keys() if {*re.findall(r"\w+$", name)} & found.asked_for]
        notes = LoopNotes(
            saved=noted,
            first={name: self._first[name] for name in noted},
            start={name: self._start[name] for name in noted if name in self._start},
            entered={name: self._entered[name] for name in noted if name in self._entered},
            born={name: found.texts[name] for name in born},
            read=found.read & noted.keys(),
            plain=found.plain.keys() & noted.keys(),
            had=(found.live | found.read) & found.local,
            set_between=self._set_between,
            generators={name: encoded_state(each) for name, each in generators.items()},
            at_epoch=self._at_epoch,
            fresh={name for name in generators if self._start.get(name) == self._first.get(name)},
            local=found.local & generators.keys(),
            walks=self._walks,
        )
        return notes.as_json()
