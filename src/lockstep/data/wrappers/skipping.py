"""Takes another sample in place of one that cannot be read, notes it, and stops where there are too many.

    asked for   5   9   2   7                  sample 2 cannot be read
    read        5   9   s   7                  s = the stand-in of 2: a pure function of its number and the set's size

The stand-in depends on no process, worker, step or epoch, so every layout trains on the same bits. Where the stand-in
cannot be read either, its second one is tried, and so on. What is random about it is keyed by the sample that was
asked for. A skipped sample is noted in memory that the workers share with the process that started them.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.core.plan import Indices
from lockstep.core.seeding import derive_seed
from lockstep.data.keyed import SampleKeys
from lockstep.data.labels import known_labels
from lockstep.data.naming import path_of, sample_name
from lockstep.data.reader import BrokenSample
from lockstep.data.wrappers.wrapping import Wrapping, behind
from lockstep.errors import ConfigError, DataError

MOST_SKIPPED = 0.01
_TRIES = 8


class SkipBroken(Wrapping):
    """Reads ``dataset`` and replaces each sample that raises by another one.

    A run counts what was skipped in an epoch, over all processes and before every step. It lists the samples, and stops
    with a ``DataError`` at the same step on any world size, once there are more than ``most`` allows.

    Args:
        dataset: a map-style data set, for training; put it around ``Weighted`` or ``Bucketed``, not into them.
        most: the part of the set that may be skipped in one epoch; 0.01 is one sample of a hundred.
    """

    outermost = True

    def __init__(self, dataset: Any, most: float = MOST_SKIPPED) -> None:
        super().__init__(dataset)
        if not 0 <= most < 1:
            raise ConfigError(f"SkipBroken has most={most:g}; it must be a fraction of at least 0 and below 1.")
        self.most = most
        self._forget()

    def __getitem__(self, index: int) -> Any:
        """The sample, or its stand-in."""
        asked, number = int(index), int(index)
        for attempt in range(_TRIES):
            try:
                return self.dataset[number]
            except (ConfigError, MemoryError):
                raise
            except Exception as error:
                number = self._replaced(asked, attempt, error)
        raise self._hopeless(asked)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_noted"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def labels(self) -> npt.NDArray[np.int64] | None:
        """Those of the inner set, where it shows them."""
        return known_labels(self.dataset)

    @property
    def keeps_order(self) -> bool:
        """True if the inner set has an order of its own, see ``Bucketed``."""
        return bool(getattr(self._inner, "keeps_order", False))

    @property
    def get_batch(self) -> Callable[[Indices, SampleKeys], Any] | None:
        """Reads a whole micro-batch, where the inner set can."""
        return None if self.inner_batch() is None else self._read_batch

    @property
    def limit(self) -> int:
        """The number of samples of an epoch that may be skipped."""
        return int(self.most * len(self) + 1e-6)  # 0.29 * 100 is a little below 29

    def sample_path(self, index: int) -> str:
        """That of the inner set, or nothing."""
        return path_of(self.dataset, index)

    def named(self, seed: int, epoch: int, index: int) -> str:
        """The sample behind number ``index`` of an epoch, for people, through ``Weighted`` and ``Bucketed``."""
        dataset, numbers = behind(self.dataset, seed, epoch, np.array([index]))
        return sample_name(dataset, int(numbers[0]))

    def skipped(self, indices: Indices) -> Indices:
        """The indices that this process or one of its workers has skipped, in ascending order."""
        if not self._noted[-1]:
            return indices[:0]
        return np.unique(indices[self._noted[indices] == 1])

    def _forget(self) -> None:
        # Shared with forked workers; pages are taken when touched
        self._noted: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, len(self) + 1), dtype=np.uint8)

    def _read_batch(self, indices: Indices, keys: SampleKeys) -> Any:
        read = self.inner_batch()
        assert read is not None
        tries = dict.fromkeys(range(len(indices)), 0)
        numbers = indices.copy()
        while True:
            try:
                return read(numbers, keys)
            except BrokenSample as broken:
                place = broken.position
                if tries[place] == _TRIES - 1:
                    raise self._hopeless(int(indices[place])) from broken.cause
                numbers[place] = self._replaced(int(indices[place]), tries[place], broken.cause)
                tries[place] += 1

    def _replaced(self, asked: int, attempt: int, error: BaseException) -> int:
        self._noted[asked] = self._noted[-1] = 1
        return stand_in(asked, attempt, len(self))

    def _hopeless(self, asked: int) -> DataError:
        return DataError(
            f"{sample_name(self.dataset, asked)} cannot be read, and neither can the {_TRIES - 1} samples that were "
            "tried in its place. Look at the data set, for example with on_bad_sample = 'error'."
        )


def stand_in(index: int, attempt: int, samples: int) -> int:
    """The sample that is read in place of ``index``; never ``index`` itself where there is another."""
    step = derive_seed(index, "stand-in", attempt, samples) % max(1, samples - 1)
    return (index + 1 + step) % samples
