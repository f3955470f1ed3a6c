"""Started on two nodes with four processes each, this script never gets past init_process_group. Why?"""

import argparse

import torch.distributed as dist
import torch.multiprocessing as mp


def train(local_rank: int, args: argparse.Namespace) -> None:
    rank = args.nodes * args.gpus + local_rank
    dist.init_process_group("gloo", init_method=f"tcp://{args.master}", rank=rank, world_size=args.nodes * args.gpus)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master", default="node-a:6000")
    args = parser.parse_args()
    mp.spawn(train, (args,), nprocs=args.gpus)
