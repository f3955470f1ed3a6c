"""Takes over the data that a script already has: a data set, a DataLoader with its sampler, or a stream.

The sample plan replaces samplers. What a loader or sampler decides and the plan can decide too is taken over; anything
else is refused, with the line to write instead. ``Stream`` numbers what can only be iterated over.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from lockstep.core.generators import encoded_state, generators_kept, seed_generators
from lockstep.core.plan import Indices, Permutation
from lockstep.core.seeding import derive_seed, permutation_key
from lockstep.core.values import ENTRY, inside, slots_of
from lockstep.data.batch import DeviceTransform
from lockstep.data.images.transforms import FinishAlias, device_transform_of
from lockstep.data.keyed import SampleKeys
from lockstep.data.naming import require_map_style, sample_error, unwrap_subset
from lockstep.data.reader import BrokenSample, Collate, collate_samples, read_each
from lockstep.data.wrappers.bucketed import Bucketed
from lockstep.data.wrappers.mixup import Mixed
from lockstep.data.wrappers.weighted import Weighted
from lockstep.data.wrappers.wrapping import Wrapping
from lockstep.errors import ConfigError, DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Source(FinishAlias):
    """A data set and what its owner has decided about reading it; ``None`` where nothing was decided."""

    dataset: Any
    """The map-style data set."""
    collate: Collate | None = None
    """Makes one micro-batch of a list of samples; ``None`` for torch's own way."""
    workers: int | None = None
    """Worker processes for each rank."""
    shuffle: bool | None = None
    """True if the samples are visited in another order in each epoch."""
    drop_last: bool | None = None
    """True if a last, smaller batch of an epoch is left out."""
    pin_memory: bool | None = None
    """True if tensors are delivered in page-locked memory."""
    timeout: float | None = None
    """Seconds to wait for one micro-batch of a worker."""
    batch_size: int | None = None
    """The batch size of the DataLoader, which the run's ``global_batch`` replaces."""
    evaluation_batch: int | None = None
    """Samples of a forward pass in evaluations: the batch size of the DataLoader, unless that is one of a rank."""
    device_transform: DeviceTransform | None = None
    """Applied to the input on its device, before the model."""
    notes: tuple[str, ...] = ()
    """Differences to what was written, in sentences for the log."""


