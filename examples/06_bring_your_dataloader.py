"""Chapter 6: use the DataLoader that a distributed script already has, with its DistributedSampler.

    lockstep run --devices 2 examples/06_bring_your_dataloader.py

Its data set, collate function and workers stay. The run decides which rank reads which sample: no sample is read twice
to fill up a rank, and set_epoch is not needed. A sample's random numbers are keyed by (seed, epoch, sample), so the
noise below is the same for any number of ranks and workers.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lockstep
from lockstep.data import Digits


class NoisyDigits(Dataset):
    """Any map-style data set: samples are dicts here, and a transform draws random numbers."""

    def __init__(self, split, noise):
        self.digits, self.noise = Digits(split), noise

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        image, label = self.digits[index]
        return {"image": image + self.noise * torch.randn(image.shape), "label": label}


def collate(samples):
    images = torch.stack([sample["image"] for sample in samples])
    return {"image": images, "label": torch.tensor([sample["label"] for sample in samples])}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, image, label=None):  # a dict goes to the model by keyword, and to the loss whole
        return self.body(image)


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch["label"])


def correct(output, batch):
    return output.argmax(1) == batch["label"]


def main():
    torch.manual_seed(0)
    run = lockstep.init(global_batch=96, micro_batches=6)
    model = Classifier()
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    train_set, test_set = NoisyDigits("train", 0.1), NoisyDigits("validation", 0.0)
    sampler = DistributedSampler(train_set, num_replicas=run.world.world_size, rank=run.world.rank)
    train_loader = DataLoader(train_set, batch_size=16, sampler=sampler, collate_fn=collate, num_workers=1)
    test_loader = DataLoader(test_set, batch_size=16, collate_fn=collate)

    for _ in run.epochs(2):
        for batch in run.batches(train_loader):
            run.backward(batch, loss)
            optimizer.step()
            optimizer.zero_grad()
    run.print(f"accuracy {run.evaluate(test_loader, correct):.4f}  fingerprint {run.fingerprint()}")


if __name__ == "__main__":
    main()
