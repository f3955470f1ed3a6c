"""Whole workflows of users' loops: under every layout the numbers and weights of a plain loop, or a refusal.

A workflow is a function of a loop, which is either ``PlainLoop``, torch alone on the whole batch, or ``LockstepLoop``.
Both have the same calls, so the workflow is written once.
"""

import copy
import logging
import warnings
from functools import lru_cache

import pytest
import torch
from tests.ranks import run_ranks
from tests.sameness.layouts import LAYOUTS
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from lockstep.errors import LockstepError
from lockstep.run import Run, RunOptions
from lockstep.runtime.lazy_compiler import postpone_compiler

ROWS, WIDTH = 24, 40
DATA = TensorDataset(torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1)), torch.arange(ROWS) % 4)


class PlainLoop:
    """torch on one device, a step for the whole data set."""

    def prepare(self, model, *others):
        self.model = model
        return (model, *others)

    def epochs(self, count):
        return range(count)

    def batches(self):
        yield DATA.tensors

    def backward(self, batch, loss, forward=None):
        output = self.model(batch[0]) if forward is None else forward(batch)
        value = loss(output, batch[1] if forward is None else batch)
        if isinstance(value, tuple):
            value = value[0] / value[1]
        value.backward()
        return float(value.detach())

    def clip(self, limit):
        return float(nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], limit))

    @torch.no_grad()
    def evaluate(self, metric, model=None):
        return float(metric((model or self.model)(DATA.tensors[0]), DATA.tensors[1]).float().mean())

    def weights(self):
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def set(self, weights):
        self.model.load_state_dict(weights)


class LockstepLoop:
    """The same by Lockstep, with one step in an epoch."""

    def __init__(self, world, settings):
        options = {"global_batch": ROWS, "micro_batches": 8, "seed": 3, "threads": 1, "timeout": 60.0}
        self.run = Run(RunOptions.of(**options, **settings), world)

    def prepare(self, model, *others):
        return self.run.prepare(model, *others)

    def epochs(self, count):
        return self.run.epochs(count)

    def batches(self):
        return self.run.batches(DATA)

    def backward(self, batch, loss, forward=None):
        return float(self.run.backward(batch, loss, **({} if forward is None else {"forward": forward})))

    def clip(self, limit):
        return float(self.run.clip_gradients(limit))

    def evaluate(self, metric, model=None):
        return float(self.run.evaluate(DATA, metric, **({} if model is None else {"model": model})))

    def weights(self):
        return self.run.state_dict()

    def set(self, weights):
        self.run.load_state_dict(weights)


def network():
    torch.manual_seed(5)
    hidden = [
        nn.Linear(6, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
    ]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 4))


