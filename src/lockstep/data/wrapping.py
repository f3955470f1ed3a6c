"""Data sets around another one: what they hand through, and how they read rows of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from lockstep.data.keyed import SampleKeys, generators_kept, seed_generators
from lockstep.data.naming import look_through, sample_error
from lockstep.data.reader import BrokenSample, Collate
from lockstep.errors import ConfigError
from lockstep.permutation import Indices

BatchRead = Callable[[Indices, SampleKeys], Any]


class Wrapping(Dataset[Any]):
    """A data set that reads another one in its own way.

    Args:
        dataset: a map-style data set; ``Subset`` is looked through.
    """

    def __init__(self, dataset: Any) -> None:
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise ConfigError(
                f"{type(self).__name__} was given a {type(dataset).__name__}, which has no length and no access by "
                "number. Give a data set with __len__ and __getitem__(index)."
            )
        if len(dataset) == 0:
            raise ConfigError(f"{type(self).__name__} was given an empty data set. Look at how it was split.")
        self.dataset = dataset
        self._inner, self._numbers = look_through(dataset)

    @property
    def finish(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """That of the inner set."""
        return getattr(self._inner, "finish", None)

    @property
    def in_memory(self) -> bool:
        """Whether the inner set is."""
        return type(self._inner) is TensorDataset or bool(getattr(self._inner, "in_memory", False))

    def rows_of(self, indices: Indices) -> Indices:
        """The numbers of the inner set that those of the given one stand for."""
        return indices if self._numbers is None else self._numbers[indices]

    def inner_batch(self) -> BatchRead | None:
        """Reads whole micro-batches of the given set by its own numbers; ``None`` where it is read one by one."""
        if type(self._inner) is TensorDataset:
            return self._index_tensors
        read: BatchRead | None = getattr(self._inner, "get_batch", None)
        if read is None:
            return None
        return lambda indices, keys: read(self.rows_of(indices), keys)

    def collated(self, collate: Collate | None, numbers: Indices, keys: SampleKeys) -> Any:
        """Samples of the given set, read one by one, row ``i`` with the random numbers of row ``i`` of the keys.

        A sample that cannot be read is a ``BrokenSample`` from its named error.
        """
        samples = []
        with generators_kept():
            for position, (number, seed) in enumerate(zip(numbers.tolist(), keys.seeds(), strict=True)):
                seed_generators(seed)
                try:
                    samples.append(self.dataset[number])
                except Exception as error:
                    raise BrokenSample(position) from sample_error(self.dataset, number, error)
            if collate is not None:
                return collate(samples)
            data = default_collate(samples)
            return tuple(data) if isinstance(samples[0], tuple) else data

    def _index_tensors(self, indices: Indices, keys: SampleKeys) -> Any:
        rows = torch.from_numpy(self.rows_of(indices))
        return tuple(tensor.index_select(0, rows) for tensor in self._inner.tensors)
