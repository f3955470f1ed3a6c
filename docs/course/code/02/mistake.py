"""The loss of this script does not come down. Which line is missing?"""

import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep.data import Digits

torch.manual_seed(0)
train_set = Digits("train")
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(3):
    for images, labels in DataLoader(train_set, batch_size=64, shuffle=True):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}  last loss {loss.item():.1f}")
