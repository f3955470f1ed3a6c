"""Which process reads which samples: the rule of DistributedSampler by hand, and an exact validation."""

import torch


def shares(samples: int, ranks: int, epoch: int, seed: int = 0) -> list[list[int]]:
    """The samples of each rank in one epoch, as torch's DistributedSampler hands them out."""
    generator = torch.Generator().manual_seed(seed + epoch)  # the same order in every process
    order = torch.randperm(samples, generator=generator).tolist()
    padding = -samples % ranks
    order += order[:padding]  # the first ones a second time, so that all ranks have as many
    return [order[rank::ranks] for rank in range(ranks)]


for epoch in (0, 1):
    for rank, share in enumerate(shares(11, 2, epoch)):
        print(f"epoch {epoch} rank {rank} reads {share}")

# Validation of 11 samples on 2 ranks; the model is right on samples 0 to 6.
right = [sample <= 6 for sample in range(11)]

padded = [*range(11), 0]  # not shuffled, sample 0 a second time
hits = sum(right[sample] for sample in padded)
print(f"padded accuracy  {hits} / {len(padded)} = {hits / len(padded):.4f}")

counts = [(sum(right[rank::2]), len(right[rank::2])) for rank in range(2)]  # no padding: 6 and 5 samples
means = [hits / count for hits, count in counts]
print(f"mean of means    ({means[0]:.4f} + {means[1]:.4f}) / 2 = {sum(means) / 2:.4f}")

hits, count = (sum(column) for column in zip(*counts, strict=True))  # two all_reduce calls in a real run
print(f"exact accuracy   {hits} / {count} = {hits / count:.4f}")
