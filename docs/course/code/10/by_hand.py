"""A model in two stages, fed with micro-batches, and a layer cut into channels. Both by hand, on one CPU."""

import torch
from torch import nn

torch.manual_seed(0)
inputs, targets = torch.rand(8, 6), torch.rand(8, 4)
first, second = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 4)
stages, micro_batches, ticks = 2, 4, 0
values: list[torch.Tensor] = []  # what stage 0 computed, with its graph

# Forward: in tick t, stage s works on micro-batch t - s. The stages would be two devices, working side by side.
sent: list[torch.Tensor] = []
outputs: list[torch.Tensor] = []
for tick in range(micro_batches + stages - 1):
    line = ["..", ".."]
    if tick >= 1:  # stage 1 takes what stage 0 sent one tick ago
        line[1] = f"F{tick - 1}"
        outputs.append(second(sent[tick - 1]))
    if tick < micro_batches:
        line[0] = f"F{tick}"
        values.append(first(inputs.chunk(micro_batches)[tick]))
        sent.append(values[tick].detach().requires_grad_())  # across the border only the numbers go
    ticks += 1
    print(f"tick {tick}   stage 0 {line[0]}   stage 1 {line[1]}")
idle = stages * ticks - stages * micro_batches
print(f"bubble: {idle} of {stages * ticks} places are empty = {idle / (stages * ticks):.2f}")

# Backward: stage 1 first; the gradient of what it received goes back to stage 0.
for k in range(micro_batches):
    nn.functional.mse_loss(outputs[k], targets.chunk(micro_batches)[k]).backward()
    values[k].backward(sent[k].grad)
found = [parameter.grad / micro_batches for parameter in (*first.parameters(), *second.parameters())]
whole = nn.Sequential(first, second)
whole.zero_grad()
nn.functional.mse_loss(whole(inputs), targets).backward()
equal = all(torch.allclose(a, b.grad, atol=1e-6) for a, b in zip(found, whole.parameters(), strict=True))
print("gradients are those of the whole model:", equal)

# Channels: each of two devices has half of the rows of a weight, and computes half of the outputs.
layer = first[0]
halves = layer.weight.chunk(2)
together = torch.cat([inputs @ half.T for half in halves], dim=1) + layer.bias
equal = torch.allclose(together, layer(inputs))
print("two halves of a layer:", [list(half.shape) for half in halves], equal)
