"""Reads one micro-batch of a data set, in one call if the set can do that, else sample by sample.

    what the set offers       how it is read                            random numbers
    nothing but tensors       its tensors are indexed                   none
    get_batch                 one call for the micro-batch              keyed by sample, see SampleKeys
    __getitems__ (torch's)    one call, then collated                   seeded once per micro-batch
    __getitem__               call by call, then collated               seeded before each sample

A custom ``collate`` needs the samples one by one, so the first two rows apply to torch's default collate only.

Several micro-batches of a step are read in one call where every row follows from its own number and key, and split
afterwards:

    micro-batches of a step  |-- k0 --|-- k1 --|-- k2 --|     three reads of few rows: three times the calls
    read as a group          |---------- rows ----------|     one read, and each micro-batch is a view of its rows

A set says so with ``rows_independent = True`` in the class that defines ``get_batch``; a class that overrides the
method, to mix rows for example, has to repeat it. ``InlineReading`` reads in the training process, when a micro-batch
is asked for; ``lockstep.data.workers`` reads ahead in processes.
"""

from __future__ import annotations

import inspect
import math
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate, get_worker_info

from lockstep.core.generators import generators_kept, seed_generators
from lockstep.core.plan import Indices
from lockstep.data.batch import map_leaves, pinned
from lockstep.data.images.image_arrays import ImageArrays
from lockstep.data.images.transforms import warn_renamed
from lockstep.data.keyed import SampleKeys
from lockstep.data.naming import error_text, sample_error, sample_name, unwrap_subset, why_uncollatable
from lockstep.data.rereading import Rereading
from lockstep.errors import DataError
from lockstep.runtime.stack_dump import Mark, stack_marker
from lockstep.text import shorten

ALIGNMENT = 64
"""Bytes; the address of a tensor's first element is to be a multiple of it, as in memory of its own: products of
vectors or matrices that begin elsewhere have other bits."""


