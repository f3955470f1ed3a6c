"""The same loop with Lockstep, on however many processes."""

import torch
from torch import nn

import lockstep
from lockstep.data import Digits


def correct(output, labels):
    return (output.argmax(1) == labels).float()


torch.manual_seed(0)
train_set, test_set = Digits("train"), Digits("validation")
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss_fn = nn.CrossEntropyLoss()
run = lockstep.init(global_batch=64, seed=0)
model, optimizer = run.prepare(model, optimizer)

for epoch in run.epochs(5):
    for batch in run.batches(train_set):
        run.backward(batch, loss_fn)
        optimizer.step()
        optimizer.zero_grad()
    run.print(f"epoch {epoch}  accuracy {run.evaluate(test_set, correct):.3f}")
run.print("fingerprint", run.fingerprint()[:16])
