"""DataParallel by hand: one process, a replica and a thread for each device. Here all three devices are the CPU."""

import copy
import threading

import torch
from torch import nn

torch.manual_seed(0)
devices = [torch.device("cpu")] * 3
inputs, targets = torch.randn(30, 8), torch.randint(5, (30,))
model = nn.Linear(8, 5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
outputs: list[torch.Tensor] = [torch.empty(0)] * len(devices)

parts = [part.to(device) for part, device in zip(inputs.chunk(len(devices)), devices, strict=True)]
print("scatter   batch", list(inputs.shape), "->", [list(part.shape) for part in parts])

replicas = [copy.deepcopy(model).to(device) for device in devices]
values = sum(p.numel() for p in model.parameters())
print(
    "replicate",
    values,
    "parameters ->",
    [sum(p.numel() for p in replica.parameters()) for replica in replicas],
)


def forward(index: int) -> None:
    replica = replicas[index]
    outputs[index] = replica(parts[index])


threads = [threading.Thread(target=forward, args=(index,)) for index in range(len(devices))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

gathered = torch.cat([output.to(devices[0]) for output in outputs])
print("gather    outputs", [list(output.shape) for output in outputs], "->", list(gathered.shape))

loss = nn.functional.cross_entropy(gathered, targets)  # on device 0, of the whole batch
loss.backward()  # back through the gather, into the gradients of every replica
for parameter, *copies in zip(model.parameters(), *(replica.parameters() for replica in replicas), strict=True):
    parameter.grad = torch.stack([each.grad.to(devices[0]) for each in copies]).sum(0)
print("reduce    gradients of", len(replicas), "replicas -> their sum on device 0")

whole = copy.deepcopy(model)
nn.functional.cross_entropy(whole(inputs), targets).backward()
far = max((a.grad - b.grad).abs().max() for a, b in zip(model.parameters(), whole.parameters(), strict=True))
print("the gradient of the whole batch is", "equal but for rounding" if far < 1e-6 else "another one")
optimizer.step()  # on device 0 alone
