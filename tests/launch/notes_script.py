"""A script with the habits of the one that the notes explain, for CPUs: see tests/launch/test_notes_script.py."""

import argparse
import math
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def init_distributed_mode(args):
    args.rank = int(os.environ["RANK"])
    args.world_size = int(os.environ["WORLD_SIZE"])
    args.gpu = int(os.environ["LOCAL_RANK"])
    dist.init_process_group(backend="gloo", init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    dist.barrier()


def reduce_value(value, average=True):
    if dist.get_world_size() < 2:
        return value
    with torch.no_grad():
        dist.all_reduce(value)
        if average:
            value /= dist.get_world_size()
        return value


def photos(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 5
    return TensorDataset(nn.functional.one_hot(labels) + torch.randn(count, 5, generator=generator), labels)


def main(args):
    init_distributed_mode(args)
    torch.manual_seed(0)
    device = torch.device("cpu")
    args.lr *= args.world_size
    train_set, val_set = photos(50, 0), photos(11, 1)
    train_sampler, val_sampler = DistributedSampler(train_set), DistributedSampler(val_set)
    train_loader = DataLoader(
        train_set, batch_sampler=BatchSampler(train_sampler, args.batch_size, drop_last=True), num_workers=1
    )
    val_loader = DataLoader(val_set, batch_size=args.batch_size, sampler=val_sampler)
    model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5)).to(device)
    checkpoint_path = Path(tempfile.gettempdir()) / "initial_weights.pt"
    if args.rank == 0:
        torch.save(model.state_dict(), checkpoint_path)
    dist.barrier()
    model.load_state_dict(torch.load(checkpoint_path, map_location=device))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda x: (1 + math.cos(x * math.pi / args.epochs)) / 2 * 0.9 + 0.1
    )
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        model.train()
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            mean_loss = reduce_value(loss.detach(), average=True)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        model.eval()
        sum_num = torch.zeros(1)
        for images, labels in val_loader:
            sum_num += torch.eq(model(images.to(device)).argmax(1), labels.to(device)).sum()
        sum_num = reduce_value(sum_num, average=False)
        acc = sum_num.item() / val_sampler.total_size
        if args.rank == 0:
            print(f"[epoch {epoch}] loss {mean_loss.item():.4f} accuracy {acc:.3f}")
            torch.save(model.module.state_dict(), f"model-{epoch}.pth")
    if args.rank == 0:
        checkpoint_path.unlink()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--syncBN", type=bool, default=True)
    parser.add_argument("--dist-url", default="env://")
    main(parser.parse_args())
