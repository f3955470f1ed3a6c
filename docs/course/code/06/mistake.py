"""On two processes this script learns as if its learning rate were twice as large. Why?"""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(8, 5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    inputs, targets = torch.randn(32, 8), torch.randint(5, (32,))
    loss = nn.functional.cross_entropy(model(inputs[rank::world_size]), targets[rank::world_size])
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
dist.destroy_process_group()
