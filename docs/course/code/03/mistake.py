"""This script saves its weights, and another one cannot load them into the plain model. Why?"""

import torch
from torch import nn
from torch.nn.parallel import DataParallel

model = DataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    inputs, targets = torch.randn(30, 8), torch.randint(5, (30,))
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), "model.pth")