def gap_after(tensor: Tensor) -> int:
    """The numbers to leave unused after a tensor, for the next one in the same memory to begin aligned."""
    return -tensor.numel() % (ALIGNMENT // tensor.element_size())


def is_dense(tensor: Tensor) -> bool:
    """Returns whether the values of a tensor are numbers at strides in memory."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def aligned(data: Any) -> Any:
    """The same values, each tensor at a multiple of 64 bytes; copied only where it is not.

    Page-locked tensors stay where they are: nothing is computed on them before they are on their device.
    """
    return map_leaves(data, _aligned)


def _aligned(value: Any) -> Any:
    fits = not isinstance(value, Tensor) or not is_dense(value) or value.data_ptr() % ALIGNMENT == 0
    return value if fits or value.is_pinned() else value.clone()


def _resolved(value: Any) -> Any:
    """The values of views such as ``x.conj()``, whose sign torch would lose on the way from a worker."""
    is_view = isinstance(value, Tensor) and (value.is_conj() or value.is_neg())
    return value.resolve_conj().resolve_neg() if is_view else value


@dataclass(frozen=True)
class GroupedBatch:
    """Micro-batches as they were read."""

    data: Any
    """The rows of all of them, or a list of them."""
    sizes: tuple[int, ...] | None
    """Rows of each, where they are still to be cut apart."""

    def map(self, change: Callable[[Any], Any]) -> GroupedBatch:
        """The same with all data changed."""
        return GroupedBatch(change(self.data), self.sizes)

    def pin_memory(self) -> GroupedBatch:
        """The same in page-locked memory; torch's ``DataLoader`` asks for it under this name."""
        return self.map(pinned)

    def apart(self) -> Sequence[Any]:
        """The data of each micro-batch, aligned; views of the same memory where they were read as one."""
        return aligned(self.data) if self.sizes is None else split_rows(self.data, self.sizes)


def rows_independent(dataset: Any) -> bool:
    """True where each row that ``get_batch`` gives follows from its own number and key alone, in strided tensors."""
    for cls in type(dataset).__mro__:
        if "get_batch" in vars(cls):
            if "rows_alone" in vars(cls):
                warn_renamed(f"the attribute rows_alone of {cls.__name__}", "rows_independent")
            return bool(vars(cls).get("rows_independent", vars(cls).get("rows_alone", False)))
    return False


def split_rows(data: Any, sizes: tuple[int, ...]) -> Sequence[Any]:
    """Data in tuples, lists and dicts of any depth, whose tensors are cut into parts of ``sizes`` rows, aligned.

    The parts of a tensor share memory and nothing else: one may be changed in place between another's forward and
    backward pass, which with ordinary views would be an error.
    """
    if isinstance(data, Tensor):
        parts = torch.unsafe_split_with_sizes(data, sizes)
        fit = data.data_ptr() % ALIGNMENT == 0 and not any(
            size * data.stride(0) * data.itemsize % ALIGNMENT for size in set(sizes[:-1])
        )
        return parts if fit else tuple(_aligned(part) for part in parts)
    if isinstance(data, dict):
        values = [split_rows(value, sizes) for value in data.values()]
        return [dict(zip(data, part, strict=True)) for part in zip(*values, strict=True)]
    values = [split_rows(value, sizes) for value in data]
    make = type(data)._make if hasattr(data, "_fields") else type(data)
    return [make(part) for part in zip(*values, strict=True)]


def _is_ours(dataset: Any) -> bool:
    """True for a data set of this library without a transform of the user's."""
    parts = [dataset, getattr(dataset, "transform", None)]
    return all(part is None or type(part).__module__.startswith("lockstep.") for part in parts)


def _inner_sets(dataset: Any) -> list[tuple[Any, Collate | None]]:
    """The data sets that one of this library reads, each with its collate function."""
    if not type(dataset).__module__.startswith("lockstep.") or hasattr(dataset, "is_compared"):
        return []
    if hasattr(dataset, "sources"):
        return [(each.dataset, each.collate) for each in dataset.sources]
    inner = getattr(dataset, "dataset", None)
    return [] if inner is None else [(inner, getattr(dataset, "collate", None))]


_READING = ("get_batch", "__getitem__")


def plain_tensors(dataset: Any) -> tuple[Tensor, ...] | None:
    """The tensors whose rows are the samples; None for a data set whose samples are anything else.

    They are those of a ``TensorDataset``, or the images and labels of a set in memory without a transform.
    """
    if type(dataset) is TensorDataset:
        return dataset.tensors
    if isinstance(dataset, ImageArrays) and dataset.transform is None:
        own = all(getattr(type(dataset), name) is getattr(ImageArrays, name) for name in _READING)
        return (dataset.images, dataset.labels) if own else None
    return None


_MOST_COMPARED, _FEW = 16, 4
"""The most samples of the first micro-batch that are read again; a micro-batch of so few is read more often."""
_KEPT = 1024
"""Reads of each process that a ``ReadTrace`` keeps."""
_FIELDS = 5
"""Numbers of each of them."""


@dataclass(frozen=True)
class ReadSpan:
    """One micro-batch that was read."""

    worker: int
    """Number of the worker; -1 for the training process."""
    began: int
    """``time.perf_counter_ns()``, a clock that all processes of a machine share."""
    ended: int
    epoch: int
    """Of the samples' keys; -1 where they are evaluated."""
    first: int
    """Index of the first sample."""
    samples: int


class ReadTrace:
    """The times at which this process and some workers read one data set; the newest reads of each are kept.

    ``name`` is shown to people. The notes are in memory that the processes share, so those of a worker that was killed
    are there too.

        process | 0, 0, 0, 0, count | began, ended, epoch, first sample, samples | ... | of the next process
    """

    def __init__(self, name: str, workers: int) -> None:
        self.name = name
        shape = (workers + 1, 1 + _KEPT, _FIELDS)
        memory = mmap.mmap(-1, math.prod(shape) * 8)
        self._notes = np.frombuffer(memory, dtype=np.int64).reshape(shape)

    @contextmanager
    def noting(self, epoch: int, indices: Indices) -> Iterator[None]:
        """Notes that the samples are read inside, in whichever process that is."""
        began = time.perf_counter_ns()
        yield
        info = get_worker_info()
        notes = self._notes[0 if info is None else info.id + 1]
        count = int(notes[0, -1])
        notes[1 + count % _KEPT] = began, time.perf_counter_ns(), epoch, indices[0], len(indices)
        notes[0, -1] = count + 1

    def spans(self) -> list[ReadSpan]:
        """The micro-batches that were read, worker by worker; the last 1,024 of each."""
        found = []
        for worker, (head, *notes) in enumerate(self._notes.tolist(), start=-1):
            count = head[-1]
            found += [ReadSpan(worker, *notes[n % _KEPT]) for n in range(max(0, count - _KEPT), count)]
        return found


_LONGEST = 2.0
"""Seconds after which only the first two samples, and the whole micro-batch, are compared."""

Collate = Callable[[list[Any]], Any]


def collate_samples(samples: list[Any], collate: Collate | None) -> Any:
    """Makes a micro-batch of samples; for None by torch's ``default_collate``, but a tuple where samples are tuples."""
    data = (collate or default_collate)(samples)
    is_list = collate is None and isinstance(data, list) and isinstance(samples[0], tuple)
    return tuple(data) if is_list else data


@runtime_checkable
class BatchDataset(Protocol):
    """A data set that gives a whole micro-batch at once; faster than one that is read sample by sample."""

    @property
    def get_batch(self) -> Callable[[Indices, SampleKeys], Any] | None:
        """Reads the samples ``indices`` of this set, collated; ``None`` where they must be read one by one.

        The random numbers of row ``i`` come from row ``i`` of the keys. A broken one is a ``BrokenSample``.
        """


def batch_read(dataset: Any) -> Callable[[Indices, SampleKeys], Any] | None:
    """The ``get_batch(indices, keys)`` of a data set; None if it has none, or one with other parameters."""
    read: Any = getattr(dataset, "get_batch", None)
    with suppress(TypeError, ValueError):  # not known
        given = list(inspect.signature(read).parameters.values())
        required = [each for each in given if each.default is each.empty]
        if len(required) != 2 and not any(each.name == "keys" or each.kind is each.VAR_POSITIONAL for each in given):
            return None
    return cast(Callable[[Indices, SampleKeys], Any] | None, read)


class BrokenSample(Exception):
    """Raised ``from`` the real error by a ``get_batch`` that finds its row ``position`` unreadable."""

    def __init__(self, position: int) -> None:
        super().__init__(f"row {position} of the micro-batch")
        self.position = position

    @property
    def cause(self) -> BaseException:
        """The real error."""
        return self.__cause__ or self


def read_each(dataset: Any, numbers: Indices, keys: SampleKeys) -> list[Any]:
    """Reads samples one by one, row ``i`` with the random numbers of row ``i`` of the keys.

    Raises:
        BrokenSample: a sample cannot be read; its error is the cause.
    """
    samples = []
    for position, (number, seed) in enumerate(zip(numbers.tolist(), keys.seeds(), strict=True)):
        seed_generators(seed)
        try:
            samples.append(dataset[number])
        except Exception as error:
            raise BrokenSample(position) from error
    return samples


class SampleReader:
    """Reads micro-batches of one data set, the same bits whoever reads them and in whatever order.

    Args:
        dataset: a map-style data set; ``Subset`` is looked through.
        seed, collate, trace, checks: see ``lockstep.data.workers.ReadingOptions``.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        collate: Collate | None = None,
        trace: ReadTrace | None = None,
        checks: bool = False,
    ) -> None:
        self._given = dataset
        self._dataset, self._numbers = unwrap_subset(dataset)
        self._seed = seed
        self._collate = None if collate is default_collate else collate
        self._trace, self._unchecked = trace, checks
        self.rows_independent = False
        """True if every row follows from its own number and key, so that micro-batches can be read as a group."""
        self._seen: list[tuple[torch.Tensor, int]] = []
        self._read = self._choose()

    @property
    def in_memory(self) -> bool:
        """True if reading is so cheap that worker processes would only slow it down."""
        return self._read == self._read_tensors or (
            self._read == self._read_whole and bool(getattr(self._dataset, "in_memory", False))
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of a sample if rows are taken from tensors in memory; 0 if the cost of a read is not known.

        It is 0, too, if others may write into the memory without torch's knowledge, as into a NumPy array.
        """
        if self._read != self._read_tensors or not self.rows_independent or self._trace is not None:
            return 0
        tensors = plain_tensors(self._dataset) or ()
        is_ours = type(self._dataset) is not TensorDataset
        if not is_ours and not all(tensor.untyped_storage().resizable() for tensor in tensors):
            return 0
        return sum(tensor[:1].nbytes for tensor in tensors)

    @property
    def unchanged(self) -> bool:
        """True if the tensors that were read last are still the set's and nobody has written into them."""
        if not self._seen:
            return True
        tensors = plain_tensors(self._dataset) or ()
        return len(tensors) == len(self._seen) and all(
            tensor is seen and tensor._version == version
            for tensor, (seen, version) in zip(tensors, self._seen, strict=True)
        )

    def read(self, epoch: int, indices: Indices) -> Any:
        """The samples ``indices``, collated; ``DataError`` names one that cannot be read."""
        with self._generators():
            return self._read_noted(epoch, indices)

    def answer(self, request: Request) -> GroupedBatch:
        """Reads what is asked for."""
        if request.is_apart:
            return GroupedBatch([self._read_apart(request.epoch, request.indices)], None)
        return self.read_grouped(request.epoch, request.indices, request.sizes)

    @stack_marker(Mark.READS_SAMPLES)
    def _read_apart(self, epoch: int, indices: Indices) -> list[Any]:
        """The data of samples, collated together, and then of each alone; empty where that fails."""
        parts = [indices, *np.split(indices, len(indices))]
        with self._generators(), suppress(DataError):
            return [map_leaves(self._read(SampleKeys(self._seed, epoch, each)), _resolved) for each in parts]
        return []

    @stack_marker(Mark.READS_SAMPLES)
    def read_grouped(self, epoch: int, indices: Indices, sizes: tuple[int, ...] = ()) -> GroupedBatch:
        """Reads several micro-batches of a step, in one call if rows are independent.

        Args:
            indices: the samples of all of them.
            sizes: samples of each; empty for a single one.
        """
        if len(sizes) < 2:
            return GroupedBatch([self.read(epoch, indices)], None)
        if self.rows_independent:
            return GroupedBatch(self.read(epoch, indices), sizes)
        with self._generators():
            parts = np.split(indices, np.cumsum(sizes)[:-1])
            return GroupedBatch([self._read_noted(epoch, part) for part in parts], None)

    def _read_noted(self, epoch: int, indices: Indices) -> Any:
        if self._unchecked:
            self._unchecked = False
            self._require_repeatable(SampleKeys(self._seed, epoch, indices[:_MOST_COMPARED]))
        with nullcontext() if self._trace is None else self._trace.noting(epoch, indices):
            found = self._read(SampleKeys(self._seed, epoch, indices))
        return found if self._read == self._read_tensors else map_leaves(found, _resolved)

    def _require_repeatable(self, keys: SampleKeys) -> None:
        """Reads samples of this data set, and of those in it, twice under the same keys; see ``Rereading``."""
        for dataset, collate in _inner_sets(self._dataset):
            reader = SampleReader(dataset, seed=keys.seed, collate=collate)
            reader._require_repeatable(replace(keys, indices=keys.indices % len(dataset)))
        is_stream = getattr(self._dataset, "is_compared", True) is False
        if self._read == self._read_tensors or (self._collate is None and _is_ours(self._dataset) and not is_stream):
            return
        compared = Rereading({type(self._dataset).__name__: self._given, "the collate function": self._collate})
        if is_stream:  # reading its first samples again restarts it
            self._dataset.is_compared = True
            first = replace(keys, indices=np.arange(min(_MOST_COMPARED, len(self._dataset))))
            compared.require_equal(self._named_rows(first), partial(self._read, first))
            return
        # More than a small micro-batch has: others say whether they change the first, or are kept.
        more = (keys.indices[-1] + np.arange(1, _FEW)) % len(self._given)
        singles = np.array([*dict.fromkeys([*keys.indices.tolist(), *more.tolist()])][: max(_FEW, len(keys.indices))])
        parts = [replace(keys, indices=singles[n : n + 1]) for n in range(len(singles))]
        end = time.perf_counter() + _LONGEST
        for number, part in enumerate(parts):
            if number < 2 or time.perf_counter() < end:
                seed = part.seeds()[0] if self._seeds else None
                compared.require_equal(self._named_rows(part), partial(self._read, part), seed)
        if self._collate or self._read != self._read_each:
            times = 8 if len(keys.indices) <= _FEW and time.perf_counter() < end else 2
            compared.require_equal(self._named_rows(keys), partial(self._read, keys), times=times)
        compared.require_kept()
        compared.require_any_order()
        compared.require_no_time()

    def _named_rows(self, keys: SampleKeys) -> str:
        return f"{type(self._dataset).__name__}[{shorten(self._rows(keys).tolist(), 4)}]"

    def _choose(self) -> Callable[[SampleKeys], Any]:
        self._seeds = False
        tensors = plain_tensors(self._dataset) if self._collate is None else None
        if tensors is not None:
            # rows can then be split without a copy, and torch counts writes to the tensor
            self.rows_independent = all(t.layout is torch.strided and not t.is_inference() for t in tensors)
            return self._read_tensors
        if self._collate is None and batch_read(self._dataset) is not None:
            self.rows_independent = rows_independent(self._dataset)
            return self._read_whole
        self._seeds = True
        if getattr(self._dataset, "__getitems__", None) is not None:
            return self._read_items
        return self._read_each

    def _rows(self, keys: SampleKeys) -> Indices:
        return keys.indices if self._numbers is None else self._numbers[keys.indices]

    def _read_tensors(self, keys: SampleKeys) -> Any:
        tensors = plain_tensors(self._dataset)
        if tensors is None:  # its owner has given it a transform since
            self._read = self._choose()
            with self._generators():
                return self._read(keys)
        self._seen = [(tensor, tensor._version) for tensor in tensors] if self.rows_independent else []
        rows = torch.from_numpy(self._rows(keys))
        return tuple(tensor.detach().index_select(0, rows.to(tensor.device)) for tensor in tensors)

    def _read_whole(self, keys: SampleKeys) -> Any:
        get_batch = cast(Callable[[Indices, SampleKeys], Any], self._dataset.get_batch)
        try:
            return get_batch(self._rows(keys), keys)
        except BrokenSample as broken:
            raise self._named_error(broken, keys) from broken.cause
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"{_named(keys)} cannot be read: {error_text(error)}") from error

    def _named_error(self, broken: BrokenSample, keys: SampleKeys) -> DataError:
        return sample_error(self._given, int(keys.indices[broken.position]), broken.cause)

    def _read_items(self, keys: SampleKeys) -> Any:
        seed_generators(keys.seeds()[0])
        try:
            samples = self._dataset.__getitems__(self._rows(keys).tolist())
        except Exception as error:
            raise DataError(f"{_named(keys)} cannot be read: {error_text(error)}") from error
        return self._collated(list(samples), keys)

    def _read_each(self, keys: SampleKeys) -> Any:
        try:
            samples = read_each(self._dataset, self._rows(keys), keys)
        except BrokenSample as broken:
            raise self._named_error(broken, keys) from broken.cause
        return self._collated(samples, keys)

    def _generators(self) -> AbstractContextManager[None]:
        """A context that restores the generators afterwards, if reading seeds those of the training process."""
        return generators_kept() if self._seeds and get_worker_info() is None else nullcontext()

    def _collated(self, samples: list[Any], keys: SampleKeys) -> Any:
        try:
            return collate_samples(samples, self._collate)
        except Exception as error:
            if self._collate is not None:
                raise DataError(
                    f"{_named(keys)} cannot be collated into one micro-batch: the collate function of the DataLoader "
                    f"raised {error_text(error)}"
                ) from error
            names = [sample_name(self._given, int(index)) for index in keys.indices]
            why = why_uncollatable(names, samples) or f"{error_text(error)}. Give a DataLoader with a collate function."
            raise DataError(f"{_named(keys)} cannot be collated into one micro-batch: {why}") from error


