"""On one host with four GPUs this script works. On two such hosts, every process of the second one fails. Why?"""

import os

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1).cuda())
loss = model(torch.randn(4, 8).cuda()).sum()
loss.backward()
dist.destroy_process_group()
