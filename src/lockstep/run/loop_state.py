"""The state that the user's loop keeps in variables, and what of it a resumed run has lost.

    frames of the user's code,      main         rng, step, history, ema, ...
    the outermost first             Task.train   self.best, ...
                                    Lockstep     run.batches, run.save, ...

Generators of random numbers are stored in checkpoints and restored. Of other variables that the loop will read again
(``live_names``) a checkpoint notes the values. If a variable of a resumed loop has the value of the run's beginning
instead, it is lost: a warning names it, and the run is refused if the loss reads it or a data set holds it.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import psutil
from torch import Tensor

from lockstep.core.users_code import owners_of, users_frames
from lockstep.core.values import Part, is_plain, text_of_plain
from lockstep.data.keyed import encoded_state, set_encoded_state
from lockstep.errors import ConfigError
from lockstep.numerics.hidden_state import Snapshot
from lockstep.run.code_analysis import (
    Carried,
    Places,
    carried_since,
    changed_by_loop,
    changed_since,
    names_ahead,
    places_of_frames,
    read_after_loops,
    unset_names,
)
from lockstep.run.frame_variables import Variables
from lockstep.runtime.events import StepEvents
from lockstep.text import shorten

logger = logging.getLogger(__name__)

_VARIABLE = re.compile(r"\.(?!<)(?![^ ]*: )|\[")
"""Where the name of a variable of a frame ends, and that of an attribute or entry begins."""
_LAST = re.compile(r"\w+$")
"""The last word of a name; none of an entry."""
_VERSION = re.compile(r"version \d+,? ?")
_DIGEST = re.compile(r" of digest \w+")


@dataclass(frozen=True)
class Lost:
    """A variable of a resumed run that is not what it was at the checkpoint."""

    held: list[Any]
    """A tensor, a module and its tensors, an array, or a container."""
    plain: Part | None
    state: str
    """See ``state_of``; where the steps begin."""

    @classmethod
    def of(cls, found: Variables, name: str) -> Lost:
        """A variable, as the steps begin."""
        held = found.held(name)
        return cls(held, found.plain.get(name), state_of(held))

    def is_read_by(self, found: Snapshot, changed: Container[str], names: set[str]) -> bool:
        """True where a loss reads it, and the step is not known to have set it again.

        Args:
            found: what was looked at in a step.
            changed: the names of what the loss and the model have changed themselves in it.
            names: all that their code has.
        """
        if state_of(self.held) == self.state:
            words = [word for each in self.held if (word := found.name_of(each)) and word not in changed]
            if any(names.issuperset(re.findall(_ATTRIBUTE, word)) for word in words):
                return True
        if self.plain is None or self.plain.place not in found.places:
            return False
        word, now = found.places[self.plain.place]
        value = self.plain.value
        if isinstance(self.plain.holder, str):  # a live variable: nothing sets it before it is read
            return now is value or (is_plain(now) and text_of_plain(now) == text_of_plain(value))
        # Others that are equal may be one object.
        return now is value and type(now) is float and names.issuperset(re.findall(_ATTRIBUTE, word))


_ATTRIBUTE = r"attribute '(?!_content'|_val'|_fields')(\w+)'"
"""Not those in which omegaconf and ml_collections keep the values of a config, which no code of the user's names."""


def state_of(held: Collection[Any]) -> str:
    """A text that changes when what is held is changed in place."""
    versions = [each._version if isinstance(each, Tensor) and not each.is_inference() else 0 for each in held]
    arrays = [hash(each.tobytes()) for each in held if isinstance(each, np.ndarray)]
    return repr([versions, arrays, *(len(each) for each in held if isinstance(each, list | dict | deque))])


