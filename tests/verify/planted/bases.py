"""Sound loops with one thing more, which a fault can get wrong."""

import copy

import numpy as np
import torch
import torch.distributed as dist
from tests.numerics.sync_batch_norm_cases import convert_sync_batch_norm
from tests.verify.planted.loop import CLASSES, FEATURES, SEED, Loop
from torch import nn
from torch.nn import functional

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


class Tied(Loop):
    """Two layers have one weight, and gradients are averaged module by module, that weight once."""

    def build(self):
        model = super().build()
        model[3] = nn.Linear(16, 16)
        model[3].weight = model[2].weight
        return model

    def reduce(self):
        for parameter in () if self.ddp else self.listed():
            self.share(lambda parameter=parameter: dist.all_reduce(parameter.grad))
        for parameter in () if self.ddp else self.model.parameters():
            parameter.grad /= self.world_size

    def listed(self):
        return list(self.model.parameters())


class Counting(Loop):
    """Two micro-batches a rank (four on one process); a layer counts its calls and does nothing with them."""

    def build(self):
        model = super().build()
        model.insert(1, Counter(self.counts))
        return model

    def counts(self, calls):
        return 1.0

    def forward_backward(self, indices):
        self.micro_batches = len(indices) // 2
        for first in range(0, len(indices), 2):
            super().forward_backward(indices[first : first + 2])

    def local_loss(self, losses):
        return losses.mean() / self.micro_batches


class Counter(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor, self.calls = factor, 0

    def forward(self, x):
        self.calls += 1
        return x * self.factor(self.calls)


class Weighted(Loop):
    """Losses are weighted by class, with the weights of the whole data set."""

    def losses(self, output, targets):
        return self.class_weights()[targets] * super().losses(output, targets)

    def class_weights(self):
        return self.weights_of(self.labels)

    def weights_of(self, labels):
        counts = torch.bincount(labels, minlength=CLASSES).clamp(min=1)
        return len(labels) / (CLASSES * counts)


class Scaling(Loop):
    """The loss is a module, which divides by its running mean of the losses of all ranks."""

    def prepare(self):
        super().prepare()
        self.criterion = RunningScale(self.average)

    def losses(self, output, targets):
        return self.criterion(super().losses(output, targets))

    def average(self, mean):
        self.share(lambda: dist.all_reduce(mean))
        return mean / self.world_size


class RunningScale(nn.Module):
    def __init__(self, average):
        super().__init__()
        self.average, self.mean = average, 1.0

    def forward(self, losses):
        scaled = losses / self.mean
        self.mean = 0.5 * self.mean + 0.5 * float(self.average(losses.detach().mean()))
        return scaled


class Reducing(Accumulated):
    """Gradients are reduced with the last micro-batch."""

    def forward_backward(self, indices):
        for number, index in enumerate(indices):
            self.micro_batches = len(indices)
            Loop.forward_backward(self, [index])
            if number + 1 == len(indices) or self.reduces_early():
                for parameter in self.model.parameters():
                    self.share(lambda parameter=parameter: dist.all_reduce(parameter.grad))

    def reduces_early(self):
        return False

    def reduce(self):
        for parameter in self.model.parameters():
            parameter.grad /= self.world_size


class Decayed(Loop):
    """Weights decay in the optimizer."""

    decay = 0.02

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        optimizer.param_groups[0]["weight_decay"] = self.decay
        return optimizer


class Ema(Loop):
    """A running mean of the weights of the first layer is kept in a buffer, on all ranks."""

    def build(self):
        model = super().build()
        model.register_buffer("ema", model[0].weight.detach().clone())
        return model

    def after_step(self):
        if self.updates_ema():
            self.model.ema.mul_(0.9).add_(self.model[0].weight.detach(), alpha=0.1)

    def updates_ema(self):
        return True


class NumpyNoise(Loop):
    """NumPy's generator is set for each sample, and draws its noise."""

    def augment(self, inputs, indices):
        noise = [self.draw(index) for index in indices]
        return inputs + 0.1 * torch.stack(noise)

    def draw(self, index):
        np.random.seed(SEED + index)
        return torch.from_numpy(np.random.standard_normal(FEATURES)).float()
