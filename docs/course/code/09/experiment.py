"""How many loader processes are enough? Each sample takes 4 ms to read, each step of 16 samples 20 ms to compute."""

import time
import warnings

import torch
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset[torch.Tensor]):
    """Samples of a slow disk."""

    def __len__(self) -> int:
        return 480

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.004)
        return torch.tensor(float(index))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores: they only wait
    for workers in (0, 1, 2, 4, 8):
        loader = iter(DataLoader(Slow(), batch_size=16, num_workers=workers))
        next(loader)  # the processes have started
        begin, waited = time.perf_counter(), 0.0
        for _ in range(20):
            asked = time.perf_counter()
            next(loader)
            waited += time.perf_counter() - asked
            time.sleep(0.02)  # the step
        seconds = time.perf_counter() - begin
        print(
            f"{workers} workers: {1000 * seconds / 20:3.0f} ms per step, of which {1000 * waited / 20:3.0f} ms waiting"
        )
