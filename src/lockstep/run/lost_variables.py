"""The variables that a resumed run has lost: what a checkpoint notes of them, and the comparison.

A variable of the user's loop is lost if it has the value of the run's beginning where the resumed loop goes on to read
it. A warning names it, and the run is refused if the loss reads it or a data set holds it. ``UnheldPlaces`` does the
same for globals, attributes of classes and variables of functions that the model or the loss reads.
"""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil

from lockstep.core.generators import encoded_state, set_encoded_state
from lockstep.core.values import Part, is_plain, text_of_plain, version_of
from lockstep.errors import ConfigError
from lockstep.numerics.hidden_state import ALIAS, Snapshot, without_key
from lockstep.run.attributes import held_places, reference
from lockstep.run.changed_names import Carried, carried_since, changed_since, offsets_of_frames, set_after_tests
from lockstep.run.frame_variables import Variables
from lockstep.run.live_variables import read_after_loops, unset_names
from lockstep.text import shorten

if TYPE_CHECKING:
    from lockstep.run.state import RunState

logger = logging.getLogger(__name__)

_ATTRIBUTE = r"attribute '(?!_content'|_val'|_fields')(\w+)'"
"""Not those in which omegaconf and ml_collections keep the values of a config, which no code of the user's names."""


@dataclass(frozen=True)
class LoopNotes:
    """The notes of a checkpoint on the variables of the user's loop. Values are noted as texts, see ``Variables``."""

    saved: dict[str, str] = field(default_factory=dict)
    """The values of those that the loop goes on to read and that a resumed run may not have."""
    first: dict[str, str] = field(default_factory=dict)
    """Their values when the run began, in the first process of all resumes."""
    start: dict[str, str] = field(default_factory=dict)
    """Their values when the steps of the epoch began."""
    entered: dict[str, str] = field(default_factory=dict)
    """Their values when the first steps of this loop began; a loop before it, such as a pretraining, has its own."""
    born: dict[str, str] = field(default_factory=dict)
    """The values of attributes and globals that were not there when the steps of the process began."""
    read: set[str] = field(default_factory=set)
    """Those that are read before they are set, as the code shows."""
    plain: set[str] = field(default_factory=set)
    """Those that are numbers, texts and the like."""
    had: set[str] = field(default_factory=set)
    """The variables of functions that the loop may go on to read."""
    set_between: set[str] = field(default_factory=set)
    """Those that data sets hold and the loop has changed."""
    generators: dict[str, Any] = field(default_factory=dict)
    """The states of generators of random numbers."""
    at_epoch: dict[str, Any] = field(default_factory=dict)
    """Their states when the epoch began."""
    fresh: set[str] = field(default_factory=set)
    """Generators that began the steps of the epoch as they had begun those of the first one."""
    local: set[str] = field(default_factory=set)
    """Generators that are variables of functions."""
    walks: int = 0
    """The number of loops over steps that have begun, over all resumes."""

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> LoopNotes:
        """The notes that ``as_json`` gave, perhaps of a version that noted other things; none of an empty mapping."""
        kinds = {each.name: each.default_factory for each in fields(cls)}
        values: dict[str, Any] = {
            name: set(stored[name]) if kind is set else stored[name] for name, kind in kinds.items() if name in stored
        }
        return cls(**values)

    def as_json(self) -> dict[str, Any]:
        """The notes by name, with sorted lists for sets."""
        return {name: sorted(value) if isinstance(value, set) else value for name, value in vars(self).items()}


