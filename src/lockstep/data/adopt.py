"""Takes over the data that a script already has: a data set, or a DataLoader with its sampler.

The sample plan replaces samplers. What a loader or sampler decides and the plan can decide too is taken over; anything
else is refused, with the line to write instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
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

from lockstep.data.images.transforms import DeviceTransform, FinishAlias, device_transform_of
from lockstep.data.naming import require_map_style, unwrap_subset
from lockstep.data.reader import Collate
from lockstep.errors import ConfigError


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


def adopt(source: Any) -> Source:
    """Takes over a data set or a DataLoader; ``ConfigError`` if a sample plan cannot replace its sampler."""
    if isinstance(source, Source):
        return source
    if isinstance(source, DataLoader):
        return _adopt_loader(source)
    if isinstance(source, Sampler):
        raise ConfigError(
            f"run.batches needs a data set and got a {type(source).__name__}. "
            "Write run.batches(dataset): the run itself decides which rank reads which samples."
        )
    _check_map_style(source)
    inner = unwrap_subset(source)[0]
    return Source(
        dataset=source,
        device_transform=device_transform_of(inner),
        shuffle=False if getattr(inner, "keeps_order", False) else None,
    )


def _adopt_loader(loader: DataLoader[Any]) -> Source:
    _check_map_style(loader.dataset)
    batches = _batches(loader)
    dataset, shuffle, notes = _adopt_sampler(batches.sampler, loader.dataset)
    inner = unwrap_subset(dataset)[0]
    drop_last = batches.drop_last or bool(getattr(batches.sampler, "drop_last", False))
    return Source(
        dataset=dataset,
        collate=None if loader.collate_fn is default_collate else loader.collate_fn,
        workers=loader.num_workers,
        shuffle=shuffle and not getattr(inner, "keeps_order", False),
        drop_last=drop_last,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout or None,
        batch_size=batches.batch_size,
        evaluation_batch=None if isinstance(batches.sampler, DistributedSampler) else batches.batch_size,
        device_transform=device_transform_of(inner),
        notes=notes if loader.worker_init_fn is None else (*notes, _WORKER_INIT),
    )


def _adopt_sampler(sampler: Any, dataset: Any) -> tuple[Any, bool, tuple[str, ...]]:
    """The data set, narrowed to what the sampler visits; True if it is shuffled; notes for the log."""
    if type(sampler) is SequentialSampler:
        return dataset, False, ()
    if type(sampler) is RandomSampler:
        if sampler.replacement or sampler.num_samples != len(sampler.data_source):
            raise _refused(sampler, "draws with replacement or another number of samples", _ONCE)
        return dataset, True, ()
    if type(sampler) is SubsetRandomSampler:
        return Subset(dataset, list(map(int, sampler.indices))), True, ()
    if type(sampler) is DistributedSampler:
        said = (
            f"The DistributedSampler (shuffle={sampler.shuffle}, drop_last={sampler.drop_last}, "
            f"seed={sampler.seed}) is replaced by the run's sample plan: the run's seed decides the order, "
            "no sample is read twice to fill up a rank, and set_epoch is not needed."
        )
        return dataset, bool(sampler.shuffle), (said,)
    if isinstance(sampler, WeightedRandomSampler):
        raise _refused(sampler, "draws with replacement", _WEIGHTS)
    raise _refused(sampler, "has its own order, which depends on what was read before", _ONCE)


_ONCE = "Write run.batches(dataset): every sample once per epoch, in an order keyed by the run's seed."
_WEIGHTS = (
    "Write run.batches(lockstep.data.Weighted(dataset, weights)), or give class weights to the loss, for example "
    "CrossEntropyLoss(weight=...)."
)


_WORKER_INIT = (
    "The DataLoader's worker_init_fn is not called: random numbers are keyed by sample. "
    "Move any other setup into the data set."
)


def _refused(sampler: Any, why: str, instead: str) -> ConfigError:
    name = type(sampler).__name__
    return ConfigError(f"The DataLoader's {name} {why}, which a sample plan cannot follow. {instead}")


def _check_map_style(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"{type(dataset).__name__} is an IterableDataset, whose samples have no index, "
            "so they cannot be distributed by a plan. Give it __len__ and __getitem__(index)."
        )
    require_map_style(dataset, "run.batches")


def _batches(loader: DataLoader[Any]) -> BatchSampler:
    """The loader's ``BatchSampler``; ``ConfigError`` if it makes batches in another way."""
    if loader.batch_size is None and loader.batch_sampler is None:
        raise ConfigError(
            "The DataLoader has batch_size=None, so its data set makes its own batches. Give single samples: "
            "run.batches(dataset), or a data set with get_batch(indices, keys)."
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise ConfigError(
            f"The DataLoader's batch_sampler {type(loader.batch_sampler).__name__} decides the batches, "
            "and so does the run's global_batch. Write run.batches(dataset)."
        )
    return loader.batch_sampler


def check_batch_size(source: Source, *, global_batch: int, micro_batch_size: int, holders: int) -> str | None:
    """A sentence for the log if the run replaces the DataLoader's batch size by another one, else ``None``."""
    known = {global_batch, micro_batch_size, global_batch // holders}
    if source.batch_size is None or source.batch_size in known:
        return None
    return (
        f"The DataLoader's batch_size={source.batch_size} is replaced by the run's "
        f"global_batch={global_batch} ({micro_batch_size} samples in each micro-batch)."
    )
