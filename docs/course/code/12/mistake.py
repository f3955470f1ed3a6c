"""On more than one process this script hangs before it prints a line. Why?"""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0 and step % 10 == 0:
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        print(f"step {step}: loss {mean.item() / dist.get_world_size():.4f}")
dist.destroy_process_group()
