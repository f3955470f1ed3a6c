"""One mistake each, in a loop that is sound without it. The docstring is the table's row."""

import copy
import random

import numpy as np
import torch
import torch.distributed as dist
from tests.verify.planted import bases
from tests.verify.planted.loop import FEATURES, SEED, Loop
from torch.utils.data import DistributedSampler


class ForgottenEpoch(Loop):
    """The sampler's `set_epoch` is not called."""

    def order(self, epoch):
        return list(DistributedSampler(self.data, self.world_size, self.rank, seed=SEED))


class RankDependentSeed(Loop):
    """The model is made under `seed + rank`, and not broadcast."""

    def seed(self):
        torch.manual_seed(SEED + self.rank)

    def broadcast(self):
        pass


class MeanOfMeans(bases.Ragged):
    """The mean over the ranks of each rank's mean, also where shares are unequal."""

    def local_loss(self, losses):
        return losses.mean()


class DividedTwice(Loop):
    """The loss is divided by the number of ranks, and the gradients again."""

    def local_loss(self, losses):
        return losses.mean() / self.world_size


class UnsynchronisedBuffers(bases.Centred):
    """A running mean is kept on every rank for itself."""

    def after_step(self):
        pass


class OtherLearningRate(Loop):
    """The last rank trains with another learning rate."""

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        if self.rank == self.world_size - 1:
            optimizer.param_groups[0]["lr"] *= 2
        return optimizer


class LayerLeftOut(Loop):
    """One layer is not in the list of what is reduced."""

    def reduce(self):
        for name, parameter in self.model.named_parameters():
            if not name.startswith("2."):
                self.share(lambda parameter=parameter: dist.all_reduce(parameter.grad))
                parameter.grad /= self.world_size


class StaleParameter(bases.Resumed):
    """The checkpoint holds one tensor of the step before."""

    def checkpoint(self):
        states = super().checkpoint()
        states[0]["2.weight"] = self.older
        return states


class SwappedStages(bases.Pipelined):
    """Two stages of a pipeline of equal shape change places."""

    stages = (0, 2, 1, 3)


class OneMask(bases.Dropping):
    """All ranks draw dropout from one seed."""

    def mask_seed(self, indices):
        return SEED


class PaddedSampler(bases.Uneven):
    """The sampler repeats samples to make shares equal."""

    def batches(self):
        return Loop.batches(self)


class ShufflePerRank(Loop):
    """Every rank shuffles the whole data set with a seed of its own and takes its part of that."""

    def order(self, epoch):
        generator = torch.Generator().manual_seed(SEED + epoch + 100 * self.rank)
        return torch.randperm(self.samples, generator=generator).tolist()[self.rank :: self.world_size]


class MissingBroadcast(bases.Pretrained):
    """Rank 0 loads weights, and the others do not get them."""

    def broadcast(self):
        pass


class ClippedFirst(bases.Clipped):
    """Gradients are clipped before they are reduced."""

    def reduce(self):
        bases.Clipped.clip(self)
        super().reduce()

    def clip(self):
        pass


class SkippedOnOneRank(bases.Scaled):
    """The scaler looks for overflow before the reduction, so only one rank skips the step."""

    def unscale_and_reduce(self):
        self.scaler.unscale_(self.optimizer)
        for parameter in self.model.parameters():
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        self.reduce()


class UnscaledAccumulation(bases.Accumulated):
    """Accumulated micro-batches are not divided by their number."""

    def local_loss(self, losses):
        return losses.mean()


class ScheduleTooFast(Loop):
    """The scheduler is stepped once per process."""

    def after_step(self):
        for _ in range(self.world_size - 1):
            self.scheduler.step()


class FrozenOnOneRank(Loop):
    """One rank has frozen a layer, and joins its reduction with zeros."""

    def prepare(self):
        super().prepare()
        if self.rank == 1:
            self.model[0].requires_grad_(False)

    def reduce(self):
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        super().reduce()


class OtherThreads(Loop):
    """The ranks compute with 2 threads, the reference with 1."""

    def prepare(self):
        super().prepare()
        torch.set_num_threads(2)


class OrderOfArrival(bases.Summed):
    """An operator adds in the order in which things arrive, in the reference too."""

    def arrange(self, parts):
        random.SystemRandom().shuffle(parts)


class Fused(Loop):
    """The ranks have the fused optimizer, the reference the one in a loop."""

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        optimizer.param_groups[0]["fused"] = True
        return optimizer


class NormPerRank(bases.Normalised):
    """BatchNorm is not converted to SyncBatchNorm."""

    def synchronised(self, model):
        return model


class NoisePerRank(bases.Augmented):
    """Augmentation is seeded with the rank."""

    def noise(self, index):
        return torch.Generator().manual_seed(SEED + index + 1000 * self.rank)


class NoSampler(Loop):
    """The data is not shared out: every rank reads from the beginning."""

    def order(self, epoch):
        generator = torch.Generator().manual_seed(SEED + epoch)
        return torch.randperm(self.samples, generator=generator).tolist()


