"""A process for each device by hand: meet, agree on the weights, average the gradients. No DDP."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def train(local_rank: int, node_rank: int, nodes: int, per_node: int, port: int) -> None:
    rank = node_rank * per_node + local_rank
    world_size = nodes * per_node
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)  # waits until all have come

    torch.manual_seed(rank)  # on purpose: every process begins with other weights
    model = nn.Linear(4, 1)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)  # now all have those of rank 0

    generator = torch.Generator().manual_seed(7)
    inputs, targets = torch.randn(12, 4, generator=generator), torch.randn(12, 1, generator=generator)
    mine = slice(rank, None, world_size)  # every world_size-th sample, from rank on
    nn.functional.mse_loss(model(inputs[mine]), targets[mine]).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # the sum over all processes, in every process
        parameter.grad /= world_size
    torch.optim.SGD(model.parameters(), lr=0.1).step()

    for turn in range(world_size):  # one after the other, so that the lines stand in order
        dist.barrier()
        if turn == rank:
            weights = " ".join(f"{value:+.4f}" for value in model.weight[0].tolist())
            print(f"rank {rank} of {world_size}, local rank {local_rank}: weights {weights}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # asks the system for a port that is free
    port = store.port
    del store
    mp.spawn(train, (0, 1, 3, port), nprocs=3)  # node 0 of 1, three processes
