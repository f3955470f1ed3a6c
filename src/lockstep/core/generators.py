"""The generators of random numbers of torch, NumPy and ``random``: seeded, kept, and stored as JSON."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info


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
