"""This script converts its BatchNorm, and the conversion comes at the wrong place. Where should it stand?"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).to(device)
model = DistributedDataParallel(model, device_ids=[device.index])
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
model(torch.randn(4, 3, 8, 8, device=device)).sum().backward()
dist.destroy_process_group()
