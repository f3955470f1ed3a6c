"""The state that the user's own loop keeps in variables, which no checkpoint holds.

    frames of the user's code,      main         rng, step, history, ema, ...
    the outermost first             Task.train   self.best, ...
                                    Lockstep     run.batches, run.save, ...

Generators of random numbers are stored in checkpoints and given back. Of other variables that the loop will read again
(``live_names``) a checkpoint notes the values. Where a resumed loop begins again with those of the run's beginning, it
has lost them: they are named in a warning, and refused where the loss reads them, or a data set holds them.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from inspect import GEN_CREATED, getgeneratorstate
from types import FrameType, FunctionType, GeneratorType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lockstep.core.fingerprint import sum_of_bits
from lockstep.data.keyed import encoded_state, set_encoded_state
from lockstep.errors import ConfigError
from lockstep.numerics.hidden_state import (
    NAMESPACES,
    Snapshot,
    attributes_of,
    is_closed,
    is_users_code,
    is_users_module,
)
from lockstep.numerics.value_text import is_plain, text_of_plain
from lockstep.run.loop_code import (
    Entry,
    Lost,
    changed_by_reading,
    changed_since,
    globals_of,
    live_in,
    names_ahead,
    state_of,
    users_frames,
)
from lockstep.run.optimizer_step import PreparedOptimizer
from lockstep.strategies.absent import AbsentTensor
from lockstep.text import shorten

logger = logging.getLogger(__name__)

_MOST_PLACES, _MOST_ENTRIES, _MOST_DEPTH = 2_000, 64, 4
_MOST_BYTES, _SAMPLE = 1 << 20, 4_096
"""Of a tensor or array that is read; the numbers out of a larger one."""
_VARIABLE = re.compile(r"\.(?!<)(?![^ ]*: )|\[")
"""Where the name of a variable of a frame ends, and that of an attribute or entry begins."""
_CONFIGS = ("omegaconf.", "ml_collections.")
"""Installed packages whose objects hold the user's numbers."""


