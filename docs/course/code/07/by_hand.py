"""BatchNorm over the rows of all ranks by hand: three small sums per layer, in forward and in backward."""

import torch
from torch import nn

torch.manual_seed(0)
rows = torch.rand(6, 3) * 4
upstream = torch.rand(6, 3)  # the gradient that comes from the layers behind
ranks = [slice(0, 4), slice(4, 6)]  # rank 0 has four rows, rank 1 has two
eps = 1e-5

plain = nn.BatchNorm1d(3, affine=False)
for rank, own in enumerate(ranks):
    print(f"rank {rank} alone sees the mean", [round(value, 4) for value in rows[own].mean(0).tolist()])
print("all rows have the mean   ", [round(value, 4) for value in rows.mean(0).tolist()])

# Forward. Each rank sends count, mean and squared deviations of its rows; no row leaves its rank.
messages = [(len(rows[own]), rows[own].mean(0), (rows[own] - rows[own].mean(0)).square().sum(0)) for own in ranks]
count, mean, squares = messages[0]
for other_count, other_mean, other_squares in messages[1:]:
    total, shift = count + other_count, other_mean - mean
    mean = mean + shift * (other_count / total)
    squares = squares + other_squares + shift.square() * (count * other_count / total)
    count = total
deviation = (squares / count + eps).sqrt()
outputs = [(rows[own] - mean) / deviation for own in ranks]

# Backward. The gradient of a row depends on all rows, through mean and deviation: two more sums are exchanged.
sums = sum(upstream[own].sum(0) for own in ranks)
products = sum((upstream[own] * output).sum(0) for own, output in zip(ranks, outputs, strict=True))
gradients = [
    (upstream[own] - sums / count - output * products / count) / deviation
    for own, output in zip(ranks, outputs, strict=True)
]

whole = rows.clone().requires_grad_()
expected = plain(whole)
expected.backward(upstream)
for what, own, reference in (("output", outputs, expected), ("gradient", gradients, whole.grad)):
    print(f"{what:8} equals one BatchNorm over all rows:", torch.allclose(torch.cat(own), reference, atol=1e-6))

alone = torch.cat([nn.BatchNorm1d(3, affine=False)(rows[own]) for own in ranks])
print("largest difference of BatchNorm on each rank alone:", f"{(alone - expected).abs().max().item():.2f}")
