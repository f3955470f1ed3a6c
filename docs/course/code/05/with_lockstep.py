"""An epoch and a validation with Lockstep: each sample is counted once, on any number of processes."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

samples = TensorDataset(torch.arange(11.0)[:, None], (torch.arange(11) <= 6).float()[:, None])


class Constant(nn.Module):
    """Says 1 for every sample, whatever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(inputs) + self.offset


def right(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.round() == target).float().flatten()


model = Constant()
run = lockstep.init(global_batch=4, micro_batches=2)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
run.print(f"accuracy {run.evaluate(samples, right):.4f}")
for epoch in run.epochs(2):
    for batch in run.batches(samples):
        loss = run.backward(batch, nn.functional.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
    run.print(f"epoch {epoch}: loss of the last step {loss:.4f}")