@dataclass
class Variables:
    """The variables of the user's frames at a moment."""

    known: Collection[int]
    """The ids of objects that checkpoints hold."""
    texts: dict[str, str] = field(default_factory=dict)
    """Values by the name of the variable, with attributes and entries, as text that is equal where values are."""
    values: dict[str, Any] = field(default_factory=dict)
    """The values themselves."""
    plain: dict[str, Entry] = field(default_factory=dict)
    """Values that are plain."""
    tensors: dict[str, list[Any]] = field(default_factory=dict)
    """Of each variable that is a tensor: it; of one that is a module: it, and its tensors."""
    generators: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    """Those that ``run.prepare`` was not given."""
    with_values: set[str] = field(default_factory=set)
    """Tensors, arrays, modules, and lists of many plain values."""
    of_data: set[str] = field(default_factory=set)
    """Those that data sets hold."""
    local: set[str] = field(default_factory=set)
    """Variables of the frames. Of attributes and globals no code tells whether they are set before they are read."""
    read: set[str] = field(default_factory=set)
    """Those of them that are read before they are set, as their code tells."""
    live: set[str] = field(default_factory=set)
    """Those that the frames will read before they set them anew, as far as code tells that."""
    renewed: set[str] = field(default_factory=set)
    """See ``renew_floats``."""
    _is_live: bool = True
    _is_in_data: bool = False
    _noted: list[str] = field(default_factory=list)
    _seen: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By the id of an object, the first and the last of what was noted of it, and of what it holds."""

    @classmethod
    def of_loop(cls, known: Collection[int]) -> Variables:
        """Looks at the frames that are running."""
        found, frames = cls(known), list(users_frames())
        variables: list[tuple[str, Any, bool, Any]] = []
        for frame, live in zip(frames, live_in(frames)):
            code = frame.f_code
            is_script = code.co_name == "<module>"
            owner = "" if is_script else f"{code.co_qualname}: "
            variables += [
                (f"{owner}{name}", value, name in live, frame.f_globals if is_script else code.co_qualname)
                for name, value in _copied(frame.f_locals.items())
                if not name.startswith("__")
            ]
        read = {id(value) for _, value, is_live, _ in variables if is_live}  # by another frame, perhaps
        for name, value, is_live, holder in variables:
            found.local.add(name)
            found.read |= {name} if is_live else set()
            found._is_live = is_live or id(value) in read
            found._look(value, name, holder, name.rpartition(": ")[2])
        found._is_live = True
        for frame in frames:
            for name in globals_of(frame.f_code, frame.f_globals):
                if name in found.texts:
                    found.live.add(name)  # functions may read what the code of the module does not
                else:
                    found._look(frame.f_globals[name], name, frame.f_globals, name)
        return found

    def renew_floats(self, names: Collection[str]) -> None:
        """Puts an equal float in the place of each that an object, a dict or a list holds: what is set anew shows."""
        for name in names & self.plain.keys():
            holder, key, value = self.plain[name]
            if type(value) is not float:
                continue
            renewed = value * 1.0
            if isinstance(holder, dict):
                dict.__setitem__(holder, key, renewed)
            elif isinstance(holder, list):
                list.__setitem__(holder, key, renewed)
            else:
                continue
            self.plain[name], self.values[name] = Entry(holder, key, renewed), renewed
            self.renewed.add(name)

    def _look(
        self, value: Any, name: str, holder: Any, key: Any, depth: int = 0, only_tensors: bool = False
    ) -> None:
        """Notes a value and what it holds. ``only_tensors``: no numbers, as of objects of installed packages."""
        if value is None or is_plain(value):
            if not only_tensors:
                self._note(name, text_of_plain(value), value)
                self.plain[name] = Entry(holder, key, value)
            return
        if id(value) in self.known or len(self._seen) > _MOST_PLACES:
            return
        start = len(self._noted)
        first, last = self._seen.setdefault(id(value), (start, start))
        self._mark(self._noted[first:last])  # it may have been found as a variable that is read no more
        if first == start:
            self._look_into(value, name, depth, only_tensors)
            self._seen[id(value)] = start, len(self._noted)

    def _look_into(self, value: Any, name: str, depth: int, only_tensors: bool) -> None:
        kind = type(value)
        if issubclass(kind, Optimizer) and not issubclass(kind, PreparedOptimizer):
            self.optimizers[name] = value
            self._mark([name])
        if issubclass(kind, Tensor):
            if not issubclass(kind, nn.Parameter | AbsentTensor) and value.is_leaf and value.numel():
                self.tensors[name] = [value]
                self._note(name, self._text_of(value), value, has_values=True)
        elif issubclass(kind, np.ndarray):
            self._array(value, name)
        elif (state := encoded_state(value)) is not None:
            if not self._is_in_data:  # reading samples draws from it
                self.generators[name] = value
                self._note(name, _digest(repr(state).encode()), value)
        elif issubclass(kind, nn.Module):
            self._module(value, name)
        elif issubclass(kind, GeneratorType):
            is_new = getgeneratorstate(value) == GEN_CREATED
            self._note(name, "an iterator at its beginning" if is_new else "an iterator", value)
        elif issubclass(kind, _BaseDataLoaderIter):
            self._note(name, f"after {value._num_yielded} batches", value)
        elif depth >= _MOST_DEPTH:
            return
        elif issubclass(kind, FunctionType):
            if is_users_code(value.__code__, value.__module__ or ""):
                for key, held in _copied(vars(value).items()):
                    self._look(held, f"{name}.{key}", vars(value), key, depth + 1, only_tensors)
        elif issubclass(kind, list | tuple | deque | dict):
            content = _content_of(value, 0 if self._is_in_data else _MOST_ENTRIES)
            if content or not (only_tensors or self._is_in_data):  # what a data set has read may fill a cache
                self._note(name, f"{len(value)} entries{content}", value, has_values=bool(content))
            entries = dict.items(value) if issubclass(kind, dict) else enumerate(value)
            is_read = len(value) <= _MOST_ENTRIES and not (content and self._is_in_data)
            for key, held in _copied(entries) if is_read else ():
                entry = f"{name}[{key!r}]" if is_plain(key) else f"{name}[...]"
                self._look(held, entry, value, key, depth + 1, only_tensors)
        elif issubclass(kind, DataLoader):
            self._look(value.dataset, f"{name}.dataset", vars(value), "dataset", depth + 1)
        elif kind.__module__.partition(".")[0] == "pandas" and hasattr(kind, "iloc"):
            self._table(value, name)
        elif issubclass(kind, Dataset) or not is_closed(value):
            self._attributes(value, name, depth, only_tensors)

    def _attributes(self, value: Any, name: str, depth: int, only_tensors: bool) -> None:
        kind, held = type(value), attributes_of(value)
        is_data = issubclass(kind, Dataset) or (hasattr(kind, "__getitem__") and hasattr(kind, "__len__"))
        was_in_data, self._is_in_data = self._is_in_data, self._is_in_data or is_data
        is_open = is_users_module(kind.__module__) or issubclass(kind, NAMESPACES)
        foreign = only_tensors or not (is_open or kind.__module__.startswith(_CONFIGS))
        own: Collection[str] = changed_by_reading(kind) if is_data else ()  # type: ignore[arg-type]
        for key, each in _copied(held.items()):
            if key not in own:
                self._look(each, f"{name}.{key}", held, key, depth + 1, foreign)
        self._is_in_data = was_in_data

    def _table(self, table: Any, name: str) -> None:
        """Notes a table or a column of pandas."""
        with suppress(Exception):  # entries that have no hash
            some = table.iloc[:: max(1, len(table) // _SAMPLE)]
            content = sys.modules["pandas"].util.hash_pandas_object(some).to_numpy().tobytes()
            self._note(name, f"{table.shape} of digest {_digest(content)}", table, has_values=True)

    def _text_of(self, tensor: Tensor) -> str:
        version = "" if tensor.is_inference() else f"version {tensor._version}"
        is_read = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not is_read or not tensor.is_cpu or tensor.is_quantized:  # the host would wait for another device
            return version
        if tensor.numel() == 1:
            return f"tensor({tensor.item()!r})"
        if tensor.nbytes > _MOST_BYTES:
            if not tensor.is_contiguous():
                return version
            tensor = tensor.detach().view(-1)[:: tensor.numel() // _SAMPLE]
            return f"{version}, a sample of sum {int(sum_of_bits(tensor)):x}"
        return f"{list(tensor.shape)} of sum {int(sum_of_bits(tensor)):x}"

    def _array(self, array: Any, name: str) -> None:
        if not (array.dtype.hasobject or _is_on_disk(array)):
            step = 1 if array.nbytes <= _MOST_BYTES else array.size // _SAMPLE
            content = np.ascontiguousarray(array.flat[::step]).tobytes()
            self._note(name, f"{list(array.shape)} of digest {_digest(content)}", array, has_values=True)

    def _module(self, module: nn.Module, name: str) -> None:
        """One text of all tensors of a module, such as a copy of the model that follows it, and one of each number."""
        tensors = [*module.parameters(), *module.buffers()]
        tensors += [
            held for each in module.modules() for held in vars(each).values() if isinstance(held, Tensor)
        ]
        if tensors and not any(id(tensor) in self.known for tensor in tensors):
            content = repr([self._text_of(tensor) for tensor in tensors])
            self.tensors[name] = [module, *tensors]
            self._note(name, f"tensors of digest {_digest(content.encode())}", module, has_values=True)
        for path, each in module.named_modules(prefix=name):
            for key, held in _copied(vars(each).items()) if id(each) not in self.known else ():
                if is_plain(held) and key != "training" and not key.startswith("_"):
                    self._note(f"{path}.{key}", text_of_plain(held), held)
                    self.plain[f"{path}.{key}"] = Entry(vars(each), key, held)

    def _note(self, name: str, text: str, value: Any, *, has_values: bool = False) -> None:
        self.texts[name], self.values[name] = text, value
        if has_values:
            self.with_values.add(name)
        self._noted.append(name)
        self._mark([name])

    def _mark(self, names: Iterable[str]) -> None:
        if self._is_live:
            self.live.update(names)
        if self._is_in_data:
            self.of_data.update(names)


def _is_on_disk(array: Any) -> bool:
    """True for an array, or a view of one, whose values would be read from a file."""
    return isinstance(array, np.memmap) or (isinstance(array, np.ndarray) and _is_on_disk(array.base))


def _content_of(entries: Any, least: int) -> str:
    """A digest of more than ``least`` entries, or some of them, if they are plain or hold such, as (path, label)."""
    if len(entries) <= least:
        return ""
    every = _copied(dict.items(entries)) if isinstance(entries, dict) else entries
    some = list(itertools.islice(every, 0, None, max(1, len(entries) // _SAMPLE)))
    parts = [part for each in some for part in (each if type(each) in (list, tuple) else (each,))]
    plain = [part if part is None or is_plain(part) else "..." for part in parts]
    is_read = any(part is not None and is_plain(part) for part in parts)
    return f" of digest {_digest(repr(plain).encode())}" if is_read else ""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


class LoopState:
    """The state that the loop keeps, over a stop and a resume; ``known``: the ids of objects that checkpoints hold."""

    def __init__(self, known: Collection[int], *, is_main: bool) -> None:
        self._known, self._is_main = known, is_main
        self.lost: dict[str, Lost] = {}
        """By the names of variables."""
        self.unsaved: list[str] = []
        """Optimizers of the loop that step parameters of the run with a state that no checkpoint holds."""
        self._first: dict[str, str] = {}
        """When the run began; that of the first process, over all resumes."""
        self._start: dict[str, str] = {}
        """When the steps of the current epoch began."""
        self._at_epoch: dict[str, Any] = {}
        """The generators' states when the current epoch began."""
        self._at_end: dict[str, str] = {}
        """The texts when the steps of the last epoch had ended; those after evaluations of what these have changed."""
        self._set_between: set[str] = set()
        """Those that data sets hold and the loop has changed between two epochs."""
        self._stored: Mapping[str, Any] = {}
        self._inside = self._in_epochs = False
        self._resumed: tuple[Variables, dict[str, str], dict[FrameType, int]] | None = None
        """The values of a resumed run where its first epoch begins, the states of tensors, and where its frames are."""
        self._untouched: set[str] = set()
        """Those that the loop's own code has not set since then."""
        self._generators: dict[str, Any] = {}
        """Those that there were when the steps of the current epoch began."""
        self._walks = 0
        """How often steps of an epoch have begun, over all resumes."""

    def resume(self, stored: Mapping[str, Any], *, inside: bool) -> None:
        """Takes what ``capture`` gave. ``inside``: the checkpoint was written while an epoch's batches were read."""
        maps = ("first", "start", "saved", "at_epoch", "generators")
        self._stored = {**stored, **{name: dict(stored[name]) for name in maps}} if stored else {}
        self._inside, self._in_epochs = inside, False
        self._first, self._walks = dict(stored.get("first", {})), stored.get("walks", 0)
        self._set_between = set(stored.get("set_between", ()))

    def begin_epoch(self) -> None:
        """Gives generators what they had here, once after a resume; called where ``run.epochs`` gives an epoch."""
        found = Variables.of_loop(self._known)
        if self._stored and not self._in_epochs:
            _give(found, self._stored["at_epoch" if self._inside else "generators"])
            found.renew_floats(self._stored["saved"].keys())
            states = {name: state_of(held) for name, held in found.tensors.items()}
            self._resumed = found, states, {frame: frame.f_lasti for frame in users_frames()}
        self._in_epochs = True
        self._at_epoch = {name: encoded_state(each) for name, each in found.generators.items()}

    def begin_steps(self) -> None:
        """Notes what the loop has before the steps of an epoch; warns of what a resumed run has lost."""
        found, stored = Variables.of_loop(self._known), self._stored
        if stored:
            if self._inside:
                _give(found, stored["generators"])
            elif not self._in_epochs:
                self._give_without_epochs(found)
            self._untouched = self._untouched_in(found) if self._resumed and self._in_epochs else set()
            self._resumed = None
            found.renew_floats(stored["saved"].keys())
            lost = self._lost(found)
            self._require_generators(found, lost)
            self._require_data(lost)
            self.lost = {name: _lost_of(found, name) for name in lost if self._is_certain(name)}
            if lost and self._is_main:
                words = [
                    f"{name} (other values)" if name in found.with_values else f"{name} ({now}, was {before})"
                    for name, (before, now) in lost.items()
                ]
                logger.warning(
                    "The loop goes on to read variables that are not what they were at the checkpoint: %s. What "
                    "depends on them is not what it would have been without the stop. Keep them in run.extra, which "
                    "checkpoints hold, and give modules to run.prepare.",
                    shorten(words, 5),
                )
            self._stored = {}
        self._first = {**found.texts, **self._first}
        self._note_data(found)
        self._start, self._generators, self._at_end = found.texts, found.generators, {}
        self._walks += 1

    def end_steps(self) -> None:
        """Notes what the loop has when the steps of an epoch have ended."""
        self._at_end = Variables.of_loop(self._known).texts

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around an evaluation: what data sets then change by themselves, such as a cache, is not the loop's doing."""
        before = Variables.of_loop(self._known).texts.items() if self._at_end else None
        yield
        if before is not None:
            self._at_end |= dict(Variables.of_loop(self._known).texts.items() - before)

    def seen_in(self, found: Snapshot) -> set[str]:
        """The names that a snapshot has for what variables hold that the loop goes on with: ``capture`` notes these."""
        variables, ahead, of_inner = Variables.of_loop(self._known), set[str](), set[str]()
        for frame in reversed(list(users_frames())):
            code = frame.f_code
            owner = "" if code.co_name == "<module>" else f"{code.co_qualname}: "
            named = names_ahead(code, frame.f_lasti) | of_inner & {*code.co_cellvars, *code.co_freevars}
            ahead |= {f"{owner}{name}" for name in named}
            of_inner = named.intersection(code.co_freevars)
        names = [n for n in variables.texts if n in variables.live or _VARIABLE.split(n)[0] in ahead]
        entries = [variables.plain[name].place for name in names if name in variables.plain]
        objects = [found.name_of(variables.values[name]) for name in names]
        return {*objects, *(found.places[place][0] for place in entries if place in found.places)}

    def _note_data(self, found: Variables) -> None:
        """Notes what the loop has changed in data sets since the steps ended."""
        end, names = self._at_end, found.of_data & (found.with_values | found.plain.keys())
        self._set_between |= {name for name in names if end.get(name, found.texts[name]) != found.texts[name]}

    def _give_without_epochs(self, found: Variables) -> None:
        """Gives generators what they had at the end of an epoch, where nothing told that the next one begins."""
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

    def _lost(self, found: Variables) -> dict[str, tuple[str, str]]:
        """The variables that begin anew: what they were at the checkpoint, and what they are."""
        lost, stored = {}, self._stored
        times = stored["saved"], self._first, stored["start"]
        for name, text in found.texts.items():
            before, first, start = (each.get(name) for each in times)
            is_set_first = name in found.local and name not in found.live
            if before in (None, text) or name in found.generators or is_set_first:
                continue
            begins_anew = text == first or (self._inside and text == start)
            # What is set anew in each epoch has the same value at the start of every one.
            is_untouched = name in self._untouched
            is_lost = begins_anew and (
                self._inside or name in stored["read"] or is_untouched or start != first
            )
            if name in found.with_values:  # a copy of the model may begin with other values
                is_set = self._in_epochs and not is_untouched  # at the start of an epoch
                is_lost = self._inside or (not is_set and (is_lost or self._in_epochs or before == first))
            if is_lost:
                lost[name] = before, text
        return lost

    def _require_data(self, lost: Collection[str]) -> None:
        """Refuses data sets that are not as the loop had left them."""
        if names := sorted(filter(self._is_certain, self._set_between & set(lost))):
            raise ConfigError(
                f"The loop had changed {shorten(names, 3)} in a data set when the checkpoint was written, and no "
                "checkpoint holds that: this resumed run would go on with other samples. Keep what the loop changes in "
                "run.extra, and give it back to the data set before run.batches."
            )

    def _require_generators(self, found: Variables, lost: Collection[str]) -> None:
        """Refuses, or warns of, generators that are not there yet, so that they cannot get their states back."""
        missing = self._stored["generators"].keys() - found.generators.keys()
        if names := sorted(missing & set(lost)):
            raise ConfigError(
                f"The loop draws random numbers from {shorten(names, 3)}, which is not there yet where this resumed "
                "run goes on, so it would draw others. Make the generator before the loop over run.batches."
            )
        if (names := sorted(missing - set(self._stored["local"]))) and self._is_main:
            logger.warning(
                "%s had drawn random numbers when the checkpoint was written, and is not there yet. If it is not made "
                "anew in each step, make it before the loop over run.batches, so that it can go on.",
                shorten(names, 3),
            )

    def _is_certain(self, name: str) -> bool:
        """False where the start of an epoch may set it: the next one then gets its own value, as a curriculum's."""
        is_carried = name in self._stored["read"] or name in self._untouched
        return self._inside or is_carried or (not self._in_epochs and name not in self._stored["plain"])

    def _untouched_in(self, found: Variables) -> set[str]:
        """Those that the loop's own code has not set since the epoch began, as far as objects and that code tell it."""
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

    def _is_noted(self, name: str, found: Variables) -> bool:
        """True for what has changed since the run began, and for what a resumed run may compute from other weights."""
        first = self._first.get(name)
        return first is not None and (name in found.with_values or first != found.texts[name])

    def capture(self) -> dict[str, Any]:
        """The part of a checkpoint that is of the loop; called from within it."""
        if not self._start:
            return {}
        found = Variables.of_loop(self._known)
        self.unsaved = [
            f"{name} ({type(each).__name__})"
            for name, each in found.optimizers.items()
            if name in found.live and each.state
            if any(id(p) in self._known for group in each.param_groups for p in group["params"])
        ]
        if self._at_end:
            self._note_data(found)
        noted = {name: found.texts[name] for name in found.live if self._is_noted(name, found)}
        # A thread, or a function that has ended, may have had the others.
        generators = {**self._generators, **found.generators}
        return {
            "first": {name: self._first[name] for name in noted},
            "start": {name: self._start[name] for name in noted if name in self._start},
            "saved": noted,
            "read": sorted(found.read & noted.keys()),
            "plain": sorted(found.plain.keys() & noted.keys()),
            "at_epoch": self._at_epoch,
            "generators": {name: encoded_state(each) for name, each in generators.items()},
            "fresh": sorted(name for name in generators if self._start.get(name) == self._first.get(name)),
            "local": sorted(found.local & generators.keys()),
            "set_between": sorted(self._set_between),
            "walks": self._walks,
        }


def _copied(entries: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """The entries; none of a container that another thread is changing."""
    try:
        return list(entries)
    except RuntimeError:
        return []


def _lost_of(found: Variables, name: str) -> Lost:
    value, held = found.values[name], found.tensors.get(name, [])
    held = [value] if isinstance(value, list | dict | deque | np.ndarray) else held
    return Lost(held, found.plain.get(name), state_of(held))


def _give(found: Variables, states: Mapping[str, Any]) -> None:
    for name, state in states.items():
        if name in found.generators:
            set_encoded_state(found.generators[name], state)
