"""An epoch and a validation with Lockstep: each sample is counted once, on up to four processes."""

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
run = lockstep.init(global_batch=4, micro_batches=4)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
run.print(f"accuracy {run.evaluate(samples, right):.4f}")
numbered = TensorDataset(samples.tensors[0], 2.0 ** torch.arange(11.0)[:, None])
total = run.evaluate(numbered, lambda _, target: target.flatten()) * len(numbered)
run.print(f"sum of 2^i over the samples that were counted: {total:.0f} of {2**11 - 1}")
for epoch in run.epochs(2):
    for batch in run.batches(samples):
        loss = run.backward(batch, nn.functional.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
    run.print(f"epoch {epoch}: loss of the last step {loss:.4f}")
