"""The same step with Lockstep: the number of processes changes nothing."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

generator = torch.Generator().manual_seed(1)
samples = TensorDataset(torch.randn(11, 4, generator=generator), torch.randn(11, 1, generator=generator))

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = lockstep.init(global_batch=12, micro_batches=4)
model, optimizer = run.prepare(model, optimizer)
for _ in run.epochs(1):
    for batch in run.batches(samples):
        run.backward(batch, nn.functional.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
run.print("weights    ", *[f"{weight:+.4f}" for weight in model.weight.flatten().tolist()])
run.print("fingerprint", run.fingerprint()[:16])
