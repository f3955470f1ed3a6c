"""Chapter 1: an ordinary PyTorch loop, on one device."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep.data import Digits


def correct(output, labels):
    return (output.argmax(1) == labels).float()


torch.manual_seed(0)
train_set, test_set = Digits("train"), Digits("validation")
model = nn.Sequential(
    nn.Conv2d(1, 16, 3),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Flatten(),
    nn.Dropout(0.2),
    nn.Linear(576, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10 * 12)
loss_fn = nn.CrossEntropyLoss()
loader = DataLoader(train_set, batch_size=128, shuffle=True)

for _ in range(10):
    for images, labels in loader:
        loss_fn(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
accuracy = correct(model.eval()(test_set.images), test_set.labels).mean()
print(f"accuracy {accuracy:.4f}")
