"""Random numbers of a sample, computed from its key instead of drawn from a stream, and the check that they all are.

Code that draws from torch, NumPy or ``random`` finds the three generators seeded for the sample it works on
(about 9 microseconds). Code of ours takes its numbers from ``SampleKeys.uniforms``, which touches no
generator at all.
"""

from __future__ import annotations

import datetime
import io
import itertools
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lockstep.core.fingerprint import digest_tensor
from lockstep.core.plan import Indices, mix
from lockstep.core.seeding import sample_seeds
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

EVALUATION_EPOCH = -1
"""The epoch in the keys of samples that are evaluated: they look alike after every epoch of training."""

_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class SampleKeys:
    """The keys of the samples of one micro-batch."""

    seed: int
    """The run's seed."""
    epoch: int
    """The epoch, or ``EVALUATION_EPOCH``."""
    indices: Indices
    """The samples as the plan numbers them: within a ``Subset``, the subset's numbers."""

    def seeds(self) -> list[int]:
        """One 63-bit seed for each sample."""
        return sample_seeds(self.seed, self.epoch, self.indices.tolist())

    def uniforms(self, draws: int) -> npt.NDArray[np.float64]:
        """``draws`` numbers in [0, 1) for each sample, of shape (samples, draws).

        Row ``i`` depends only on the key of sample ``i``, so not on the micro-batch it is in. It is the
        sequence of SplitMix64 (Steele, Lea and Flood 2014) that starts at the sample's seed.
        """
        seeds = np.array(self.seeds(), dtype=np.uint64)[:, None]
        x = mix(seeds + np.arange(1, draws + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
        return np.asarray((x >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


def seed_generators(seed: int) -> None:
    """Seeds the generators of torch (CPU), NumPy, ``random``, OpenCV, Polars and numba with a 63-bit seed.

    torch and NumPy run the same Mersenne Twister from 32 bits, so they get different bits of the seed: with
    the same ones their streams would be copies of each other. In a loader worker, ``get_worker_info().seed`` is the
    seed, too: torch's own tells workers apart, so it would depend on which of them reads a sample.
    """
    if (worker := get_worker_info()) is not None:
        object.__setattr__(worker, "seed", seed)  # it is frozen
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed >> 31)
    random.seed(seed)
    # Compiled code cannot reach these three; numba's begin with numbers of the system's.
    if (cv2 := sys.modules.get("cv2")) is not None:
        cv2.setRNGSeed(seed >> 20 & 0x7FFFFFFF)
    if (polars := sys.modules.get("polars")) is not None:
        polars.set_random_seed(seed >> 11 & 0xFFFFFFFF)
    if (numba := sys.modules.get("numba._helperlib")) is not None:
        numba.rnd_seed(numba.rnd_get_np_state_ptr(), seed >> 15 & 0xFFFFFFFF)
        numba.rnd_seed(numba.rnd_get_py_state_ptr(), seed >> 7 & 0xFFFFFFFF)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Gives the three generators back the state they had before the block (about 80 microseconds)."""
    states = global_states()
    try:
        yield
    finally:
        set_global_states(states)


def global_states() -> tuple[Any, Any, Any]:
    """The states of torch's, NumPy's and Python's generator."""
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def set_global_states(states: tuple[Any, Any, Any]) -> None:
    """Gives the three generators the states that ``global_states`` returned."""
    torch.default_generator.set_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def encoded_states() -> list[Any]:
    """The states of the three generators as what JSON can hold, for another process."""
    of_torch, (name, keys, *place), (version, words, gauss) = global_states()
    return [of_torch.tolist(), [name, keys.tolist(), *place], [version, list(words), gauss]]


def set_encoded_states(states: Sequence[Any]) -> None:
    """Gives the three generators the states that ``encoded_states`` returned."""
    of_torch, (name, keys, *place), (version, words, gauss) = states
    of_numpy = name, np.array(keys, dtype=np.uint32), *place
    set_global_states((torch.tensor(of_torch, dtype=torch.uint8), of_numpy, (version, tuple(words), gauss)))


def encoded_state(generator: Any) -> Any:
    """The state of a generator of the user's own as what JSON can hold; None for anything else."""
    kind = type(generator)  # isinstance() may run code of objects that import themselves when looked at
    if issubclass(kind, torch.Generator):
        return generator.get_state().tolist()
    if issubclass(kind, np.random.Generator):
        return _listed(generator.bit_generator.state)
    if issubclass(kind, np.random.BitGenerator):
        return _listed(generator.state)
    if issubclass(kind, np.random.RandomState):
        return _listed(generator.get_state(legacy=False))
    if issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):  # which has no state
        version, words, gauss = generator.getstate()
        return [version, list(words), gauss]
    return None


def set_encoded_state(generator: Any, state: Any) -> None:
    """Gives a generator the state that ``encoded_state`` returned for one of the same kind."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(state, dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _like_own(generator.bit_generator.state, state)
    elif isinstance(generator, np.random.BitGenerator):
        generator.state = _like_own(generator.state, state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_like_own(generator.get_state(legacy=False), state))
    elif isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))


def _listed(state: Any) -> Any:
    """A state of NumPy with lists in place of arrays."""
    if isinstance(state, Mapping):
        return {key: _listed(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state


def _like_own(own: Any, state: Any) -> Any:
    """A state with arrays again where the generator's own has some."""
    if isinstance(own, Mapping):
        return {key: _like_own(own.get(key), value) for key, value in state.items()}
    return np.array(state, dtype=own.dtype) if isinstance(own, np.ndarray) else state


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
