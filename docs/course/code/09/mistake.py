"""With two loader processes an epoch of this script has twice as many samples. Why?"""

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, IterableDataset


class Lines(IterableDataset):
    """The lines of a file, one after the other."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for line in range(100):
            yield torch.tensor(line)


loader = DataLoader(Lines(), batch_size=10, num_workers=2)
print(sum(len(batch) for batch in loader), "samples in an epoch of 100")
