"""How many samples does torch's sampler read twice, and how many does it leave out with drop_last?"""

from torch.utils.data import DistributedSampler

for samples in (11, 100, 1797):
    for ranks in (2, 3, 8):
        data = range(samples)
        read = [len(DistributedSampler(data, ranks, rank)) for rank in range(ranks)]
        kept = [len(DistributedSampler(data, ranks, rank, drop_last=True)) for rank in range(ranks)]
        twice, left_out = sum(read) - samples, samples - sum(kept)
        print(f"{samples:5} samples on {ranks} ranks: {twice} read twice, or {left_out} left out with drop_last")
