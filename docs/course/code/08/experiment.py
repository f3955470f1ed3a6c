"""What share of a gradient does fp16 lose as zero or infinity, for several scales? And bf16 without any?"""

import torch

torch.manual_seed(0)
exponents = torch.linspace(-12, -3, 10_000, dtype=torch.float64)
gradients = (10**exponents).float()  # from 1e-12 to 1e-3, as many in each decade
for scale in (1.0, 2.0**8, 2.0**16, 2.0**24, 2.0**32):
    stored = (gradients * scale).half()
    zero, infinite = (stored == 0).float().mean().item(), torch.isinf(stored).float().mean().item()
    print(f"fp16, scale {scale:>13,.0f}: {100 * zero:4.1f} % zero, {100 * infinite:4.1f} % infinite")
print(f"bf16, no scale            : {100 * (gradients.bfloat16() == 0).float().mean().item():4.1f} % zero")