def sgd(model, lr=0.1, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def sharpness_aware(loop):
    """The gradient of a step is that at the worst point near the weights (SAM)."""
    made = network()
    model, optimizer = loop.prepare(made, sgd(made, momentum=0.9))
    for _ in loop.epochs(3):
        for batch in loop.batches():
            yield loop.backward(batch, F.cross_entropy)
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                ascents = [p.grad * (0.05 / norm) for p in model.parameters()]
                for parameter, ascent in zip(model.parameters(), ascents):
                    parameter.add_(ascent)
            optimizer.zero_grad()
            yield loop.backward(batch, F.cross_entropy)
            with torch.no_grad():
                for parameter, ascent in zip(model.parameters(), ascents):
                    parameter.sub_(ascent)
            optimizer.step()
            optimizer.zero_grad()


def adversarial(loop):
    """Trains on inputs that were moved along the sign of the loss's gradient (FGSM)."""
    made = network()
    model, optimizer = loop.prepare(made, sgd(made))

    def attacked(batch):
        inputs = batch[0].detach().clone().requires_grad_(True)
        loss = F.cross_entropy(model(inputs), batch[1], reduction="sum")
        (slope,) = torch.autograd.grad(loss, inputs)
        return model((inputs + 0.1 * slope.sign()).detach())

    for _ in loop.epochs(3):
        for batch in loop.batches():
            yield loop.backward(batch, lambda output, batch: F.cross_entropy(output, batch[1]), attacked)
            optimizer.step()
            optimizer.zero_grad()


def distilled(loop):
    """A student learns from the targets and from a frozen teacher's output."""
    teacher, made = network().eval().requires_grad_(False), network()
    model, optimizer = loop.prepare(made, sgd(made))

    def both(batch):
        return model(batch[0]), teacher(batch[0] + 0.1)

    def loss(outputs, batch):
        student, soft = outputs
        soft_loss = F.kl_div(F.log_softmax(student / 2, -1), F.softmax(soft / 2, -1), reduction="batchmean")
        return 0.5 * F.cross_entropy(student, batch[1]) + 2 * soft_loss

    for _ in loop.epochs(3):
        for batch in loop.batches():
            yield loop.backward(batch, loss, both)
            optimizer.step()
            optimizer.zero_grad()


def projected(loop):
    """Gradients of two losses, of which one is projected where they point against each other (PCGrad)."""
    made = network()
    model, optimizer = loop.prepare(made, sgd(made))
    losses = (F.cross_entropy, lambda output, target: F.mse_loss(output, F.one_hot(target, 4).float()))
    for _ in loop.epochs(3):
        for batch in loop.batches():
            gradients = []
            for loss in losses:
                yield loop.backward(batch, loss)
                gradients.append([p.grad.clone() for p in model.parameters()])
                optimizer.zero_grad()
            product = sum((one * two).sum() for one, two in zip(*gradients))
            size = sum((two * two).sum() for two in gradients[1])
            yield float(product)
            for parameter, one, two in zip(model.parameters(), *gradients):
                parameter.grad = one + two - torch.clamp(product / size, max=0) * two
            optimizer.step()
            optimizer.zero_grad()


def pruned(loop):
    """A third of each weight is masked by torch.nn.utils.prune."""
    made = network()
    for layer in made:
        if isinstance(layer, nn.Linear):
            prune.l1_unstructured(layer, "weight", 0.3)
    _, optimizer = loop.prepare(made, sgd(made))
    for _ in loop.epochs(3):
        for batch in loop.batches():
            yield loop.backward(batch, F.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        yield loop.evaluate(lambda output, target: output.argmax(-1) == target)


class LowRank(nn.Module):
    """A frozen layer, and a change of low rank that is trained (LoRA)."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, layer.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(layer.out_features, 4))

    def forward(self, x):
        return self.layer(x) + x @ self.down.t() @ self.up.t()


def low_rank(loop):
    made = network()
    for number in (0, 2, 4):
        made[number] = LowRank(made[number])
    trained = [p for p in made.parameters() if p.requires_grad]
    _, optimizer = loop.prepare(made, torch.optim.SGD(trained, lr=0.1))
    for _ in loop.epochs(3):
        for batch in loop.batches():
            yield loop.backward(batch, F.cross_entropy)
            yield loop.clip(0.5)
            optimizer.step()
            optimizer.zero_grad()


def accumulated(loop):
    """A step after two backward passes of half the loss each."""
    made = network()
    _, optimizer = loop.prepare(made, sgd(made, weight_decay=1e-3))
    for epoch in loop.epochs(4):
        for batch in loop.batches():
            yield loop.backward(batch, lambda output, target: F.cross_entropy(output, target) / 2)
            if epoch % 2:
                yield loop.clip(1.0)
                optimizer.step()
                optimizer.zero_grad()


def plateaus(loop):
    """The learning rate falls where the evaluation does not improve."""
    made = network()
    optimizer = sgd(made, 0.5)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
    _, optimizer, schedule = loop.prepare(made, optimizer, schedule)
    for _ in loop.epochs(5):
        for batch in loop.batches():
            yield loop.backward(batch, F.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        worse = loop.evaluate(lambda output, target: -F.cross_entropy(output, target))
        schedule.step(worse)
        yield worse
        yield optimizer.param_groups[0]["lr"]


def followed(loop):
    """A second network follows the weights, and gives the targets (BYOL)."""
    made = network()
    target = copy.deepcopy(made).requires_grad_(False)
    model, optimizer = loop.prepare(made, sgd(made, 0.2))

    def both(batch):
        return model(batch[0]), target(batch[0] + 0.1)

    for _ in loop.epochs(3):
        for batch in loop.batches():
            yield loop.backward(batch, lambda outputs, _: (2 - 2 * F.cosine_similarity(*outputs)).mean(), both)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for slow, parameter in zip(target.parameters(), model.parameters()):
                    slow.mul_(0.9).add_(parameter, alpha=0.1)
    yield float(sum(p.double().sum() for p in target.parameters()))


def best_kept(loop):
    """The weights of the best evaluation are kept in memory, and taken at the end."""
    made = network()
    model, optimizer = loop.prepare(made, sgd(made, 1.5))
    best = (float("inf"), {})
    for _ in loop.epochs(5):
        for batch in loop.batches():
            yield loop.backward(batch, F.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        found = loop.evaluate(F.cross_entropy)
        if found < best[0]:
            best = (found, copy.deepcopy(model.state_dict()))
    model.load_state_dict(best[1])
    yield loop.evaluate(F.cross_entropy)


def averaged(loop):
    """A copy of the model holds the mean of its weights over the epochs (SWA)."""
    made = network()
    model, optimizer = loop.prepare(made, sgd(made, 0.3))
    average = AveragedModel(model)
    for _ in loop.epochs(4):
        for batch in loop.batches():
            yield loop.backward(batch, F.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        average.update_parameters(model)
    yield loop.evaluate(F.cross_entropy, average)


def rates_tried(loop):
    """Learning rates are tried one after the other, and weights and optimizer are set back before the training."""
    made = network()
    model, optimizer = loop.prepare(made, sgd(made, 1e-4))
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for epoch in loop.epochs(6):
        if epoch == 4:
            model.load_state_dict(start[0])
            optimizer.load_state_dict(start[1])
        optimizer.param_groups[0]["lr"] = 0.05 if epoch >= 4 else 1e-4 * 10**epoch
        for batch in loop.batches():
            yield loop.backward(batch, F.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()


def watched(loop):
    """Norms of gradients and sizes of weights are logged."""
    made = network()
    model, optimizer = loop.prepare(made, sgd(made))
    for _ in loop.epochs(3):
        for batch in loop.batches():
            loop.backward(batch, F.cross_entropy)
            for parameter in model.parameters():
                yield float(parameter.grad.norm())
                yield float(parameter.detach().abs().max())
            optimizer.step()
            optimizer.zero_grad()


def weighted(loop):
    """Classes have weights, and the loss is a sum and its weight."""
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0])

    def loss(output, target):
        each = F.cross_entropy(output, target, reduction="none")
        return (each * weights[target]).sum(), weights[target].sum()

    made = network()
    _, optimizer = loop.prepare(made, sgd(made))
    for _ in loop.epochs(3):
        for batch in loop.batches():
            yield loop.backward(batch, loss)
            optimizer.step()
            optimizer.zero_grad()


def penalised(loop):
    """Two networks with an optimizer each, and a gradient penalty (WGAN-GP)."""
    torch.manual_seed(4)
    both = nn.ModuleDict(
        {
            "generator": nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 6)),
            "critic": nn.Sequential(nn.Linear(6, WIDTH), nn.LeakyReLU(), nn.Linear(WIDTH, 1)),
        }
    )
    both, *optimizers = loop.prepare(both, sgd(both["critic"], 0.02), sgd(both["generator"], 0.01))
    generator, critic = both["generator"], both["critic"]

    def judged(batch):
        made = generator(batch[0].flip(-1)).detach()
        mixed = (0.5 * batch[0] + 0.5 * made).requires_grad_(True)
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        return critic(batch[0]), critic(made), (slope.norm(2, dim=-1) - 1).square()

    def critic_loss(outputs, _):
        real, made, penalty = outputs
        return made.mean() - real.mean() + 10 * penalty.mean()

    losses = [
        (critic_loss, judged),
        (lambda o, _: -o.mean(), lambda batch: critic(generator(batch[0].flip(-1)))),
    ]
    for _ in loop.epochs(3):
        for batch in loop.batches():
            for (loss, forward), optimizer in zip(losses, optimizers):
                yield loop.backward(batch, loss, forward)
                optimizer.step()
                for each in optimizers:
                    each.zero_grad()


def restored(loop):
    """Keeps the first epoch's weights by what the run gives, goes on from them later, and ends with them."""
    made = network()
    _, optimizer = loop.prepare(made, sgd(made, lr=2.0, momentum=0.9))
    for epoch in loop.epochs(4):
        for batch in loop.batches():
            yield loop.backward(batch, F.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        yield loop.evaluate(F.cross_entropy)
        if epoch == 0:
            first = loop.weights()
        if epoch == 2:
            loop.set(first)
            yield loop.evaluate(F.cross_entropy)
    loop.set(first)
    yield loop.evaluate(F.cross_entropy)


WORKFLOWS = (
    *(sharpness_aware, adversarial, distilled, projected, pruned, low_rank, accumulated, plateaus, followed),
    *(best_kept, averaged, rates_tried, watched, weighted, penalised, restored),
)
GRADIENT, VALUE, FORWARD = "The gradient of", "is used outside of the forward pass", "a forward of your own"
COPIED, STATE, CHAIN = (
    "was copied or pickled",
    "optimizer.state_dict() was called",
    "is not a chain of modules",
)
GRADIENTS = dict.fromkeys((sharpness_aware, projected, watched), GRADIENT)
FORWARDS = dict.fromkeys((adversarial, distilled, followed), FORWARD)
REFUSED = {
    "dp": {**FORWARDS, penalised: FORWARD},
    "layers": {penalised: CHAIN},
    "ddp": {},
    "fsdp": {**GRADIENTS, **dict.fromkeys((followed, best_kept, averaged, rates_tried), VALUE)},
    "pipeline": {
        **GRADIENTS,
        **FORWARDS,
        **dict.fromkeys((best_kept, rates_tried), VALUE),
        averaged: COPIED,
        penalised: CHAIN,
    },
    "tensor": {
        **GRADIENTS,
        **dict.fromkeys((followed, best_kept, rates_tried), VALUE),
        averaged: COPIED,
        pruned: "has a hook",
        low_rank: "found nothing to split",
    },
    "server": {**GRADIENTS, rates_tried: STATE},
}
"""Workflows that need in one process what a layout holds nowhere whole, and words of the refusal."""


def numbers(workflow, loop):
    """The numbers that a workflow's loop sees, and the weights at its end."""
    return [*workflow(loop)], loop.weights()


def ends(world, settings):
    """The outcome of each workflow on this rank: numbers and weights, or the sentence of a refusal."""
    warnings.simplefilter("ignore")  # of torch, about schedulers and graphs
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    found = []
    for workflow in WORKFLOWS:
        loop = LockstepLoop(world, settings)
        try:
            found.append(numbers(workflow, loop))
        except LockstepError as error:
            found.append(str(error))
        loop.run.close()
    return found


@lru_cache
def alone():
    return run_ranks(ends, 1, LAYOUTS["single"].settings, timeout=120)[0]


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_one_process_has_the_numbers_of_a_plain_loop(workflow):
    expected, weights = numbers(workflow, PlainLoop())
    found, held = alone()[WORKFLOWS.index(workflow)]
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for name, tensor in weights.items():
        assert torch.allclose(held[name], tensor, rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=pytest.mark.slow) for each in REFUSED],
)
def test_every_layout_has_the_numbers_of_one_process_or_refuses(layout):
    chosen = LAYOUTS[layout]
    everyone = run_ranks(ends, chosen.world, chosen.settings, timeout=180)
    for number, workflow in enumerate(WORKFLOWS):
        for rank, found in enumerate(each[number] for each in everyone):
            case = f"{workflow.__name__}, rank {rank}"
            if isinstance(found, str):
                words = REFUSED[layout].get(workflow)
                assert words and words in found, f"{case}: {found}"
                continue
            assert workflow not in REFUSED[layout], f"{case}: not refused"
            expected, weights = alone()[number]
            if layout == "tensor":  # level B without tensor.shards
                assert found[0] == pytest.approx(expected, rel=1e-3, abs=1e-5), case
                continue
            assert found[0] == expected, case
            if rank == 0:  # the others get none
                assert all(torch.equal(found[1][name], tensor) for name, tensor in weights.items()), case
