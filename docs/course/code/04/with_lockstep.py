"""The same step with Lockstep; the launcher decides how many processes there are."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

generator = torch.Generator().manual_seed(7)
samples = TensorDataset(torch.randn(12, 4, generator=generator), torch.randn(12, 1, generator=generator))
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = lockstep.init(global_batch=12, micro_batches=6)
model, optimizer = run.prepare(model, optimizer)
for _ in run.epochs(1):
    for batch in run.batches(samples):
        run.backward(batch, nn.functional.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
run.print("weights    ", *[f"{value:+.4f}" for value in model.weight[0].tolist()])
run.print("fingerprint", run.fingerprint()[:16])
