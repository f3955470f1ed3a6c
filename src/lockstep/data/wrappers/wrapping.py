"""Data sets around another one: what they hand through, and how they read rows of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from lockstep.core.generators import generators_kept
from lockstep.core.plan import Indices
from lockstep.data.batch import DeviceTransform
from lockstep.data.images.transforms import FinishAlias, device_transform_of
from lockstep.data.keyed import SampleKeys
from lockstep.data.naming import require_map_style, sample_error, unwrap_subset
from lockstep.data.reader import BrokenSample, Collate, batch_read, collate_samples, read_each
from lockstep.errors import ConfigError

BatchRead = Callable[[Indices, SampleKeys], Any]


class Wrapping(FinishAlias, Dataset[Any]):
    """A data set that reads another map-style one, also within ``Subset``, in its own way."""

    outermost = False
    """True for a set that may not be wrapped by another one."""

    def __init__(self, dataset: Any) -> None:
        name = type(self).__name__
        require_map_style(dataset, name)
        if len(dataset) == 0:
            raise ConfigError(f"{name} was given an empty data set. Check how it was split.")
        if getattr(dataset, "outermost", False) and not self.outermost:
            outer = type(dataset).__name__
            raise ConfigError(f"{outer} belongs around {name}, not inside it: {outer}({name}(dataset, ...)).")
        self.dataset = dataset
        self._inner, self._numbers = unwrap_subset(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Refused: a place means a sample only within an epoch."""
        name = type(self).__name__
        raise ConfigError(
            f"{name} is read in micro-batches of an epoch. Give it to run.batches as it is, and your collate function "
            f"to it: {name}(dataset, ..., collate=...)."
        )

    @property
    def device_transform(self) -> DeviceTransform | None:
        """That of the inner set."""
        return device_transform_of(self._inner)

    @property
    def in_memory(self) -> bool:
        """True if the inner set is in memory."""
        return type(self._inner) is TensorDataset or bool(getattr(self._inner, "in_memory", False))

    def rows_of(self, indices: Indices) -> Indices:
        """The numbers of the inner set that those of the given one stand for."""
        return indices if self._numbers is None else self._numbers[indices]

    def inner_batch(self) -> BatchRead | None:
        """Reads whole micro-batches of the given set by its own numbers; ``None`` where it is read one by one."""
        if type(self._inner) is TensorDataset:
            return self._index_tensors
        read = batch_read(self._inner)
        if read is None:
            return None
        return lambda indices, keys: read(self.rows_of(indices), keys)

    def collated(self, collate: Collate | None, numbers: Indices, keys: SampleKeys) -> Any:
        """Samples of the given set, row ``i`` with the random numbers of row ``i`` of the keys.

        They are read one by one for a ``collate`` function, or where the set gives no whole micro-batches. A sample
        that cannot be read is a ``BrokenSample`` from its named error.
        """
        read = None if collate is not None else self.inner_batch()
        try:
            if read is not None:
                return read(numbers, keys)
            with generators_kept():
                return collate_samples(read_each(self.dataset, numbers, keys), collate)
        except BrokenSample as broken:
            number = int(numbers[broken.position])
            raise BrokenSample(broken.position) from sample_error(self.dataset, number, broken.cause)

    def _index_tensors(self, indices: Indices, keys: SampleKeys) -> Any:
        rows = torch.from_numpy(self.rows_of(indices))
        return tuple(tensor.index_select(0, rows.to(tensor.device)) for tensor in self._inner.tensors)


def behind(dataset: Any, seed: int, epoch: int, places: Indices) -> tuple[Any, Indices]:
    """The set in all wrappers, and the numbers of its samples that stand at places of an epoch."""
    while isinstance(dataset, Wrapping):
        sample_at = getattr(dataset, "sample_at", None)
        places = places if sample_at is None else sample_at(seed, epoch, places)
        dataset = dataset.dataset
    return dataset, places
