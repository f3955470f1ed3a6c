"""Mistakes that were planted after the diagnosis was written, to see what it says about what it was not made for."""

import torch
import torch.distributed as dist
from tests.verify.planted import bases
from tests.verify.planted.catalogue import Fault
from tests.verify.planted.loop import Loop

from lockstep.verify import Cause


class NoMomentumAfterResume(bases.Resumed):
    """The checkpoint lacks the optimizer's state."""

    def checkpoint(self):
        states = super().checkpoint()
        states[1]["state"] = {}
        return states


class StepsBeforeReducing(Loop):
    """The optimizer is stepped before the gradients are reduced."""

    def train_step(self, indices):
        self.optimizer.zero_grad()
        self.forward_backward(indices)
        self.optimizer.step()
        self.reduce()
        self.scheduler.step()


class WrongLabels(Loop):
    """One rank has the labels of other samples."""

    def make_data(self):
        super().make_data()
        if self.rank:
            self.labels = self.labels.roll(1)


class ReducesSometimes(Loop):
    """Every third step is not reduced."""

    def prepare(self):
        super().prepare()
        self.count = 0

    def reduce(self):
        self.count += 1
        if self.count % 3:
            super().reduce()


class SignsOnly(Loop):
    """Ranks exchange signs in place of gradients."""

    def reduce(self):
        super().reduce()
        for parameter in self.model.parameters() if self.world_size > 1 else ():
            parameter.grad.sign_()


class DecayOnOneRank(Loop):
    """One rank has weight decay."""

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        if self.rank:
            optimizer.param_groups[0]["weight_decay"] = 0.1
        return optimizer


class AveragedWeights(Loop):
    """Ranks average their weights after the step in place of gradients before."""

    def reduce(self):
        pass

    def after_step(self):
        for parameter in self.model.parameters():
            self.share(lambda parameter=parameter: dist.all_reduce(parameter.data))
            parameter.data /= self.world_size


class NoiseOnOneRank(Loop):
    """One rank adds noise to what was reduced."""

    def reduce(self):
        super().reduce()
        for parameter in self.model.parameters() if self.rank else ():
            parameter.grad += 0.01 * torch.randn_like(parameter)


class ReportsItsOwn(Loop):
    """The reported loss is that of rank 0's share."""

    def reported(self, losses):
        return losses.mean()


class DividedByGlobalBatch(Loop):
    """Losses are divided by the size of the global batch, and gradients by the number of ranks."""

    def local_loss(self, losses):
        return losses.sum() / self.global_batch


UNFORESEEN = (
    Fault(NoMomentumAfterResume, 2, Cause.OPTIMIZER_STATE),
    Fault(StepsBeforeReducing, 2, Cause.NOT_REDUCED),
    Fault(WrongLabels, 2, Cause.TARGETS),
    Fault(ReducesSometimes, 2, Cause.NOT_REDUCED),
    Fault(SignsOnly, 2, Cause.GRADIENTS),
    Fault(DecayOnOneRank, 2, Cause.OPTIMIZER),
    Fault(AveragedWeights, 2, Cause.NOT_REDUCED),
    Fault(NoiseOnOneRank, 2, Cause.GRADIENTS),
    Fault(ReportsItsOwn, 2, Cause.REPORTED),
    Fault(DividedByGlobalBatch, 2, Cause.GRADIENT_SCALE),
)