class Stream(Dataset[Any]):
    """Gives the samples of an iterable data set numbers: the places in which they come.

    Every process reads all of the stream, in the training process, and keeps what its micro-batches hold. So the bits
    are the same on any number of processes, and a resumed epoch resumes where it stood, after reading what came before.
    Each epoch restarts the stream; one with a method ``set_epoch`` is told the epoch first. What a sample draws from
    torch, NumPy or ``random`` is keyed by its place. The stream must not share itself out over processes, and one
    without ``set_epoch`` must not count how often it was read, or keep a random generator of its own.

    Args:
        dataset: anything that can be iterated over again and again.
        samples: of an epoch; None for ``len(dataset)``.
        collate: makes a micro-batch of a list of samples; ``None`` for torch's ``default_collate``.

    Raises:
        ConfigError: the length is not known, or the data can be iterated over once only.
    """

    keeps_order = True
    in_memory = True
    """Says that worker processes do not read it: each would read all of it."""

    def __init__(self, dataset: Any, samples: int | None = None, *, collate: Collate | None = None) -> None:
        name = type(dataset).__name__
        if not hasattr(dataset, "__iter__") or isinstance(dataset, Iterator | str | bytes | Mapping | type):
            raise ConfigError(
                f"Stream needs data that can be iterated over anew in each epoch, and was given a {name}. Give it an "
                "object whose __iter__ begins again, such as an IterableDataset."
            )
        self.dataset, self.collate = dataset, collate
        try:
            self.samples = len(dataset) if samples is None else samples
        except (TypeError, NotImplementedError) as error:  # a ChainDataset asks each of its parts
            raise ConfigError(
                f"{name} can be iterated over and has no length, so the end of an epoch is unknown. Write "
                "run.batches(lockstep.data.Stream(dataset, samples=N)), with the samples of an epoch."
            ) from error
        self._iterator: Iterator[Any] | None = None
        self._begun, self._next = (0, 0), 0
        self._as_given = {} if hasattr(dataset, "set_epoch") else plain_state(dataset)
        self._has_length = samples is None
        self.is_compared = False
        """True if its first samples were read twice and compared, or are not to be."""

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        """Refused: a stream is read in order."""
        raise ConfigError(
            "Stream is read in the order of an epoch. Give it to run.batches as it is, not in a DataLoader; a collate "
            "function goes into Stream(..., collate=...)."
        )

    def get_batch(self, indices: Indices, keys: SampleKeys) -> Any:
        """The samples at places ``indices``, collated."""
        with generators_kept():
            samples = [self._sample(index, keys) for index in indices.tolist()]
        return collate_samples(samples, self.collate)

    def _sample(self, index: int, keys: SampleKeys) -> Any:
        if self._iterator is None or self._begun != (keys.seed, keys.epoch) or index < self._next:
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(max(0, keys.epoch))
            self._require_unchanged()
            seed_generators(derive_seed(keys.seed, "stream", keys.epoch))
            self._iterator, self._begun, self._next = iter(self.dataset), (keys.seed, keys.epoch), 0
        iterator, self._iterator = self._iterator, None  # a generator that has raised an error is at its end
        sample = None
        while self._next <= index:
            seed_generators(replace(keys, indices=np.array([self._next])).seeds()[0])
            try:
                sample = next(iterator)
            except StopIteration:
                own = "Correct __len__, or write Stream(dataset, samples=N)."
                share = ""
                if dist.is_initialized() and dist.get_world_size() > 1:
                    share = (
                        " Where it gives each process its share of the files, let it read all of them, as "
                        "WebDataset(urls, nodesplitter=lambda urls: urls) does."
                    )
                raise DataError(
                    f"{type(self.dataset).__name__} ended after {self._next} samples, and an epoch should have "
                    f"{self.samples}. {own if self._has_length else 'Give Stream a smaller samples=.'}{share}"
                ) from None
            self._next += 1
            if self._next == 1:
                self._require_unchanged()
        if self._has_length and self._next == self.samples:
            self._has_length = False
            if next(iterator, self) is not self:
                logger.warning(
                    "%s has the length %d and gave more samples: an epoch ends there, and the others are not read. "
                    "Correct __len__, or write Stream(dataset, samples=N).",
                    *(type(self.dataset).__name__, self.samples),
                )
            return sample
        self._iterator = iterator
        return sample

    def _require_unchanged(self) -> None:
        """Refuses a stream whose order may depend on how often it was begun, as ranks and resumed runs differ in that.

        Nothing of one with a method ``set_epoch``, which can restore whatever was changed.
        """
        state = plain_state(self.dataset) if self._as_given else {}
        changed = [name for name, value in self._as_given.items() if state.get(name, value) != value]
        if changed:
            name = type(self.dataset).__name__
            raise DataError(
                f"{name} changes its attribute {changed[0]!r} when it is iterated over, so its samples may depend on "
                "how often it was read, which differs with the number of processes and after a resume. Give it a "
                f"method set_epoch(epoch), which is called before each epoch, and set {changed[0]!r} there."
            )


_MOST_IN_ORDER = 100_000


def _is_order(value: Any) -> bool:
    """True of a list that a stream may shuffle again and again: different numbers or names."""
    is_list = isinstance(value, list) and 1 < len(value) <= _MOST_IN_ORDER
    return is_list and set(map(type, value)) <= {int, str, bytes} and len(set(value)) == len(value)


def plain_state(part: Any, depth: int = 3) -> dict[str, Any]:
    """Numbers, texts, orders of these and states of random generators in the attributes of an object, and in theirs.

    A tensor or array of one number is a number: a count, more often than memory that is filled again.
    """
    found: dict[str, Any] = {}
    is_closed = isinstance(part, type | ModuleType | torch.Tensor | np.ndarray)
    for how, _, key, value in () if is_closed else inside(part, most=100):
        name = str(key)
        if how == ENTRY and not (hasattr(value, "__dict__") or slots_of(value) or encoded_state(value)):
            continue  # of objects, as the stages of a pipeline; others may be a cache
        if _is_order(value):
            found[f"{name} of {len(value)}"] = hash(tuple(value))
        elif isinstance(value, bool | int | float | str):
            found[name] = repr(value) if isinstance(value, float) else value  # NaN is not equal to itself
        elif isinstance(value, torch.Tensor | np.ndarray | np.generic) and math.prod(value.shape) == 1:
            found[name] = str(value.tolist())
        elif (state := encoded_state(value)) is not None:
            found[name] = state
        elif depth:
            found |= {f"{name}.{inner}": each for inner, each in plain_state(value, depth - 1).items()}
    return found