def united(mine: dict[str, Any], everyone: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The notes of several processes, as JSON; the values of ``mine`` count first."""
    for each in everyone:
        mine |= {key: {**each[key], **mine[key]} for key, value in each.items() if isinstance(value, dict)}
        mine |= {key: sorted({*each[key], *mine[key]}) for key, value in each.items() if isinstance(value, list)}
    return mine


@dataclass(frozen=True)
class Lost:
    """A variable of a resumed run that is not what it was at the checkpoint."""

    held: list[Any]
    """A tensor, a module and its tensors, an array, or a container."""
    plain: Part | None
    state: str
    """See ``_state_of``; where the steps begin."""

    @classmethod
    def of(cls, found: Variables, name: str) -> Lost:
        """A variable, as the steps begin."""
        held = found.held(name)
        return cls(held, found.plain.get(name), _state_of(held))

    def is_read_by(self, found: Snapshot, changed: Container[str], names: set[str]) -> bool:
        """True where a loss reads it, and the step is not known to have set it again.

        Args:
            found: what was looked at in a step.
            changed: the names of what the loss and the model set themselves, without a trace of its value before.
            names: all that their code has.
        """
        if _state_of(self.held) == self.state:
            words = [word for each in self.held if (word := found.name_of(each)) and word not in changed]
            if any(names.issuperset(re.findall(_ATTRIBUTE, word)) for word in words):
                return True
        if self.plain is None or self.plain.place not in found.places:
            return False
        word, now = found.places[self.plain.place]
        if word in changed:
            return False
        value = self.plain.value
        if isinstance(self.plain.holder, str):  # a live variable: nothing sets it before it is read
            return now is value or (is_plain(now) and text_of_plain(now) == text_of_plain(value))
        # Others that are equal may be one object.
        return now is value and type(now) is float and names.issuperset(re.findall(_ATTRIBUTE, word))


@dataclass(frozen=True)
class _EpochStart:
    """A resumed run at the start of its first epoch, before the loop's own code there."""

    found: Variables
    states: dict[str, str]
    """Of tensors, see ``_state_of``."""
    places: dict[FrameType, int]
    """Where the code of the frames was."""


class ResumedLoop:
    """The variables of a resumed run's loop, until its first steps.

    Args:
        notes: of the checkpoint.
        inside: whether it was written while the batches of an epoch were read.
        is_main: whether this process warns.
    """

    def __init__(self, notes: LoopNotes, *, inside: bool, is_main: bool) -> None:
        self.notes, self.inside, self._is_main = notes, inside, is_main
        self.lost: dict[str, tuple[str, str]] = {}
        """The variables that a stop has lost, each with its text at the checkpoint and its text now."""
        self._epoch: _EpochStart | None = None
        self._untouched: set[str] = set()
        """The variables that the loop's own code has not set between the start of the epoch and its first steps."""
        self._carried: set[str] = set()
        """The variables that it has computed there from their own lost values."""
        self._filled: set[str] = set()
        """Those that it has set there because others, or they themselves, are lost."""
        self._others: set[str] = set()
        """Numbers that the loop does not change, and that the script has made with other values: its constants, too."""
        self._prepared = offsets_of_frames()
        """Where the code of the frames was when the model was prepared: what it computes later, it may have from it."""

    def begin_epoch(self, found: Variables) -> None:
        """Restores the generators' states where ``run.epochs`` gives the first epoch."""
        if self._epoch is None:
            _give(found, self.notes.at_epoch if self.inside else self.notes.generators)
            found.renew_floats(self.notes.saved.keys())
            states = {name: _state_of(held) for name, held in found.tensors.items()}
            self._epoch = _EpochStart(found, states, offsets_of_frames())

    def begin_steps(self, found: Variables) -> None:
        """Restores the generators' states where the first steps begin, and sees what was set since the epoch began."""
        if self.inside:
            _give(found, self.notes.generators)
        elif self._epoch is None:
            self._give_without_epochs(found)
        if self._epoch is not None:
            self._untouched = self._untouched_in(self._epoch, found)
            self._carried = self._carried_in(self._epoch, found)
            self._filled = self._filled_in(self._epoch, found)
        found.renew_floats(self.notes.saved.keys())

    def compare(
        self,
        found: Variables,
        began: Variables,
        *,
        firsts: tuple[Mapping[str, str], Mapping[str, str]],
        numbers: Collection[float],
        set_between: set[str],
    ) -> dict[str, Lost]:
        """Warns of the variables that are lost, and returns those that certainly are: the loss must not read them.

        Args:
            found: where the first steps begin.
            began: as the first pass of the loop begins, which may be a pass of the loop around the steps.
            firsts: ``first`` and ``entered`` of ``LoopNotes``, with those of this process.
            numbers: what the script may have taken from the run: settings, results of evaluations, its place.
            set_between: those that data sets hold and the loop has changed.

        Raises:
            ConfigError: a generator is not there yet, or a data set is not as the loop had left it.
        """
        unread = found.local - found.live
        self.lost = lost = self._lost(found, unread - began.live, firsts, numbers)
        self._require_generators(found, lost)
        self._require_data(set_between & lost.keys())
        certain = [name for name in lost if name not in unread | self._others and self._is_certain(name)]
        there = {*found.texts, *self.notes.generators}
        absent = {name: (text, "nothing") for name, text in self.notes.born.items() if name not in there}
        self._warn(found, lost | absent)
        return {name: Lost.of(found, name) for name in certain}

    def warn_of_unset(self, *, any_left: bool) -> None:
        """Warns of variables that are not there, where the loop may read them. ``any_left``: it will make a pass."""
        had = [name.rpartition(": ")[2] for name in self.notes.had]
        unset = [name for name in unset_names(enters_loop=any_left) if name in had]
        if unset and self._is_main:
            logger.warning(
                "The loop goes on and may read variables that are not there in this resumed run: %s. That would be "
                "a NameError. Set them before it, as loss = float('nan'), or to what run.extra has kept.",
                shorten(unset, 4),
            )

    def compare_at_end(self, found: Variables) -> None:
        """Warns of what a run that had no step left has lost, and the code after the loop reads."""
        read, saved = read_after_loops(), self.notes.saved
        changed = {name: (saved[name], text) for name, text in found.texts.items() if saved.get(name, text) != text}
        names = {name: {words_in(name)[0][0], *found.other_names.get(name, ())} for name in changed}
        self._warn(found, {name: texts for name, texts in changed.items() if read & names[name]})

    def _warn(self, found: Variables, lost: Mapping[str, tuple[str, str]]) -> None:
        if lost and self._is_main:
            texts = {name: [re.sub(r" of digest \w+", "", each) for each in pair] for name, pair in lost.items()}
            words = [
                f"{name} (other values)"
                if name in found.with_values or now == before or before == "tensors"
                else f"{name} ({now}, was {before})"
                for name, (before, now) in texts.items()
            ]
            logger.warning(
                "The loop goes on to read variables that are not what they were at the checkpoint: %s. What "
                "depends on them is not what it would have been without the stop. Keep numbers and texts in "
                "run.extra, and tensors in a module that run.prepare is given: checkpoints hold both.",
                shorten(words, 5),
            )

    def _give_without_epochs(self, found: Variables) -> None:
        """Restores the generators' states at the end of an epoch, in a loop that is not over ``run.epochs``."""
        states, fresh = self.notes.generators, self.notes.fresh
        for name in sorted(fresh & found.generators.keys()) if self.notes.walks == 1 else ():
            state = states.get(name)
            if state is not None and encoded_state(found.generators[name]) != state:
                raise ConfigError(
                    f"The generator {name} of the loop has drawn numbers in the first epoch. Whether it begins anew in "
                    "each epoch or goes on cannot be told in this resumed run. Loop over run.epochs, or keep its state "
                    "in run.extra and give it back before run.batches."
                )
        _give(found, {name: state for name, state in states.items() if name not in fresh})

    def _lost(
        self,
        found: Variables,
        unread: Collection[str],
        firsts: tuple[Mapping[str, str], Mapping[str, str]],
        numbers: Collection[float],
    ) -> dict[str, tuple[str, str]]:
        """The variables that a stop has lost, each with its text at the checkpoint and its text now."""
        lost, computed = {}, changed_since(self._prepared)
        for name in filter(self.notes.saved.__contains__, found.texts):
            before, text, value = self.notes.saved[name], found.texts[name], found.values[name]
            is_count = type(value) is int and value not in numbers and words_in(name)[0][-1] in computed
            is_number = (type(value) is float or is_count) and name not in found.of_data
            is_taken = is_number and value in numbers
            is_constant = is_number and before == firsts[0].get(name)
            if name in self._filled and name not in unread:
                is_lost = not (type(value) is float and _is_time(value))
            elif name in self._carried and not is_constant:
                is_lost = not self.inside or before != text
            elif before == text or name in found.generators or name in unread:
                is_lost = False
            else:
                self._others |= {name} if is_constant and not is_taken and not _is_time(value) else set()
                own = [each.get(name) for each in firsts]
                is_lost = self._begins_anew(name, found, own, is_taken=is_taken or name in self._others)
            if is_lost:
                lost[name] = before, text
        return lost

    def _begins_anew(self, name: str, found: Variables, firsts: list[str | None], *, is_taken: bool) -> bool:
        """True if a variable that differs from the checkpoint's is not what the loop had made of it.

        Within the steps of an epoch nothing but the loop's body could set it. After them the start of the next epoch
        may: what is set again in each epoch has one value at the start of every one.

        Args:
            firsts: its texts when the run and when its loop began.
            is_taken: the script takes its value from the run, or computes it, and now gets a different one.
        """
        text, before = found.texts[name], self.notes.saved[name]
        may_differ = name in found.with_values  # by values, of which a text tells too little
        start = self.notes.start.get(name)
        if self.inside:
            return may_differ or is_taken or text in (*firsts, start)
        is_untouched = name in self._untouched
        if may_differ and self._epoch is not None:
            return is_untouched
        if text in firsts:
            is_lost = is_untouched or name in self.notes.read or start != text
        else:
            is_lost = is_taken and (is_untouched or self._epoch is None)
        return is_lost or (may_differ and before in firsts)

    def _require_data(self, lost: Collection[str]) -> None:
        """Refuses data sets that are not as the loop had left them."""
        if names := sorted(filter(self._is_certain, lost)):
            raise ConfigError(
                f"The loop had changed {shorten(names, 3)} in a data set, or what it reads, when the checkpoint was "
                "written, and no checkpoint holds that: this resumed run would go on with other samples. Keep what the "
                "loop changes in run.extra, and give it back to the data set before run.batches."
            )

    def _require_generators(self, found: Variables, lost: Collection[str]) -> None:
        """Refuses, or warns of, generators that are not there yet, so that they cannot get their states back."""
        missing = self.notes.generators.keys() - found.generators.keys()
        if names := sorted(missing & set(lost)):
            raise ConfigError(
                f"The loop draws random numbers from {shorten(names, 3)}, which does not exist yet where this resumed "
                "run goes on, so it would draw others. Make the generator before the loop over run.batches."
            )
        if (names := sorted(missing - self.notes.local)) and self._is_main:
            logger.warning(
                "%s had drawn random numbers when the checkpoint was written, and does not exist yet. If it is not "
                "made anew in each step, make it before the loop over run.batches, so that it can go on.",
                shorten(names, 3),
            )

    def _is_certain(self, name: str) -> bool:
        """False where the start of an epoch may set it: each epoch then has a value of its own, as in a curriculum."""
        is_carried = name in self.notes.read or name in self._untouched | self._carried | self._filled
        return self.inside or is_carried or (self._epoch is None and name not in self.notes.plain)

    def _untouched_in(self, epoch: _EpochStart, found: Variables) -> set[str]:
        """The variables that the loop's own code has not set since the epoch began, as far as objects and code tell."""
        changed, names = changed_since(epoch.places), set()
        for name, text in found.texts.items():
            value, held = found.values[name], found.tensors.get(name)
            if epoch.found.texts.get(name) != text or value is not epoch.found.values[name]:
                continue
            is_untouched = changed.isdisjoint(re.findall(r"\w+", name.rpartition(": ")[2]))
            if held is not None:
                is_untouched = epoch.states[name] == _state_of(held)
            if is_untouched or name in epoch.found.renewed:
                names.add(name)
        return names

    def _carried_in(self, epoch: _EpochStart, found: Variables) -> set[str]:
        """The variables that the start of an epoch computes from their own lost values, as ``self.scale *= 0.5``."""
        carried, was = carried_since(epoch.places), epoch.found
        now, then = (found.texts, self.notes.start) if self.inside else (was.texts, self.notes.saved)
        names = found.texts.keys() - (found.local - (was.live & was.texts.keys()))
        differ = [each for each in names if now.get(each) != then.get(each, now.get(each))]
        owned = {name for name in differ if not carried.isdisjoint(_owners(name, name in found.local))}
        fewer = {name for name in differ if _count(found.texts[name]) < _count(then[name])}
        return owned | {name for name in fewer if Carried(words_in(name)[0][-1], "entries") in carried}

    def _filled_in(self, epoch: _EpochStart, found: Variables) -> set[str]:
        """The variables that the start of an epoch sets to other values, as in ``if centre is None: centre = ...``."""
        saved, then, now = self.notes.saved, epoch.found.texts, found.texts
        lost = {
            word for name in saved if then.get(name) != saved[name] for each in words_in(name) for word in each[-1:]
        }
        changed = set_after_tests(epoch.places, lost)
        differ = {name for name in found.with_values | found.plain.keys() if now[name] != saved.get(name, now[name])}
        return {name for name in differ if not changed.isdisjoint(itertools.chain(*words_in(name)))}


def _state_of(held: Collection[Any]) -> str:
    """A text that changes when what is held is changed in place."""
    return repr([*map(version_of, held)])


def _is_time(value: float) -> bool:
    """True for what a clock may have shown to this process, or will show within a year."""
    age = time.time() - psutil.Process().create_time()
    return abs(value - time.time()) < 3e7 or abs(value - time.perf_counter()) < age


def words_in(name: str) -> tuple[list[str], list[str]]:
    """The words of a variable with its attributes, and those of the key of an entry."""
    path, _, entry = name.partition("[")
    return re.findall(r"\w+", path.rpartition(": ")[2]), re.findall(r"\w+", entry)


def _owners(name: str, is_variable: bool) -> set[Carried]:
    """The names by which code may change a value, or an object that holds it."""
    words, keys = words_in(name)
    if is_variable:
        return {Carried(words[-1]), Carried(words[-1], "own")}
    values = {Carried(word) for word in words[-1:] + keys[-1:]}
    return values | {Carried(words[0], "object")} | {Carried(word, "attribute") for word in words + keys}


def _count(text: str) -> int:
    """The number of entries in the text of a container; 0 in any other."""
    return int(found[1]) if (found := re.match(r"(\d+) entries", text)) else 0


def _give(found: Variables, states: Mapping[str, Any]) -> None:
    for name, state in states.items():
        if name in found.generators:
            set_encoded_state(found.generators[name], state)


_SWITCH = re.compile(r"True|False|None|-?\d+|['\"].*", re.DOTALL)
"""The text of a value that a step may switch back to what it was at first, such as every second step."""


class UnheldPlaces:
    """The places that the model and the loss read and no checkpoint holds: globals, variables of functions, attributes
    of classes, functions and hooks. A checkpoint notes those that the loop has changed.

    A resumed run has lost such a place if its value is again that of the run's beginning.
    """

    def __init__(self, *, is_main: bool) -> None:
        self._is_main = is_main
        self._resumed: dict[str, list[str]] = {}
        """The notes of a checkpoint, see ``capture``, on places that were not looked at yet."""
        self._was_inside = False
        """True if it was written within an epoch."""
        self._roots: dict[str, Callable[[], Any]] = {}
        self._first: dict[str, str] = {}
        """The texts at the first rehearsal of all, over all resumes."""
        self._start: dict[str, str] = {}
        """The texts at the newest rehearsal after the first epoch."""
        self._moved: set[str] = set()
        """The places that calls themselves change, without the keys of entries."""

    def look(self, state: RunState, roots: Mapping[str, Any], found: Snapshot, moved: set[str]) -> list[str]:
        """Takes what a rehearsal has looked at; returns what a stop has lost, and warns of what it may have lost."""
        self._roots |= {name: reference(root) for name, root in roots.items()}
        self._moved |= moved
        lost: list[str] = []
        uncertain: list[str] = []
        for name in sorted(self._resumed.keys() & found.texts.keys()):
            first, saved, start = self._resumed.pop(name)
            self._first[name] = first
            is_set_anew = not self._was_inside and start == first  # where an epoch begins
            if found.texts[name] == first and not is_set_anew and without_key(name) not in self._moved:
                is_certain = self._was_inside and not _SWITCH.fullmatch(first)
                (lost if is_certain else uncertain).append(f"{name} ({first}, was {saved})")
        self._first = {**found.texts, **self._first}
        if state.position.epoch:
            self._start = found.texts
        if uncertain and self._is_main:
            logger.warning(
                "The model or the loss reads %s, which is what it was at the start of the run and not what it was at "
                "the checkpoint. Unless that is right, keep it in run.extra and give it back before run.batches.",
                shorten(uncertain, 3),
            )
        return lost

    def resume(self, stored: Mapping[str, Sequence[str]], *, inside: bool) -> None:
        """Takes what ``capture`` gave; ``inside``: it did so within an epoch."""
        self._resumed = {name: [str(first), str(saved), str(start)] for name, (first, saved, start) in stored.items()}
        self._was_inside = inside

    def capture(self, state: RunState) -> dict[str, list[str]]:
        """By place: the first value, the value now, and the value at the start of an epoch (empty if unknown)."""
        roots = {name: root for name, each in self._roots.items() if (root := each()) is not None}
        modules = state.parts.model, state.model.module, *state.parts.modules
        known = [each for module in modules for each in module.buffers()]
        now = Snapshot(roots, known, restorable=False)
        found = {
            name: [self._first[name], text, self._start.get(name, "")]
            for name, text in now.texts.items()
            if self._first.get(name, text) != text and without_key(name) not in self._moved
            if not (text.startswith(ALIAS) or self._first[name].startswith(ALIAS))  # it has another name, too
        }
        if not found:
            return dict(self._resumed)
        is_held, of_loop = held_places(state.parts.model), state.loop.seen_in(now)
        changed = {name: each for name, each in found.items() if name not in of_loop and not is_held(name)}
        return {**self._resumed, **changed}
