"""DistributedDataParallel by hand: eleven samples, one step, on one, two and three processes."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(11, 4, generator=generator), torch.randn(11, 1, generator=generator))


def train(rank: int, world_size: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)  # the same first weights in every process
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = data()
    sampler = DistributedSampler(samples, shuffle=False)  # this process's part: every world_size-th sample
    for inputs, targets in DataLoader(samples, batch_size=len(sampler), sampler=sampler):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # DDP averages the gradients of all processes in here
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:  # every process has the same weights now
        numbers = [f"{weight:+.4f}" for weight in model.module.weight.flatten().tolist()]
        print(f"{world_size} processes, {len(sampler)} samples each:", *numbers, flush=True)
    dist.barrier()  # a process that leaves while others still use the group may end them
    dist.destroy_process_group()


if __name__ == "__main__":
    for world_size in (1, 2, 3):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # asks the system for a port that is free
        port = store.port
        del store
        mp.spawn(train, (world_size, port), nprocs=world_size)