class Indexed(Dataset[Any]):
    """Reads by number what can be iterated over too, as a ``StreamingDataset`` of MosaicML: its shards have an index.

    Its own order, and the way it shares itself out over processes, are not used.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return int(self.dataset.size)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    @staticmethod
    def is_possible(dataset: Any) -> bool:
        """True for an iterable data set with a number of samples, ``size``, and entries."""
        has_entries = type(dataset).__getitem__ is not Dataset.__getitem__
        return isinstance(getattr(dataset, "size", None), int) and has_entries


class SideBySide(Dataset[Any]):
    """Reads several data sets side by side: a sample is a tuple with one of each.

    An epoch goes through the largest set once. A smaller one begins again, in another order, as often as that takes;
    the order follows from seed, epoch and place, so it is the same on any number of processes. Every micro-batch is a
    tuple of what the sets give, collated by their own functions.

    Args:
        sources: data sets with ``__getitem__``, or DataLoaders of such.
    """

    def __init__(self, sources: Sequence[Any]) -> None:
        self.sources = [adopt(each) for each in sources]
        for each in self.sources:
            _require_numbered(each.dataset)
        self._sizes = [len(each.dataset) for each in self.sources]
        if not all(self._sizes):
            raise ConfigError(f"run.batches was given data sets of {self._sizes} samples: one is empty.")

    def __len__(self) -> int:
        return max(self._sizes)

    def __getitem__(self, index: int) -> Any:
        """Refused: a place means samples only within an epoch."""
        raise ConfigError("Several data sets are read together in micro-batches of an epoch, by run.batches alone.")

    def get_batch(self, indices: Indices, keys: SampleKeys) -> Any:
        """One micro-batch of each set."""
        with generators_kept():
            return tuple(self._read(number, indices, keys) for number in range(len(self.sources)))

    def _read(self, number: int, indices: Indices, keys: SampleKeys) -> Any:
        source, own = self.sources[number], replace(keys, seed=derive_seed(keys.seed, "together", number))
        rows = self._rows(number, indices, own)
        try:
            samples = read_each(source.dataset, rows, own)
        except BrokenSample as broken:
            raise sample_error(source.dataset, int(rows[broken.position]), broken.cause) from broken.cause
        return collate_samples(samples, source.collate)

    def _rows(self, number: int, indices: Indices, keys: SampleKeys) -> Indices:
        size = self._sizes[number]
        turns, rows = np.divmod(indices, size)
        for turn in np.unique(turns) if size < len(self) else ():
            order = Permutation(size, permutation_key(derive_seed(keys.seed, "turn", int(turn)), keys.epoch))
            rows[turns == turn] = order(rows[turns == turn])
        return rows


def _require_numbered(dataset: Any) -> None:
    """Raises ``ConfigError`` where samples are read by their places in an epoch, and so not beside others."""
    by_place = Weighted | Bucketed | Mixed | Stream | SideBySide
    while isinstance(dataset, Wrapping) and not isinstance(dataset, by_place):
        dataset = dataset.dataset
    if isinstance(dataset, by_place):
        given = {Weighted: "a DataLoader whose sampler draws, or Weighted,", Stream: "an iterable data set"}
        raise ConfigError(
            "Data sets that are read side by side are read by the numbers of their samples, and "
            f"{given.get(type(dataset), type(dataset).__name__)} is read by places in an epoch. Let one data set give "
            "samples of both, such as (first[i], second[int(torch.randint(len(second), ()))]), and give run.batches "
            "that one alone, with the sampler."
        )


def adopt(source: Any) -> Source:
    """Takes over a data set or a DataLoader; ``ConfigError`` if a sample plan cannot replace its sampler."""
    if isinstance(source, Source):
        return source
    if isinstance(source, tuple | list) and source and all(isinstance(each, _SETS) for each in source):
        together = SideBySide(source)
        workers = [each.workers or 0 for each in together.sources]
        notes = tuple(dict.fromkeys(note for each in together.sources for note in each.notes))
        return Source(dataset=together, workers=max(workers) or None, notes=notes)
    if isinstance(source, DataLoader):
        return _adopt_loader(source)
    if isinstance(source, IterableDataset):
        source = Indexed(source) if Indexed.is_possible(source) else Stream(source)
    if isinstance(source, Sampler):
        raise ConfigError(
            f"run.batches needs a data set and got a {type(source).__name__}. "
            "Write run.batches(dataset): the run itself decides which rank reads which samples."
        )
    require_map_style(source, "run.batches")
    inner = unwrap_subset(source)[0]
    return Source(
        dataset=source,
        device_transform=device_transform_of(inner),
        shuffle=False if getattr(inner, "keeps_order", False) else None,
    )


def _adopt_loader(loader: DataLoader[Any]) -> Source:
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    if getattr(loader, "next_iter_state", None) is not None:
        raise ConfigError(
            f"The {type(loader).__name__} was given a state by load_state_dict, and would begin within an epoch. The "
            "run keeps its own place: take load_state_dict out, and write lockstep.init(..., resume='auto')."
        )
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is None:
            raise _makes_batches()
        is_indexed, size = Indexed.is_possible(loader.dataset), loader.batch_size
        return Source(
            dataset=Indexed(loader.dataset) if is_indexed else Stream(loader.dataset, collate=collate),
            collate=collate if is_indexed else None,
            shuffle=None if is_indexed else False,
            batch_size=size,
            evaluation_batch=size,
            drop_last=loader.drop_last,
            notes=_left_out(loader, loader.generator),
        )
    require_map_style(loader.dataset, "run.batches")
    batches = _batches(loader)
    dataset, shuffle, notes = _adopt_sampler(batches.sampler, loader.dataset, collate)
    inner = unwrap_subset(dataset)[0]
    drop_last = batches.drop_last or bool(getattr(batches.sampler, "drop_last", False))
    is_torchs = type(batches.sampler) is _kind_of(batches.sampler)  # torchdata's makes a generator of its own
    generator = loader.generator or (getattr(batches.sampler, "generator", None) if is_torchs else None)
    return Source(
        dataset=dataset,
        collate=None if isinstance(dataset, Weighted) and dataset is not loader.dataset else collate,
        workers=loader.num_workers,
        shuffle=shuffle and not getattr(inner, "keeps_order", False),
        drop_last=drop_last,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout or None,
        batch_size=batches.batch_size,
        evaluation_batch=None if isinstance(batches.sampler, DistributedSampler) else batches.batch_size,
        device_transform=device_transform_of(inner),
        notes=(*notes, *_left_out(loader, generator)),
    )


def _left_out(loader: DataLoader[Any], generator: torch.Generator | None) -> tuple[str, ...]:
    """The properties of a DataLoader that a run does not use, in sentences."""
    found = []
    for name in ("__iter__", "_get_iterator"):
        owner = next(kind for kind in type(loader).__mro__ if name in vars(kind))
        if owner.__module__.partition(".")[0] not in ("torch", "torchdata"):
            found.append(
                f"{owner.__name__}.{name} is not called: the run reads the data set itself. Move what it does with a "
                "batch into the data set, the collate function, or run.backward(..., forward=...)."
            )
    if generator is not None:
        found.append(
            "The DataLoader's generator is not used: the run's seed decides the order of the samples and what they "
            "draw. For another order give lockstep.init another seed."
        )
    if loader.worker_init_fn is not None:
        found.append(
            "The DataLoader's worker_init_fn is not called: random numbers are keyed by sample. "
            "Move any other setup into the data set."
        )
    return tuple(found)


def _adopt_sampler(sampler: Any, dataset: Any, collate: Collate | None) -> tuple[Any, bool, tuple[str, ...]]:
    """The data set, narrowed to what the sampler visits; True if it is shuffled; notes for the log."""
    kind = _kind_of(sampler)
    if kind in (SequentialSampler, RandomSampler, DistributedSampler):
        # it may be of something else, as RandomSampler(range(100)) is
        count = len(sampler.dataset if kind is DistributedSampler else sampler.data_source)
        visited = dataset if count == len(dataset) else Subset(dataset, list(range(count)))
        if kind is DistributedSampler:
            return visited, bool(sampler.shuffle), (_replaced(sampler),)
        if kind is SequentialSampler:
            return visited, False, ()
        if sampler.replacement:
            return Weighted(visited, np.ones(count), sampler.num_samples, collate=collate), True, ()
        if sampler.num_samples != count:
            raise _refused(sampler, "draws another number of samples than there are", _ONCE)
        return visited, True, ()
    if kind is SubsetRandomSampler:
        return Subset(dataset, list(map(int, sampler.indices))), True, ()
    if kind is WeightedRandomSampler:
        if not sampler.replacement:
            raise _refused(sampler, "draws each sample once, the heavier ones earlier", _WEIGHTS)
        return Weighted(dataset, sampler.weights, sampler.num_samples, collate=collate), True, ()
    raise _refused(sampler, "has its own order", _ONCE)


def _replaced(sampler: DistributedSampler[Any]) -> str:
    last = " The last batch of an epoch is left out where it is not full." if sampler.drop_last else ""
    length = " len() of the loader is that of a share: take run.steps_per_epoch(loader)."
    return (
        f"The DistributedSampler (shuffle={sampler.shuffle}, drop_last={sampler.drop_last}, seed={sampler.seed}) is "
        "replaced by the run's sample plan: the run's seed decides the order, no sample is read twice to fill up a "
        f"rank, and set_epoch is not needed.{length if sampler.num_replicas > 1 else ''}{last}"
    )


_SETS = (Dataset, DataLoader)
_ONCE = (
    "Write run.batches(dataset): every sample once per epoch, in an order keyed by the run's seed. For an order of "
    "your own write run.batches(torch.utils.data.Subset(dataset, order), shuffle=False)."
)
_WEIGHTS = (
    "Write run.batches(lockstep.data.Weighted(dataset, weights)), or give class weights to the loss, for example "
    "CrossEntropyLoss(weight=...)."
)


def _kind_of(sampler: Any) -> Any:
    """The class of a sampler; torch's own of one that torchdata's StatefulDataLoader has put in its place."""
    kind = type(sampler)
    if not kind.__module__.startswith("torchdata."):
        return kind
    return getattr(torch.utils.data, kind.__name__.removeprefix("Stateful"), kind)


def _refused(sampler: Any, why: str, instead: str) -> ConfigError:
    name = type(sampler).__name__
    return ConfigError(f"The DataLoader's {name} {why}, which a sample plan cannot follow. {instead}")


def _makes_batches() -> ConfigError:
    return ConfigError(
        "The DataLoader has batch_size=None, so its data set makes its own batches. Give single samples: "
        "run.batches(dataset), or a data set with get_batch(indices, keys)."
    )


def _batches(loader: DataLoader[Any]) -> BatchSampler:
    """The loader's ``BatchSampler``; ``ConfigError`` if it makes batches in another way."""
    if loader.batch_size is None and loader.batch_sampler is None:
        raise _makes_batches()
    if _kind_of(loader.batch_sampler) is not BatchSampler:
        raise ConfigError(
            f"The DataLoader's batch_sampler {type(loader.batch_sampler).__name__} decides the batches, "
            "and so does the run's global_batch. Write run.batches(dataset), or, to put samples of similar length "
            "together, run.batches(lockstep.data.Bucketed(dataset, lengths, group)). For batches of your own of that "
            "size, write order = [i for batch in sampler for i in batch] in each epoch, and "
            "run.batches(Subset(dataset, order), shuffle=False)."
        )
    return cast(BatchSampler, loader.batch_sampler)


