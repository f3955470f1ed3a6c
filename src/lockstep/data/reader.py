"""Reads one micro-batch of a data set, whole where the set can give it whole, else sample by sample.

    what the set offers       how it is read                            random numbers
    nothing but tensors       its tensors are indexed                   none
    get_batch                 one call for the micro-batch              keyed by sample, see SampleKeys
    __getitems__ (torch's)    one call, then collated                   seeded once per micro-batch
    __getitem__               call by call, then collated               seeded before each sample

A custom ``collate`` needs the samples one by one, so the first two rows are for torch's own way of collating.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch.utils.data import default_collate

from lockstep.data.keyed import SampleKeys, generators_kept, seed_generators
from lockstep.data.naming import look_through, sample_error
from lockstep.data.plain_tensors import plain_tensors
from lockstep.data.read_clock import ReadClock
from lockstep.data.together import Together, rows_alone
from lockstep.errors import DataError
from lockstep.permutation import Indices

Collate = Callable[[list[Any]], Any]


@runtime_checkable
class BatchDataset(Protocol):
    """A data set that gives a whole micro-batch at once; faster than one that is read sample by sample."""

    @property
    def get_batch(self) -> Callable[[Indices, SampleKeys], Any] | None:
        """Reads the samples ``indices`` of this set, collated; ``None`` where they must be read one by one.

        The random numbers of row ``i`` come from row ``i`` of the keys. A broken one is a ``BrokenSample``.
        """


class BrokenSample(Exception):
    """Raised ``from`` the real error by a ``get_batch`` that finds its row ``position`` unreadable."""

    def __init__(self, position: int) -> None:
        super().__init__(f"row {position} of the micro-batch")
        self.position = position


class SampleReader:
    """Reads micro-batches of one data set, the same bits whoever reads them and in whatever order.

    Args:
        dataset: a map-style data set; ``Subset`` is looked through.
        seed: the run's seed.
        collate: makes one micro-batch of a list of samples; ``None`` for torch's ``default_collate``.
        keep_generators: give torch, NumPy and ``random`` their state back after each micro-batch, so that
            reading in the training process disturbs nobody's random numbers.
        clock: notes when each micro-batch is read; None: nothing is noted.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        collate: Collate | None = None,
        keep_generators: bool = True,
        clock: ReadClock | None = None,
    ) -> None:
        self._given = dataset
        self._dataset, self._numbers = look_through(dataset)
        self._seed = seed
        self._collate = None if collate is default_collate else collate
        self._keep, self._clock = keep_generators, clock
        self.stand_alone = False
        """Whether every row follows from its own number and key, so that micro-batches can be read together."""
        self._seen: list[tuple[torch.Tensor, int]] = []
        self._read = self._choose()

    @property
    def in_memory(self) -> bool:
        """Whether reading is so cheap that worker processes would only slow it down."""
        return self._read == self._read_tensors or (
            self._read == self._read_whole and bool(getattr(self._dataset, "in_memory", False))
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample, where rows are taken from tensors in memory; 0 where what a read costs is not known."""
        if self._read != self._read_tensors or not self.stand_alone or self._clock is not None:
            return 0
        return sum(tensor[:1].nbytes for tensor in plain_tensors(self._dataset) or ())

    @property
    def unchanged(self) -> bool:
        """Whether the tensors that were read last are still the set's, and nobody has written into them."""
        if not self._seen:
            return True
        tensors = plain_tensors(self._dataset) or ()
        return len(tensors) == len(self._seen) and all(
            tensor is seen and tensor._version == version
            for tensor, (seen, version) in zip(tensors, self._seen, strict=True)
        )

    def read(self, epoch: int, indices: Indices) -> Any:
        """The samples ``indices``, collated; a ``DataError`` names the one that cannot be read."""
        if self._clock is None:
            return self._read(SampleKeys(self._seed, epoch, indices))
        with self._clock.noting(epoch, indices):
            return self._read(SampleKeys(self._seed, epoch, indices))

    def read_together(self, epoch: int, indices: Indices, sizes: tuple[int, ...] = ()) -> Together:
        """Several micro-batches of a step, in one go where every row stands for itself.

        Args:
            epoch: of the samples' keys.
            indices: the samples of all of them.
            sizes: samples of each; empty for a single one.
        """
        if len(sizes) < 2:
            return Together([self.read(epoch, indices)], None)
        if self.stand_alone:
            return Together(self.read(epoch, indices), sizes)
        with self._kept_over_all():
            parts = np.split(indices, np.cumsum(sizes)[:-1])
            return Together([self.read(epoch, part) for part in parts], None)

    def _choose(self) -> Callable[[SampleKeys], Any]:
        tensors = plain_tensors(self._dataset) if self._collate is None else None
        if tensors is not None:
            self.stand_alone = all(_is_ordinary(tensor) for tensor in tensors)
            return self._read_tensors
        if self._collate is None and getattr(self._dataset, "get_batch", None) is not None:
            self.stand_alone = rows_alone(self._dataset)
            return self._read_whole
        if getattr(self._dataset, "__getitems__", None) is not None:
            return self._read_items
        return self._read_each

    def _rows(self, keys: SampleKeys) -> Indices:
        return keys.indices if self._numbers is None else self._numbers[keys.indices]

    def _read_tensors(self, keys: SampleKeys) -> Any:
        tensors = plain_tensors(self._dataset)
        if tensors is None:  # its owner has given it a transform since
            self._read = self._choose()
            return self._read(keys)
        self._seen = [(tensor, tensor._version) for tensor in tensors] if self.stand_alone else []
        rows = torch.from_numpy(self._rows(keys))
        return tuple(tensor.index_select(0, rows) for tensor in tensors)

    def _read_whole(self, keys: SampleKeys) -> Any:
        get_batch = cast(Callable[[Indices, SampleKeys], Any], self._dataset.get_batch)
        try:
            return get_batch(self._rows(keys), keys)
        except BrokenSample as broken:
            cause = broken.__cause__ or broken
            raise sample_error(self._given, int(keys.indices[broken.position]), cause) from cause
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"The samples {_numbers(keys)} cannot be read: {_told(error)}") from error

    def _read_items(self, keys: SampleKeys) -> Any:
        rows = self._rows(keys).tolist()
        with self._generators():
            seed_generators(keys.seeds()[0])
            try:
                samples = self._dataset.__getitems__(rows)
            except Exception as error:
                raise DataError(f"The samples {_numbers(keys)} cannot be read: {_told(error)}") from error
            return self._collated(list(samples), keys)

    def _read_each(self, keys: SampleKeys) -> Any:
        samples = []
        with self._generators():
            for position, (row, seed) in enumerate(zip(self._rows(keys).tolist(), keys.seeds(), strict=True)):
                seed_generators(seed)
                try:
                    samples.append(self._dataset[row])
                except Exception as error:
                    raise sample_error(self._given, int(keys.indices[position]), error) from error
            return self._collated(samples, keys)

    @contextmanager
    def _kept_over_all(self) -> Iterator[None]:
        """Where several micro-batches are read inside, the generators get their state back after the last of them."""
        if not self._keep or self._read not in (self._read_items, self._read_each):
            yield
            return
        with generators_kept():
            self._keep = False
            try:
                yield
            finally:
                self._keep = True

    def _generators(self) -> AbstractContextManager[None]:
        return generators_kept() if self._keep else nullcontext()

    def _collated(self, samples: list[Any], keys: SampleKeys) -> Any:
        try:
            data = (self._collate or default_collate)(samples)
        except Exception as error:
            raise DataError(
                f"The samples {_numbers(keys)} cannot be put into one micro-batch: {_told(error)}. "
                "Give a transform that makes all samples of one shape, or a collate function that pads them."
            ) from error
        is_pair = self._collate is None and isinstance(data, list) and isinstance(samples[0], tuple)
        return tuple(data) if is_pair else data


def _numbers(keys: SampleKeys) -> str:
    rows = keys.indices.tolist()
    shown = ", ".join(str(row) for row in rows[:8])
    return f"{shown}, … ({len(rows)} in all)" if len(rows) > 8 else shown


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether rows can be cut apart without a copy, and writing into the tensor is counted."""
    return tensor.layout is torch.strided and not tensor.is_inference()