class CompressedGradients(Loop):
    """Gradients are rounded to bf16 for the reduction."""

    def reduce(self):
        for parameter in self.model.parameters() if self.world_size > 1 else ():
            rounded = parameter.grad.bfloat16()
            dist.all_reduce(rounded)
            parameter.grad.copy_(rounded.float() / self.world_size)


class RaggedBatchDropped(bases.Ragged):
    """The last batch of an epoch has fewer samples, and is dropped on several ranks."""

    def batches(self):
        for indices in super().batches():
            if self.world_size == 1 or self.size == 8:
                yield indices


class CountedCalls(bases.Counting):
    """A layer scales its output with a counter of its calls, a plain attribute."""

    def counts(self, calls):
        return 1 + 0.02 * calls


class TiedWeightTwice(bases.Tied):
    """A tied weight is reduced under both of its names."""

    def listed(self):
        return [parameter for module in self.model for parameter in module.parameters()]


class OwnClassWeights(bases.Weighted):
    """Every rank weights classes by the labels of its own share."""

    def class_weights(self):
        return self.weights_of(self.labels[self.rank :: self.world_size])


class EvalOnOneRank(bases.Normalised):
    """One rank is left in eval mode."""

    def synchronised(self, model):
        return super().synchronised(model) if self.world_size == 1 else model

    def prepare(self):
        super().prepare()
        if self.rank == 1:
            self.model.eval()


class LearningRateTimesWorld(Loop):
    """The learning rate is multiplied by the number of ranks."""

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        optimizer.param_groups[0]["lr"] *= self.world_size
        return optimizer


class LossWithState(bases.Scaling):
    """The loss divides by a running mean that each rank has for itself."""

    def average(self, mean):
        return mean


class SummedOnly(Loop):
    """Gradients are summed over the ranks and not divided."""

    def reduce(self):
        for parameter in self.model.parameters():
            self.share(lambda parameter=parameter: dist.all_reduce(parameter.grad))


class LastMicroBatchTwice(bases.Accumulated):
    """The last micro-batch of each rank counts twice."""

    def forward_backward(self, indices):
        self.left = len(indices)
        super().forward_backward(indices)

    def local_loss(self, losses):
        self.left -= 1
        return super().local_loss(losses) * (1 if self.left else 2)


class ReducedEarly(bases.Reducing):
    """Gradients are summed after every micro-batch, as without `no_sync`."""

    def reduces_early(self):
        return True


class DecayedTwice(bases.Decayed):
    """Weight decay is added to the gradients as well."""

    def clip(self):
        for parameter in self.model.parameters() if self.world_size > 1 else ():
            parameter.grad.add_(parameter.detach(), alpha=self.decay)


class DecayedByHand(bases.Decayed):
    """Parameters are decayed by the loop as well, after the step."""

    def after_step(self):
        for parameter in self.model.parameters() if self.world_size > 1 else ():
            parameter.data.mul_(1 - self.decay)


class OptimizerOfAnotherModel(Loop):
    """The optimizer is made before the model is copied for the ranks."""

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        if self.world_size > 1:
            self.model = self.network = copy.deepcopy(self.model)
        return optimizer


class EmaOnRank0(bases.Ema):
    """A running mean of weights is updated on rank 0 only."""

    def updates_ema(self):
        return self.rank == 0


class SharedWorkerSeed(bases.NumpyNoise):
    """Noise is drawn from NumPy's generator, which has one seed in all processes."""

    def draw(self, index):
        return torch.from_numpy(np.random.standard_normal(FEATURES)).float()

    def prepare(self):
        super().prepare()
        np.random.seed(SEED)


class OtherSeedOnOneRank(Loop):
    """One rank of four makes the model under another seed, and it is not broadcast."""

    def seed(self):
        torch.manual_seed(SEED + (self.rank == self.world_size - 2))

    def broadcast(self):
        pass


class TargetsApart(Loop):
    """One rank shuffles targets apart from inputs."""

    def make_data(self):
        super().make_data()
        if self.rank:
            self.labels = self.labels[torch.randperm(len(self.labels))]


class OverflowOnOneRank(bases.Scaled):
    """An overflow of one rank is set to zero there, and the step is taken."""

    def unscale_and_reduce(self):
        for parameter in self.model.parameters() if self.world_size > 1 else ():
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        super().unscale_and_reduce()


class SkipsABatch(Loop):
    """The ranks leave out the third batch, and go on with the fourth."""

    def batches(self):
        self.steps += self.world_size > 1
        for number, indices in enumerate(super().batches()):
            if self.world_size == 1 or number != 2:
                yield indices


class GradientsKept(Loop):
    """One rank never sets its gradients to zero."""

    def prepare(self):
        super().prepare()
        if self.rank == 1:
            self.optimizer.zero_grad = lambda: None


class MomentumLost(bases.Resumed):
    """The optimizer's state is restored on rank 0 only."""

    def checkpoint(self):
        states = super().checkpoint()
        if self.rank:
            states[1]["state"] = {}
        return states


class OtherSamplerSeed(Loop):
    """One rank's sampler has another seed."""

    def order(self, epoch):
        sampler = DistributedSampler(
            self.data, self.world_size, self.rank, seed=SEED + (self.rank == self.world_size - 1)
        )
        sampler.set_epoch(epoch)
        return list(sampler)
