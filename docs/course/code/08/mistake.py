"""With GradScaler this script hardly learns at all, although nothing overflows. Why?"""

import torch
from torch import nn

device = "cuda"
model = nn.Linear(8, 5).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler(device)
for _ in range(100):
    inputs, targets = torch.randn(32, 8, device=device), torch.randint(5, (32,), device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