class LoopState:
    """The state that the loop keeps in variables, over a stop and a resume.

    Texts of variables, which are equal where their values are, are kept by name (see ``Variables``).

    Args:
        known: the ids of objects that checkpoints hold, with their names.
        settings: gives the numbers with which optimizers step now.
        hooks: gives those of the optimizers' steps.
    """

    def __init__(
        self,
        known: Mapping[int, str],
        *,
        is_main: bool,
        settings: Callable[[], Collection[float]] = tuple,
        hooks: Callable[[], Collection[object]] = tuple,
    ) -> None:
        self._known, self._is_main, self._settings, self._hooks = known, is_main, settings, hooks
        self.events: StepEvents | None = None
        """Of the run, whose callbacks are looked at."""
        self.lost: dict[str, Lost] = {}
        """The variables that this resumed run has certainly lost, by name."""
        self.unsaved: list[str] = []
        """Optimizers of the loop that step parameters of the run with a state that no checkpoint holds."""
        self._first: dict[str, str] = {}
        """The texts when the run began, in the first process of all resumes."""
        self._start: dict[str, str] = {}
        """The texts when the steps of the current epoch began."""
        self._entered: dict[str, str] = {}
        """The texts when the first steps of this loop began; a loop before it, such as a pretraining, has its own."""
        self._places: set[str] = set()
        self._at_epoch: dict[str, Any] = {}
        """The generators' states when the current epoch began."""
        self._at_end: dict[str, str] = {}
        """The texts when the steps of the last epoch had ended; of what evaluations have changed, those after them."""
        self._set_in_data: set[str] = set()
        """The variables that data sets hold and the loop has changed."""
        self._by_reading: set[str] = set()
        """The variables that data sets hold and reading has changed."""
        self._stored: Mapping[str, Any] = {}
        """The result of ``capture`` for the checkpoint, until the first steps of a resumed run."""
        self._inside = self._in_epochs = False
        """True if the checkpoint was written while batches were read; true once ``run.epochs`` has given an epoch."""
        self._resumed: tuple[Variables, dict[str, str], dict[FrameType, int]] | None = None
        """The variables of a resumed run at the start of its first epoch, states of tensors, and places of frames."""
        self._untouched: set[str] = set()
        """The variables that the loop's own code has not set between the start of that epoch and its first steps."""
        self._carried: set[str] = set()
        """The variables that it has computed there from their own lost values."""
        self._generators: dict[str, Any] = {}
        """The generators that existed when the steps of the current epoch began."""
        self._measured = set[float]()
        """The results of evaluations before the first step."""
        self._others = set[str]()
        """Floats that the loop does not change, and that the script has made with other values: its constants, too."""
        self._begun: Places = {}
        """Where the code of the frames began the steps of the current epoch."""
        self._given: Places = {}
        """Where it was given the first of them."""
        self._born: dict[str, str] = {}
        """The first texts of attributes and globals that were not there when the steps of this process began."""
        self._walks = 0
        """The number of loops over steps that have begun, over all resumes."""

    def _look(self, **loop: bool | Places) -> Variables:
        callbacks = self.events.callbacks if self.events else ()
        found = Variables.of_loop(self._known, (*callbacks, *self._hooks()), begun=self._begun, **loop)
        born = found.texts.keys() - self._first.keys() if self._start else ()
        self._born = {**{name: found.texts[name] for name in born}, **self._born}
        return found

    def resume(self, stored: Mapping[str, Any], *, inside: bool) -> None:
        """Takes what ``capture`` returned. ``inside``: it was written while the batches of an epoch were read."""
        maps = ("first", "start", "saved", "at_epoch", "generators")
        self._stored = {**stored, **{name: dict(stored[name]) for name in maps}} if stored else {}
        self._inside, self._in_epochs = inside, False
        self._first, self._walks = dict(stored.get("first", {})), stored.get("walks", 0)
        self._set_in_data = set(stored.get("set_between", ()))

    def begin_epoch(self) -> None:
        """Restores the generators' states, once after a resume; called where ``run.epochs`` gives an epoch."""
        found = self._look(enters_loop=True)
        if self._stored and not self._in_epochs:
            _give(found, self._stored["at_epoch" if self._inside else "generators"])
            found.renew_floats(self._stored["saved"].keys())
            states = {name: state_of(held) for name, held in found.tensors.items()}
            self._resumed = found, states, {frame: frame.f_lasti for frame in users_frames()}
        self._in_epochs = True
        self._first = {**found.texts, **self._first}
        self._at_epoch = {name: encoded_state(each) for name, each in found.generators.items()}

    def begin_steps(self, begun: Places | None = None, *, any_left: bool = False) -> None:
        """Notes the variables before the steps of an epoch; warns of those that a resumed run has lost.

        ``begun``: where code has asked for the steps; None: here. ``any_left``: the loop will make a pass.
        """
        stored, self._begun = self._stored, {}
        found = self._look(enters_loop=bool(stored) and any_left)
        self._given = places_of_frames()
        self._begun = begun or self._given
        if (place := str(self._begun)) not in self._places:
            self._places.add(place)
            self._entered = dict(stored.get("entered", stored.get("first", {})))
        self._entered = {**found.texts, **self._entered}
        if stored:
            if self._inside:
                _give(found, stored["generators"])
            elif not self._in_epochs:
                self._give_without_epochs(found)
            if self._resumed and self._in_epochs:
                self._untouched, self._carried = self._untouched_in(found), self._carried_in(found)
            self._resumed = None
            found.renew_floats(stored["saved"].keys())
            # Outside of the steps a pass of the loop around them has begun.
            began = found if self._inside else self._look(enters_loop=any_left)
            unread = found.local - found.live
            lost = self._lost(found, unread=unread - began.live)
            self._require_generators(found, lost)
            self._require_data(lost)
            self.lost = {n: Lost.of(found, n) for n in lost if n not in unread | self._others and self._is_certain(n)}
            born, there = stored.get("born", {}), {*found.texts, *stored["generators"]}
            lost |= {name: (text, "nothing") for name, text in born.items() if name not in there}
            self._tell_lost(found, lost)
            had = [name.rpartition(": ")[2] for name in stored.get("had", ())]
            unset = [name for name in unset_names(enters_loop=any_left) if name in had]
            if unset and self._is_main:
                logger.warning(
                    "The loop goes on and may read variables that are not there in this resumed run: %s. That would be "
                    "a NameError. Set them before it, as loss = float('nan'), or to what run.extra has kept.",
                    shorten(unset, 4),
                )
            self._stored = {}
        self._first = {**found.texts, **self._first}
        self._note_data(found)
        self._start, self._generators, self._at_end = found.texts, found.generators, {}
        self._walks += 1

    def end_epochs(self) -> None:
        """Warns of what a resumed run, which had no step left, has lost and the code after the loop reads."""
        read, found, saved = read_after_loops(), self._look(), self._stored.get("saved", {})
        lost = {n: (saved[n], t) for n, t in found.texts.items() if saved.get(n, t) != t and read & {*_words(n)[0]}}
        self._tell_lost(found, lost)

    def _tell_lost(self, found: Variables, lost: Mapping[str, tuple[str, str]]) -> None:
        if lost and self._is_main:
            texts = {name: [_DIGEST.sub("", each) for each in pair] for name, pair in lost.items()}
            words = [
                f"{name} (other values)"
                if name in found.with_values or now == before
                else f"{name} ({now}, was {before})"
                for name, (before, now) in texts.items()
            ]
            logger.warning(
                "The loop goes on to read variables that are not what they were at the checkpoint: %s. What "
                "depends on them is not what it would have been without the stop. Keep numbers and texts in "
                "run.extra, and tensors in a module that run.prepare is given: checkpoints hold both.",
                shorten(words, 5),
            )

    def note_made(self) -> None:
        """Notes what the first step has made."""
        self._look()

    def note_results(self, results: float | Mapping[str, float]) -> None:
        """Notes what an evaluation gives to the script, which may begin its loop with it."""
        if not self._start:
            self._measured.update(results.values() if isinstance(results, Mapping) else [results])

    def changed_in_data(self) -> dict[str, str]:
        """The texts, by name, of what data sets hold or read and the loop has changed since the run began."""
        if not self._start:
            return {}
        found, first = self._look(), self._first
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
        self._set_in_data |= changed
        self._set_in_data -= {name for name in names if self._first.get(name) == texts[name]}

    def _not_by_loop(self, names: Collection[str], found: Variables) -> set[str]:
        """Those of the names whose variables neither the code of the loop nor a function that it calls changes."""
        by_loop, others = changed_by_loop() if names else set(), found.other_names
        return {
            name
            for name in names
            if by_loop.isdisjoint({_words(name)[0][-1], *others.get(name, ()), *others.get(name.partition("[")[0], ())})
        }

    def _give_without_epochs(self, found: Variables) -> None:
        """Restores the generators' states at the end of an epoch, in a loop that is not over ``run.epochs``."""
        states = self._stored["generators"]
        for name in self._stored["fresh"]:
            is_there = name in found.generators and states.get(name) is not None
            if is_there and self._walks == 1 and encoded_state(found.generators[name]) != states[name]:
                raise ConfigError(
                    f"The generator {name} of the loop has drawn numbers in the first epoch. Whether it begins anew in "
                    "each epoch or goes on cannot be told in this resumed run. Loop over run.epochs, or keep its state "
                    "in run.extra and give it back before run.batches."
                )
        _give(found, {name: state for name, state in states.items() if name not in self._stored["fresh"]})

    def _lost(self, found: Variables, unread: Collection[str]) -> dict[str, tuple[str, str]]:
        """The variables that a stop has lost, each with its text at the checkpoint and its text now."""
        lost, numbers = {}, {*self._settings(), *self._measured}
        for name, text in found.texts.items():
            before, value = self._stored["saved"].get(name), found.values[name]
            if before is None:
                continue
            is_float = type(value) is float and name not in found.of_data
            is_taken = is_float and value in numbers
            is_constant = is_float and before == self._first.get(name)
            if name in self._carried and not is_constant:
                is_lost = not self._inside or before != text
            elif before == text or name in found.generators or name in unread:
                is_lost = False
            else:
                self._others |= {name} if is_constant and not is_taken and not _is_time(value) else set()
                is_lost = self._begins_anew(name, text, before, found, is_taken=is_taken or name in self._others)
            if is_lost:
                lost[name] = before, text
        return lost

    def _begins_anew(self, name: str, text: str, before: str, found: Variables, *, is_taken: bool) -> bool:
        """True if a variable that differs from the checkpoint's is not what the loop had made of it.

        Within the steps of an epoch nothing but the loop's body could set it. After them the start of the next epoch
        may: what is set again in each epoch has one value at the start of every one. ``is_taken``: the script takes
        its value from the run, or computes it, and now gets a different one.
        """
        firsts, start = (self._first.get(name), self._entered.get(name)), self._stored["start"].get(name)
        may_differ = name in found.with_values  # by values, of which a text tells too little
        if self._inside:
            return may_differ or is_taken or text in (*firsts, start)
        is_untouched = name in self._untouched
        if may_differ and self._in_epochs:
            return is_untouched
        if text in firsts:
            is_lost = is_untouched or name in self._stored["read"] or start != text
        else:
            is_lost = is_taken and (is_untouched or not self._in_epochs)
        return is_lost or (may_differ and before in firsts)

    def _require_data(self, lost: Collection[str]) -> None:
        """Refuses data sets that are not as the loop had left them."""
        if names := sorted(filter(self._is_certain, self._set_in_data & set(lost))):
            raise ConfigError(
                f"The loop had changed {shorten(names, 3)} in a data set, or what it reads, when the checkpoint was "
                "written, and no checkpoint holds that: this resumed run would go on with other samples. Keep what the "
                "loop changes in run.extra, and give it back to the data set before run.batches."
            )

    def _require_generators(self, found: Variables, lost: Collection[str]) -> None:
        """Refuses, or warns of, generators that are not there yet, so that they cannot get their states back."""
        missing = self._stored["generators"].keys() - found.generators.keys()
        if names := sorted(missing & set(lost)):
            raise ConfigError(
                f"The loop draws random numbers from {shorten(names, 3)}, which does not exist yet where this resumed "
                "run goes on, so it would draw others. Make the generator before the loop over run.batches."
            )
        if (names := sorted(missing - set(self._stored["local"]))) and self._is_main:
            logger.warning(
                "%s had drawn random numbers when the checkpoint was written, and does not exist yet. If it is not "
                "made anew in each step, make it before the loop over run.batches, so that it can go on.",
                shorten(names, 3),
            )

    def _is_certain(self, name: str) -> bool:
        """False where the start of an epoch may set it: each epoch then has a value of its own, as in a curriculum."""
        is_carried = name in self._stored["read"] or name in self._untouched | self._carried
        return self._inside or is_carried or (not self._in_epochs and name not in self._stored["plain"])

    def _untouched_in(self, found: Variables) -> set[str]:
        """The variables that the loop's own code has not set since the epoch began, as far as objects and code tell."""
        assert self._resumed is not None
        was, states, frames = self._resumed
        changed, names = changed_since(frames), set()
        for name, text in found.texts.items():
            value, held = found.values[name], found.tensors.get(name)
            if was.texts.get(name) != text or value is not was.values[name]:
                continue
            is_untouched = changed.isdisjoint(re.findall(r"\w+", name.rpartition(": ")[2]))
            if held is not None:
                is_untouched = states[name] == state_of(held)
            if is_untouched or name in was.renewed:
                names.add(name)
        return names

    def _carried_in(self, found: Variables) -> set[str]:
        """The variables that the start of an epoch computes from their own lost values, as ``self.scale *= 0.5``."""
        assert self._resumed is not None
        was, _, frames = self._resumed
        carried, stored = carried_since(frames), self._stored
        now, then = (found.texts, stored["start"]) if self._inside else (was.texts, stored["saved"])
        names = found.texts.keys() - (found.local - (was.live & was.texts.keys()))
        differ = [each for each in names if now.get(each) != then.get(each, now.get(each))]
        owned = {name for name in differ if not carried.isdisjoint(_owners(name, name in found.local))}
        fewer = {name for name in differ if _count(found.texts[name]) < _count(then[name])}
        return owned | {name for name in fewer if Carried(_words(name)[0][-1], "entries") in carried}

    def _is_noted(self, name: str, found: Variables) -> bool:
        """True if the variable has changed since the run began, or a resumed run may take it from another state."""
        first = self._first.get(name)
        is_of_run = name in found.with_values or type(found.values.get(name)) is float
        return first is not None and (is_of_run or first != found.texts[name])

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
        names = found.live - self._by_reading - self._not_by_loop(found.perhaps_read - self._set_in_data, found)
        noted = {name: found.texts[name] for name in names if self._is_noted(name, found)}
        # A thread, or a function that has ended, may have had the others.
        generators = {**self._generators, **found.generators}
        # What has the value that it was made with is a cache.
        changed = [name for name in self._born.keys() & names if seen.get(name) != found.texts[name]]
        owners = {name[: end.start()] for name in changed for end in re.finditer(r"[.[]|$", name)}
        born = [name for name in owners & self._born.keys() if {*_LAST.findall(name)} & found.asked_for]
        return {
            "born": {name: found.texts[name] for name in born},
            "first": {name: self._first[name] for name in noted},
            "start": {name: self._start[name] for name in noted if name in self._start},
            "entered": {name: self._entered[name] for name in noted if name in self._entered},
            "saved": noted,
            "read": sorted(found.read & noted.keys()),
            "plain": sorted(found.plain.keys() & noted.keys()),
            "at_epoch": self._at_epoch,
            "generators": {name: encoded_state(each) for name, each in generators.items()},
            "fresh": sorted(name for name in generators if self._start.get(name) == self._first.get(name)),
            "local": sorted(found.local & generators.keys()),
            "set_between": sorted(self._set_in_data),
            "had": sorted((found.live | found.read) & found.local),
            "walks": self._walks,
        }


def _is_time(value: float) -> bool:
    """True for what a clock may have shown to this process, or will show within a year."""
    age = time.time() - psutil.Process().create_time()
    return abs(value - time.time()) < 3e7 or abs(value - time.perf_counter()) < age


def _owners(name: str, is_variable: bool) -> set[Carried]:
    """The names by which code may change a value, or an object that holds it."""
    words, keys = _words(name)
    if is_variable:
        return {Carried(words[-1]), Carried(words[-1], "own")}
    values = {Carried(word) for word in words[-1:] + keys[-1:]}
    return values | {Carried(words[0], "object")} | {Carried(word, "attribute") for word in words + keys}


def _words(name: str) -> tuple[list[str], list[str]]:
    """The words of a variable with its attributes, and those of the key of an entry."""
    path, _, entry = name.partition("[")
    return re.findall(r"\w+", path.rpartition(": ")[2]), re.findall(r"\w+", entry)


def _count(text: str) -> int:
    """The number of entries in the text of a container; 0 in any other."""
    return int(found[1]) if (found := re.match(r"(\d+) entries", text)) else 0


def _give(found: Variables, states: Mapping[str, Any]) -> None:
    for name, state in states.items():
        if name in found.generators:
            set_encoded_state(found.generators[name], state)
