"""The check that samples depend on nothing but their keys: they are read twice, in other orders and at another time."""

from __future__ import annotations

import datetime
import io
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lockstep.core.fingerprint import digest_tensor
from lockstep.core.generators import encoded_state, global_states
from lockstep.core.users_code import is_users_function, is_users_module, names_in
from lockstep.core.values import (
    CONTAINERS,
    GLOBAL,
    OF_CLASS,
    VARIABLE,
    attributes_of,
    entries_in,
    inside,
    is_closed,
    is_plain,
    octets_of,
    parts_of_tensor,
    reached_from,
    refill,
    stored_in,
    text_of_octets,
    text_of_plain,
    text_of_table,
)
from lockstep.errors import DataError

_MOST_PLACES, _MOST_ENTRIES, _MOST_KEPT = 5_000, 64, 10_000
"""Of what a data set leads to; of a list or dict; of one whose entries are put back."""


def _led_to(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Values, not plain ones, to which objects and functions of the user's lead: path, value, whether it is theirs."""
    todo, seen = deque((*each, True) for each in roots.items()), dict[int, Any]()
    while todo and len(seen) < _MOST_PLACES:
        name, value, is_users = todo.popleft()
        if value is None or is_plain(value) or isinstance(value, _ENDS) or id(value) in seen:
            continue
        seen[id(value)] = value  # which stays, so that its identity is its own
        if not isinstance(value, CONTAINERS):
            is_function = isinstance(value, FunctionType)
            is_users = is_users_function(value) if is_function else is_users_module(type(value).__module__)
        yield name, value, is_users
        if encoded_state(value) is None:
            todo += [(part.path(name), part.value, is_users) for part in reached_from(value, _MOST_ENTRIES)]


def generators_of(roots: Mapping[str, Any]) -> dict[str, Any]:
    """The generators of random numbers to which objects and functions of the user's lead, by the path to each."""
    return {name: value for name, value, _ in _led_to(roots) if encoded_state(value) is not None}


def asks_for_worker(*roots: Any) -> bool:
    """True if functions of the user's to which these objects lead name torch's ``get_worker_info``."""
    found = [value for _, value, _ in _led_to({str(number): root for number, root in enumerate(roots)})]
    functions = [each for each in found if isinstance(each, FunctionType) and is_users_function(each)]
    is_held = any(each is get_worker_info for each in found)  # perhaps under another name
    return is_held or any("get_worker_info" in names_in(each.__code__) for each in functions)


def restorer_of(roots: Mapping[str, Any]) -> Callable[[], None]:
    """A function that puts back the entries, attributes and variables of the user's to which the roots lead.

    Tensors' values, large containers and objects of libraries stay: threads wait for a queue, a file has a position.
    """
    found = list[Callable[[], object]]()
    for value in (each for _, each, is_users in _led_to(roots) if is_users):
        for held in (value, attributes_of(value)):
            is_dict = isinstance(held, dict)
            if (is_dict or type(held) in (list, set, deque)) and len(held) <= _MOST_KEPT:
                found.append(partial(refill, held, dict(stored_in(held)) if is_dict else held.copy()))
        parts = reached_from(value, _MOST_ENTRIES)
        found += [partial(part.put, part.value) for part in parts if part.how in (VARIABLE, GLOBAL, OF_CLASS)]

    def put_back() -> None:
        for each in found:
            each()

    return put_back


def _keeps_a_place(value: Any) -> bool:
    """True for an open file, a connection and the like, whose own state goes on where ``restorer_of`` goes back."""
    if hasattr(value, "__dict__") or isinstance(value, (np.ndarray, *CONTAINERS)):
        return isinstance(value, io.IOBase)
    try:
        value.__reduce_ex__(4)
    except Exception:
        return True  # it has what Python cannot store
    return False


_COUNTS = (int, float)
_Numbers = list[tuple[dict[str, Any], str, float]]
"""Attributes that hold numbers: those of an object, the name, the value."""


class Rereading:
    """Reads samples twice under the same keys, to see that nothing is kept from one read to the next.

    What cannot be read is left to the read that follows.

    Args:
        roots: the data set and its collate function, by the words for them.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots, is_fixed = roots, any(_keeps_a_place(value) for _, value, _ in _led_to(roots))
        self._put_back = None if is_fixed else restorer_of(roots)
        """Puts the state before the first read back; None where a part of it could not go back."""
        self._generators: dict[str, Any] | None = None
        self._held: list[tuple[str, Callable[[], Any], Any, list[str]]] = []
        self._drew_once: list[str] = []

    def require_equal(self, name: str, read: Callable[[], Any], seed: int | None = None, times: int = 2) -> None:
        """Reads samples, and again.

        Args:
            name: of the samples, for the message.
            read: reads them, under the same keys each time.
            seed: that the generators get at the beginning of each read, where their draws are compared, too.
            times: how often; an order of few rows, drawn by a generator of one's own, may come twice by chance.

        Raises:
            DataError: values or draws differ. Of the draws two samples have to say so: the first may begin something.
        """
        try:
            data = read()
            first, drawn, states = content_of(data), _draws(seed), self._states()
            numbers = self._numbers()
            with _as_another_worker():
                again = [content_of(read()) for _ in range(times - 1)]
            redrawn = _draws(seed)
            own = [key for key, state in self._states().items() if states[key] != state]
            again += self._an_epoch_later(read, numbers)
        except DataError:
            return
        if any(other != first for other in again):
            raise DataError(
                f"{name} gave other values when it was read again with the same random seed: the data set, or its "
                "collate function, keeps something from one read to the next, such as a generator of its own, a "
                "counter, or samples that are changed in place; or it asks for the number of its worker. What a step "
                "trains on would depend on which process reads it, and what that has read before. Draw from torch, "
                "NumPy or random, which are seeded for each sample, and change copies."
                + (f" It draws from {own[0]}: {_SEED_IT}" if own else "")
            )
        if own:
            raise DataError(
                f"{name} draws random numbers from {own[0]}, a generator of its own, though not all of them change its "
                "values. How far that has drawn depends on which process has read what, and so would later samples. "
                f"Draw from torch, NumPy or random, which are seeded for each sample. If it is a library's, {_SEED_IT}"
            )
        self._held.append((name, read, data, first))
        if any(once != then and is_since() for (once, is_since), (then, _) in zip(drawn, redrawn)):
            self._drew_once.append(name)
        if len(self._drew_once) > 1:
            raise DataError(
                f"{name} drew other random numbers when it was read again with the same random seed, and gave the same "
                "values: the data set keeps what it has made of random numbers, as in a cache. In later epochs the "
                "values would depend on which process read it before. Keep what comes before the random part, or seed "
                "the part by the number of the sample."
            )

    def _numbers(self) -> _Numbers:
        held = [getattr(root, "__dict__", {}) for root in self._roots.values() if not isinstance(root, type)]
        return [(each, key, value) for each in held for key, value in each.items() if type(value) in _COUNTS]

    def _an_epoch_later(self, read: Callable[[], Any], numbers: _Numbers) -> list[Any]:
        """A further read, where reads change numbers, as if these had counted an epoch. Else, or if it fails, none."""
        reads = max([1, *(len(root) for root in self._roots.values() if isinstance(root, Sized))])
        found = [(own, key, own[key], then) for own, key, then in numbers if key in own]
        counts = [each for each in found if type(each[2]) in _COUNTS and each[2] != each[3] and self._put_back]
        for own, key, now, then in counts:
            own[key] = now + reads * (now - then)
        content = list[list[str]]()
        with suppress(DataError):
            content += [content_of(read())] if counts else []
        for own, key, now, _ in counts:
            own[key] = now
        return content

    def _states(self) -> dict[str, Any]:
        if self._generators is None:  # after a read, which may make them
            self._generators = generators_of(self._roots)
        return {name: encoded_state(each) for name, each in self._generators.items()}

    def require_kept(self) -> None:
        """Raises ``DataError`` where samples that were read are no longer what they were."""
        for name, _, data, content in self._held:
            if content_of(data) != content:
                raise DataError(
                    f"{name} changed when other samples were read: the data set or its collate function gives the same "
                    "memory again and again. The micro-batches of a step are held together. Return copies, for example "
                    "tensor.clone()."
                )

    def require_any_order(self) -> None:
        """Raises ``DataError`` where samples are others if those that were read later are the first to be read."""
        if self._put_back is None:
            return
        now = restorer_of(self._roots)
        held = [*self._held[-2::-1], *self._held[-1:]]  # the last may be all of them, collated
        self._put_back()
        later = self._contents(held)
        if differing := [each[0] for each, other in zip(held, later) if each[-1] != other]:
            self._put_back()
            if self._contents(self._held) != [each[-1] for each in self._held]:
                differing = []  # what has not gone back gives other values in the first order, too
        (self._put_back if differing else now)()
        if differing:
            raise DataError(
                f"{differing[0]} gave other values when it was read before others: the data set, or its collate "
                "function, keeps something of the first samples that it reads, such as the numbers that it gives to "
                "words or classes as it meets them, a mean, or an order that is drawn then. Which process reads what "
                "first depends on their number. Make it from the whole data set, before run.batches."
            )

    def require_no_time(self) -> None:
        """Raises ``DataError`` where samples are others a second later, if the code of the data set asks for the time.

        A seed such as ``int(time.time())`` is the same in two reads that follow each other.
        """
        functions = (value for _, value, _ in _led_to(self._roots) if isinstance(value, FunctionType))
        if not any(names_in(each.__code__) & _CLOCKS for each in functions if is_users_function(each)):
            return
        time.sleep(1 - time.time() % 1)
        for (name, *_, content), now in zip(self._held, self._contents(self._held)):
            if content != now:
                raise DataError(
                    f"{name} gave other values when it was read again a second later: the data set, or its collate "
                    "function, makes its samples of the time, for example a seed. Each run would train on others. Draw "
                    "from torch, NumPy or random without a seed of your own: they are seeded for each sample."
                )

    def _contents(self, held: Iterable[tuple[str, Callable[[], Any], Any, list[str]]]) -> list[list[str]]:
        """The contents of samples that are read again in this order, until one fails."""
        found = list[list[str]]()
        with suppress(DataError):
            for _, read, _, _ in held:
                found.append(content_of(read()))
        return found


_CLOCKS = {"time", "time_ns", "now", "utcnow", "today"}
"""Of the modules time and datetime, by which code makes seeds."""
_SEED_IT = (
    "seed it by torch before each use, such as self.transform.set_random_seed(int(torch.randint(2**31, ()))) of "
    "albumentations, or transform.set_random_state(seed) of MONAI."
)


@contextmanager
def _as_another_worker() -> Iterator[None]:
    """In a loader worker: code that asks for the worker's number gets that of another worker, if there are several."""
    worker = get_worker_info()
    if worker is None:
        yield
        return
    number = worker.id
    try:
        object.__setattr__(worker, "id", (number + 1) % worker.num_workers)
        yield
    finally:
        object.__setattr__(worker, "id", number)


_MOST_TURNS = 2_000
_WORDS = 624
"""Of the state of a Mersenne Twister; each turn makes new ones."""


def _draws(seed: int | None) -> list[tuple[Any, Callable[[], bool]]]:
    """The states of torch, NumPy and ``random``, and whether each has only drawn since ``seed_generators(seed)``.

    To find that takes 0.2 s for a generator that a data set seeds itself, so it is asked of states that differ only.
    """
    if seed is None:
        return []
    of_torch, (_, of_numpy, at, *_), (_, (*words, place), _) = global_states()
    given, of_random = torch.default_generator.initial_seed(), np.array(words, dtype=np.uint32)
    return [
        (of_torch.numpy().tobytes(), lambda: given == seed),
        ((of_numpy.tobytes(), at), lambda: _leads_to(np.random.RandomState(seed >> 31), of_numpy)),
        ((words, place), lambda: _leads_to(_as_numpys(random.Random(seed).getstate()[1]), of_random)),
    ]


def _as_numpys(state: Sequence[int]) -> np.random.RandomState:
    found = np.random.RandomState(0)
    found.set_state(("MT19937", np.array(state[:-1], dtype=np.uint32), state[-1], 0, 0.0))
    return found


def _leads_to(begun: np.random.RandomState, words: npt.NDArray[np.uint32]) -> bool:
    for turn in range(_MOST_TURNS):
        if np.array_equal(begun.get_state(legacy=False)["state"]["key"], words):
            return True
        begun.bytes(4 * (_WORDS if turn else 1))
    return False


def content_of(data: Any, depth: int = 8, within: tuple[int, ...] = (), seen: Iterator[int] | None = None) -> list[str]:
    """Digests of the arrays, and texts of the numbers and strings, in data of any depth.

    Of objects, such as a dataclass or a graph, it is what their attributes hold, texts and times aside.

    Args:
        depth: of objects in objects.
        within: the ids of what the data are in, which they may refer to again.
        seen: counts what is entered: there are many ways through a graph of objects.
    """
    if isinstance(data, Tensor):
        return [digest_tensor(part) for part in parts_of_tensor(data)]
    if isinstance(data, np.ndarray) and not data.dtype.hasobject:
        mask = [np.ma.getmaskarray(data)] if isinstance(data, np.ma.MaskedArray) else []
        arrays = [np.ascontiguousarray(each).view(np.uint8) for each in (np.asarray(data), *mask)]
        return [digest_tensor(torch.from_numpy(each.copy())) for each in arrays]
    if (octets := octets_of(data)) is not None:
        return [text_of_octets(octets)]
    if id(data) in within:
        return ["itself"]
    seen = seen or itertools.count()
    inner = partial(content_of, depth=depth, within=(*within, id(data)), seen=seen)
    if isinstance(data, set | frozenset):
        return sorted(repr(inner(value)) for value in stored_in(data))
    if isinstance(data, Mapping):
        return [text for key, value in stored_in(data) for text in (repr(key), *inner(value))]
    if isinstance(data, list | tuple | deque | np.ndarray):
        return [text for _, value in entries_in(data) for text in inner(value)]
    if is_plain(data):
        return [text_of_plain(data) if type(data) is int else repr(data)]
    if text := text_of_table(data):
        return [text]
    if isinstance(data, _CLOSED) or not depth or next(seen) > _MOST_ENTERED:
        return []
    held = {each.name: getattr(data, each.name, None) for each in fields(data)} if is_dataclass(data) else {}
    held |= attributes_of(data) if is_closed(data) else {part.key: part.value for part in inside(data)}
    return [
        text
        for value in held.values()
        if not isinstance(value, str | bytes | datetime.date | datetime.time)
        for text in inner(value, depth=depth - 1)
    ]


_MOST_ENTERED = 10_000
_CLOSED = (type, ModuleType, FunctionType, Dataset, DataLoader, torch.nn.Module)
"""Objects that a sample may refer to and that are not its content."""
_ENDS = (Tensor, ModuleType, CodeType)
"""Values that lead to no generator."""
