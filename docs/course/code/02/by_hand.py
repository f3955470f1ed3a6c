"""An ordinary training loop on one device: a small network on 8 x 8 pictures of digits."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep.data import Digits  # 1,797 pictures that come with the package: no download

torch.set_num_threads(1)
torch.manual_seed(0)
train_set, test_set = Digits("train"), Digits("validation")
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss_fn = nn.CrossEntropyLoss()
loader = DataLoader(train_set, batch_size=64, shuffle=True)

for epoch in range(5):
    model.train()
    total, count = 0.0, 0
    for images, labels in loader:
        loss = loss_fn(model(images), labels)  # forward
        loss.backward()  # gradients into p.grad
        optimizer.step()  # p changes
        optimizer.zero_grad()  # the next step begins at zero
        total += loss.item() * len(labels)  # the last batch is smaller: weigh each mean by its samples
        count += len(labels)
    model.eval()
    with torch.no_grad():
        right = sum((model(images).argmax(1) == labels).sum() for images, labels in DataLoader(test_set, batch_size=64))
    print(f"epoch {epoch}  loss {total / count:.3f}  accuracy {right / len(test_set):.3f}")
