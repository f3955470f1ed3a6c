"""Chapter 2: the same loop on any number of devices, with the same result.

What it costs in code: diff examples/01_single_device.py examples/02_lockstep.py

python examples/02_lockstep.py
lockstep run --devices 2 examples/02_lockstep.py
torchrun --nproc_per_node 2 examples/02_lockstep.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

import lockstep
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
run = lockstep.init(global_batch=128)
model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)

for _ in run.epochs(10):
    for batch in run.batches(loader):
        run.backward(batch, loss_fn)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
accuracy = run.evaluate(test_set, correct)
run.print(f"accuracy {accuracy:.4f}  fingerprint {run.fingerprint()}")
