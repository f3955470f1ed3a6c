"""Loss scaling by hand: half-precision gradients that would underflow, and a scale that looks for its place."""

import torch

half = torch.float16
for text, value in (
    ("300 * 300", torch.tensor(300.0, dtype=half) * 300),
    ("1e-8", torch.tensor(1e-8, dtype=half)),
    ("1 + 0.0004", torch.tensor(1.0, dtype=half) + 0.0004),
):
    print(f"{text:10} in fp16 is {value.item():g}")
print(f"1 + 0.003  in bf16 is {(torch.tensor(1.0, dtype=torch.bfloat16) + 0.003).item():g}")

inputs = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5]])
targets = inputs @ torch.tensor([[0.002], [-0.001]])
weights = torch.zeros(2, 1)  # the weights that are updated stay in fp32


def gradient(scale: float) -> torch.Tensor:
    """The gradient as fp16 computes it, of a small loss multiplied by the scale; divided again in fp32."""
    copy = weights.to(half).requires_grad_()
    output = inputs.to(half) @ copy
    loss = (output.float() - targets).square().mean() * 1e-6
    (loss * scale).backward()
    return copy.grad.float() / scale


print("gradient without a scale", [f"{value:.3g}" for value in gradient(1.0).flatten().tolist()])
print("gradient, scale 65536   ", [f"{value:.3g}" for value in gradient(65536.0).flatten().tolist()])

scale, good = 2.0**46, 0  # far too large on purpose
for step in range(30):
    found = gradient(scale)
    if not torch.isfinite(found).all():  # step: leave this one out. update: a smaller scale
        scale, good = scale * 0.5, 0
        print(f"step {step:2} skipped, scale is now 2^{torch.tensor(scale).log2().item():.0f}")
        continue
    weights -= 100_000 * found
    good += 1
    if good == 10:  # after ten good steps in a row: try a larger one
        scale, good = scale * 2, 0
        print(f"step {step:2} is good, scale is now 2^{torch.tensor(scale).log2().item():.0f}")
print("weights", [f"{value:.4f}" for value in weights.flatten().tolist()])