def _named(keys: SampleKeys) -> str:
    return f"The samples {shorten(keys.indices.tolist(), 8)}"


@dataclass(frozen=True)
class Request:
    """One micro-batch that is to be read, or several of a step."""

    epoch: int
    indices: Indices
    """The samples of all of them, one micro-batch after the other."""
    sizes: tuple[int, ...] = ()
    """Samples of each micro-batch; empty for a single one."""
    is_apart: bool = False
    """The samples are read for ``Batch.apart``."""


class InlineReading:
    """Reads in the training process, without workers: the right choice where the samples are in memory.

    A step has ``per_step`` micro-batches here. ``steps`` steps are read together, unless somebody writes into the set
    meanwhile.
    """

    sound = True

    def __init__(self, reader: SampleReader, *, per_step: int = 1, steps: int = 1, pin_memory: bool = False) -> None:
        self._reader = reader
        self._per_step = per_step
        self.at_a_time = per_step * steps
        """Micro-batches per request: those of a step, or of several steps."""
        self._pin_memory = pin_memory

    def read(self, requests: Iterator[Request]) -> Iterator[Any]:
        """Yields the collated samples of each micro-batch, in the order of the requests."""
        for request in requests:
            parts = self._parts(request)
            for number in range(len(request.sizes) or 1):
                if number and number % self._per_step == 0 and not self._reader.unchanged:
                    parts = self._parts(request)
                yield parts[number]

    def _parts(self, request: Request) -> Sequence[Any]:
        found = self._reader.answer(request)
        return (found.map(pinned) if self._pin_memory else found).apart()

    def close(self) -> None:
        """Does nothing: nothing was started."""
