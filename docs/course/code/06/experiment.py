"""In which order are gradients finished, and when could each bucket be sent? Backward is still running then."""

import torch
from torch import nn

model = nn.Sequential(
    nn.Linear(64, 64),
    nn.ReLU(),
    nn.Linear(64, 64),
    nn.ReLU(),
    nn.Linear(64, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
names = {parameter: name for name, parameter in model.named_parameters()}
bucket: list[str] = []
waiting = len(names)


def finished(parameter: torch.Tensor) -> None:
    """Called by autograd as soon as the gradient of a parameter is whole."""
    global waiting
    waiting -= 1
    bucket.append(names[parameter])
    size = sum(each.grad.numel() * 4 for each in names if names[each] in bucket)
    if size >= 16_384 or not waiting:
        print(f"send {size:6} bytes of {', '.join(bucket)}; {waiting} gradients are still to come")
        bucket.clear()


for parameter in names:
    parameter.register_post_accumulate_grad_hook(finished)
model(torch.rand(8, 64)).square().mean().backward()
