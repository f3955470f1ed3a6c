"""Sound loops with one thing more, which a fault can get wrong."""

import copy

import torch
import torch.distributed as dist
from tests.verify.planted.loop import CLASSES, FEATURES, SEED, Loop
from torch import nn
from torch.nn import functional

from lockstep.numerics.sync_batch_norm import convert_sync_batch_norm
from lockstep.verify import Recorder


class Pretrained(Loop):
    """Rank 0 loads weights and sends them to the others."""

    def load(self):
        if self.rank == 0:
            generator = torch.Generator().manual_seed(99)
            for parameter in self.model.parameters():
                parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)


class Ragged(Loop):
    """The last batch of an epoch has 5 samples, and losses are divided by the size of the global batch."""

    samples = 45

    def batches(self):
        for step in range(self.steps):
            epoch, number = divmod(step, 6)
            order = torch.randperm(45, generator=torch.Generator().manual_seed(epoch)).tolist()
            batch = order[8 * number : 8 * number + 8]
            self.size = len(batch)
            yield batch[self.rank :: self.world_size]

    def local_loss(self, losses):
        return losses.sum() * self.world_size / self.size


class Uneven(Loop):
    """49 samples: the last batch of an epoch has one."""

    samples = 49

    def batches(self):
        for step in range(self.steps):
            epoch, number = divmod(step, 7)
            generator = torch.Generator().manual_seed(SEED + epoch)
            order = torch.randperm(49, generator=generator).tolist()
            yield order[8 * number : 8 * number + 8][self.rank :: self.world_size]

    def local_loss(self, losses):
        size = torch.tensor(len(losses))
        self.share(lambda: dist.all_reduce(size))
        return losses.sum() * self.world_size / size


class Centred(Loop):
    """A layer subtracts a running mean, and the ranks average it after each step."""

    def build(self):
        model = super().build()
        model.insert(0, Centre())
        return model

    def after_step(self):
        centre = self.model[0].mean
        self.share(lambda: dist.all_reduce(centre))
        centre /= self.world_size


class Centre(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x):
        centred = x - self.mean
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return centred


class Normalised(Loop):
    """BatchNorm over the whole batch."""

    def build(self):
        model = super().build()
        model.insert(1, nn.BatchNorm1d(16))
        return self.synchronised(model)

    def synchronised(self, model):
        return convert_sync_batch_norm(model, dist.group.WORLD) if self.world_size > 1 else model


class Dropping(Loop):
    """Dropout with masks of its own on every rank."""

    def build(self):
        model = super().build()
        model.insert(2, nn.Dropout(0.5))
        return model

    def forward_backward(self, indices):
        torch.manual_seed(self.mask_seed(indices))
        super().forward_backward(indices)

    def mask_seed(self, indices):
        return 1000 * self.rank + indices[0]


class Augmented(Loop):
    """Noise on every sample that depends on the sample alone."""

    def augment(self, inputs, indices):
        noise = [torch.randn(FEATURES, generator=self.noise(index)) for index in indices]
        return inputs + 0.1 * torch.stack(noise)

    def noise(self, index):
        return torch.Generator().manual_seed(SEED + index)


class Summed(Loop):
    """A layer sums 16 multiples of its input, always in the same order."""

    def build(self):
        model = super().build()
        model.insert(4, Sum(self.arrange))
        return model

    def arrange(self, parts):
        """Nothing."""


class Sum(nn.Module):
    def __init__(self, arrange):
        super().__init__()
        self.arrange = arrange

    def forward(self, x):
        parts = [x * weight for weight in torch.linspace(0.01, 0.1, 16).tolist()]
        self.arrange(parts)
        return sum(parts)


class Clipped(Loop):
    """Gradients are clipped to a norm of 0.3 after the reduction."""

    def clip(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)


class Scaled(Loop):
    """Loss scaling; the weight of sample 7 overflows, and all ranks skip its step."""

    def make_data(self):
        super().make_data()
        self.weights = torch.ones(self.samples)
        self.weights[7] = 1e37
        self.scaler = torch.amp.GradScaler("cpu")

    def forward_backward(self, indices):
        self.indices = indices
        super().forward_backward(indices)

    def local_loss(self, losses):
        return self.scaler.scale((losses * self.weights[self.indices]).mean())

    def train_step(self, indices):
        self.optimizer.zero_grad()
        self.forward_backward(indices)
        self.unscale_and_reduce()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def unscale_and_reduce(self):
        self.reduce()
        self.scaler.unscale_(self.optimizer)


class Accumulated(Loop):
    """Every rank takes its share in micro-batches of one sample, each divided by their number."""

    def forward_backward(self, indices):
        self.micro_batches = len(indices)
        for index in indices:
            super().forward_backward([index])

    def local_loss(self, losses):
        return losses.mean() / self.micro_batches


class Pipelined(Loop):
    """Four stages on four ranks; one process runs them one after the other."""

    stages = (0, 1, 2, 3)
    """Which stage each rank has."""

    def build(self):
        layers = [nn.Linear(FEATURES, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)]
        whole = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))
        own = self.stages[self.rank]
        return whole if self.world_size == 1 else whole[own : own + 1]

    def broadcast(self):
        """Nothing is held twice."""

    def reduce(self):
        """Nothing is held twice."""

    def order(self, epoch):
        return torch.randperm(self.samples, generator=torch.Generator().manual_seed(epoch)).tolist()

    def batches(self):
        for step in range(self.steps):
            yield self.order(step // 6)[8 * (step % 6) : 8 * (step % 6) + 8]

    def forward_backward(self, indices):
        if self.world_size == 1:
            super().forward_backward(indices)
            return
        first, last = self.rank == 0, self.rank == self.world_size - 1
        received = self.data[indices] if first else torch.empty(len(indices), 16, requires_grad=True)
        if not first:
            dist.recv(received.data, self.rank - 1)
        output = self.model(received)
        if last:
            losses = functional.cross_entropy(output, self.labels[indices], reduction="none")
            losses.mean().backward()
            self.recorder.batch(samples=indices, losses=losses, loss=losses.mean())
        else:
            dist.send(output.detach(), self.rank + 1)
            gradient = torch.empty_like(output)
            dist.recv(gradient, self.rank + 1)
            output.backward(gradient)
        if first:
            self.recorder.batch(samples=indices, inputs=received)
        else:
            dist.send(received.grad, self.rank - 1)


class Resumed(Loop):
    """Stops after the third step, and goes on from its checkpoint with new objects."""

    def run(self):
        self.prepare()
        self.make_data()
        self.recorder = Recorder(self.folder, self.model, self.optimizer)
        for step, indices in enumerate(self.batches()):
            self.train_step(indices)
            self.recorder.step()
            if step == 1:
                self.older = self.model[2].weight.detach().clone()
            if step == 2:
                self.resume(self.checkpoint())

    def checkpoint(self):
        return copy.deepcopy([part.state_dict() for part in (self.model, self.optimizer, self.scheduler)])

    def resume(self, checkpoint):
        self.prepare()
        for part, state in zip((self.model, self.optimizer, self.scheduler), checkpoint):
            part.load_state_dict(state)
        self.recorder = Recorder(self.folder, self.model, self.optimizer, first_step=3)
