"""One line of this script is wrong. What does the second process do with it?"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(0)
samples = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(samples)
loader = DataLoader(samples, batch_size=8, sampler=sampler)
for epoch in range(10):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
if rank == 0:
    torch.save(model.module.state_dict(), "model.pth")
dist.destroy_process_group()
