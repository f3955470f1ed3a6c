"""A sound training loop on any number of ranks, as people write it by hand; faults change one of its methods."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from lockstep.verify import Recorder

FEATURES, CLASSES, SEED = 12, 4, 3


class Loop:
    """Eight steps of 8 samples: an epoch of 6 and the beginning of the next.

    Args:
        rank: of this process.
        world_size: number of processes; 1 needs no process group.
        folder: for the records.
        adam: AdamW in place of SGD.
        ddp: gradients are reduced by DistributedDataParallel.
        bf16: the forward pass runs under autocast.
    """

    samples, global_batch, steps = 48, 8, 8
    criterion = None
    """The loss, where it is a module."""

    def __init__(self, rank, world_size, folder, adam=False, ddp=False, bf16=False):
        self.rank, self.world_size, self.folder = rank, world_size, folder
        self.bf16 = bf16
        self.adam, self.ddp = adam, ddp and world_size > 1

    def run(self):
        self.prepare()
        self.make_data()
        self.recorder = Recorder(self.folder, self.model, self.optimizer, loss=self.criterion)
        for indices in self.batches():
            self.train_step(indices)
            self.recorder.step()

    def prepare(self):
        torch.set_num_threads(1)
        self.seed()
        self.model = self.build()
        self.load()
        self.broadcast()
        self.network = DistributedDataParallel(self.model) if self.ddp else self.model
        self.optimizer = self.make_optimizer()
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def seed(self):
        torch.manual_seed(SEED)

    def build(self):
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def load(self):
        """For weights from a file."""

    def broadcast(self):
        for tensor in self.model.state_dict().values():
            self.share(lambda tensor=tensor: dist.broadcast(tensor, 0))

    def make_optimizer(self):
        if self.adam:
            return torch.optim.AdamW(self.model.parameters(), lr=0.01)
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def make_data(self):
        generator = torch.Generator().manual_seed(SEED)
        self.data = torch.randn(self.samples, FEATURES, generator=generator)
        self.labels = torch.randint(0, CLASSES, (self.samples,), generator=generator)

    def batches(self):
        """This rank's share of each step's samples."""
        size, step, epoch = self.global_batch // self.world_size, 0, 0
        while True:
            order = self.order(epoch)
            for first in range(0, len(order), size):
                if step == self.steps:
                    return
                yield order[first : first + size]
                step += 1
            epoch += 1

    def order(self, epoch):
        """The samples of this rank in an epoch."""
        sampler = DistributedSampler(self.data, self.world_size, self.rank, seed=SEED)
        sampler.set_epoch(epoch)
        return list(sampler)

    def train_step(self, indices):
        self.optimizer.zero_grad()
        self.forward_backward(indices)
        self.reduce()
        self.clip()
        self.optimizer.step()
        self.scheduler.step()
        self.after_step()

    def forward_backward(self, indices):
        inputs = self.augment(self.data[indices], indices)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            output = self.network(inputs)
        targets = self.labels[indices]
        losses = self.losses(output.float(), targets)
        self.local_loss(losses).backward()
        loss = self.reported(losses.detach())
        self.recorder.batch(samples=indices, inputs=inputs, targets=targets, losses=losses, loss=loss)

    def augment(self, inputs, indices):
        return inputs

    def losses(self, output, targets):
        return functional.cross_entropy(output, targets, reduction="none")

    def local_loss(self, losses):
        return losses.mean()

    def reported(self, losses):
        """The mean over the global batch."""
        total = torch.stack([losses.sum(), torch.tensor(float(len(losses)))])
        self.share(lambda: dist.all_reduce(total))
        return total[0] / total[1]

    def reduce(self):
        for parameter in () if self.ddp else self.model.parameters():
            self.share(lambda parameter=parameter: dist.all_reduce(parameter.grad))
            parameter.grad /= self.world_size

    def clip(self):
        """Where gradients are clipped."""

    def after_step(self):
        """Where buffers are averaged."""

    def share(self, collective):
        if self.world_size > 1:
            collective()
