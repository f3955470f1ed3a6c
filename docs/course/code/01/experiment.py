"""Three reasons why several devices compute something else than one."""

import torch

errors = torch.tensor([1.0, 4.0, 2.0, 8.0, 5.0, 7.0, 3.0, 6.0, 9.0, 0.0, 10.0])  # the losses of eleven samples

print("1. samples read twice")
padded = torch.cat([errors, errors[:1]])  # 12 = 2 processes x 6
print(f"   mean of 11 samples            {errors.mean():.6f}")
print(f"   mean with sample 0 twice      {padded.mean():.6f}")

print("2. a mean of means")
parts = errors[:6], errors[6:]  # 6 samples on one process, 5 on the other
print(f"   mean of the two means         {(parts[0].mean() + parts[1].mean()) / 2:.6f}")
print(f"   sum of sums / sum of counts   {(parts[0].sum() + parts[1].sum()) / (len(parts[0]) + len(parts[1])):.6f}")

print("3. another order of the sum")
a, b, c = torch.tensor([1.0, 1e8, -1e8])
print(f"   (a + b) + c                   {(a + b) + c:.6f}")
print(f"   a + (b + c)                   {a + (b + c):.6f}")