def check_batch_size(source: Source, *, global_batch: int, micro_batch_size: int, holders: int) -> str | None:
    """A sentence for the log if the run replaces the DataLoader's batch size by another one, else ``None``."""
    known = {global_batch, micro_batch_size, global_batch // holders}
    if source.batch_size is None or source.batch_size in known:
        return None
    return (
        f"The DataLoader's batch_size={source.batch_size} is replaced by the run's "
        f"global_batch={global_batch} ({micro_batch_size} samples in each micro-batch). For a schedule that is made "
        "of len(loader), write run.steps_per_epoch(loader)."
    )


def unused_side_by_side(parts: Sequence[Source], *, shuffle: bool, drop_last: bool) -> list[str]:
    """Sentences for the log on settings of DataLoaders in a tuple that the run does not use, by its own settings."""
    loaders, found = [part for part in parts if part.batch_size is not None], []
    if shuffle and any(part.shuffle is False for part in loaders):
        found.append(
            "A DataLoader with shuffle=False is read side by side with others, and all of them are shuffled. For the "
            "order of the largest data set write run.batches((a, b), shuffle=False)."
        )
    largest = max((len(part.dataset) for part in parts), default=0)
    if sum(bool(part.shuffle) and len(part.dataset) == largest for part in loaders) > 1:
        found.append(
            f"DataLoaders of {largest} samples each that shuffle are read side by side in one order: sample i of one "
            "comes with sample i of the other in every epoch. For other pairs let a data set draw its samples, as "
            "second[int(torch.randint(len(second), ()))] in __getitem__, and give it without a DataLoader."
        )
    if not drop_last and any(part.drop_last for part in loaders):
        found.append(
            "A DataLoader with drop_last=True is read side by side with others, and the last step of an epoch is a "
            "smaller one all the same. To leave it out write run.batches((a, b), drop_last=True)."
        )
    return found
