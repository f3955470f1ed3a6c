"""Bodies of ranks that train with BatchNorm over the global batch, and what is compared of them."""

import logging

import torch
from tests.strategies.jobs import photos, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep
from lockstep.runtime.lazy_compiler import postpone_compiler

GLOBAL_BATCH, MICRO_BATCHES, SAMPLES, EPOCHS = 16, 8, 53, 2
"""Four steps an epoch; the last has two micro-batches of two rows, so two of four ranks have none. A micro-batch of a
single row is left out."""


class Block(nn.Module):
    """A residual block with smooth activations: where a ReLU's input is nearly zero, rounding decides its gradient."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return nn.functional.silu(x + self.norm(self.conv(x)))


class Net(nn.Sequential):
    """Convolutions, residual blocks, dropout of entries and of channels, and a BatchNorm of rows."""

    def __init__(self, dropout=0.0):
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1, stride=2, bias=False),
            nn.BatchNorm2d(8),
            nn.Tanh(),
            Block(8),
            nn.Dropout2d(dropout),
            Block(8),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.BatchNorm1d(8, momentum=None),
            nn.Dropout(dropout),
            nn.Linear(8, 5),
        )


class Checkpointed(Block):
    """The same block, computed again in backward."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Drawing(Block):
    """A block that draws random numbers by itself, and whose running buffers are not BatchNorm's alone."""

    def __init__(self, width):
        super().__init__(width)
        self.instance = nn.InstanceNorm2d(width, track_running_stats=True)
        self.register_buffer("seen", torch.zeros(width))

    def forward(self, x):
        if self.training:
            self.seen.mul_(0.9).add_(x.detach().mean((0, 2, 3)), alpha=0.1)
        y = nn.functional.dropout(super().forward(self.instance(x)), 0.1, self.training)
        return self.norm(y) + 0.1 * torch.rand_like(y)


def network(dropout=0.0, block=Block):
    torch.manual_seed(4)
    model = Net(dropout)
    for module in model:
        module.__class__ = block if type(module) is Block else type(module)
    if block is Drawing:
        model[3], model[5] = Drawing(8), Drawing(8)
    return model


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


def small_loss(output, target):
    """Keeps gradients below what fp16 can hold, so that no step is skipped."""
    return nn.functional.cross_entropy(output, target) / 64


def train(model, make_optimizer=sgd, loss=None, clip=None, **options):
    """Losses, and copies of the parameters, buffers and last gradients, after every step."""
    loss = loss or nn.CrossEntropyLoss(label_smoothing=0.1)
    options = {"global_batch": GLOBAL_BATCH, "micro_batches": MICRO_BATCHES, "seed": 3, **options}
    run = lockstep.init(sync_batch_norm=True, fingerprint_every=5, **options)
    model, optimizer = run.prepare(model, make_optimizer(model))
    images, labels = photos(SAMPLES).tensors
    data, steps = TensorDataset(images.to(next(model.parameters()).dtype), labels), []
    for _ in run.epochs(EPOCHS):
        for batch in run.batches(data):
            value = run.backward(batch, loss)
            norm = run.clip_gradients(clip) if clip is not None else torch.zeros(())
            gradients = {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            steps.append({**state, **gradients, "loss": value.clone(), "norm": norm})
    accuracy = run.evaluate(data, lambda output, target: output.argmax(1) == target)
    level = run.strategy.level
    run.close()
    return steps, accuracy, level


WAYS = {
    "sgd": {},
    "dropout": {"dropout": 0.3},
    "adamw, clipped": {"make_optimizer": adamw, "clip": 0.5},
    "channels last": {"channels_last": True},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "loss": small_loss},
    "double": {"dtype": torch.float64},
    "collectives": {"shared_memory": False},
    "checkpointed": {"dropout": 0.3, "block": Checkpointed},
    "drawing": {"block": Drawing, "running_buffers": ("*.seen",)},
    "bf16 sums": {"reduce": "bf16"},
    "powersgd": {"reduce": "powersgd"},
}


def train_ways(world, names):
    """Every way in turn. Rank 0 gives what came out, the others whether they have its bits."""
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    found = {}
    for name in names:
        options = dict(WAYS[name])
        model = network(options.pop("dropout", 0.0), options.pop("block", Block))
        found[name] = train(model.to(options.pop("dtype", torch.float32)), **options)
    return found if world.rank == 0 else None


def resume(world, directory, epochs, **options):
    """Trains up to ``epochs`` from the newest checkpoint of the folder, if any, and saves; gives the model's state."""
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    options = {"sync_batch_norm": True, "directory": directory, "resume": "auto", **options}
    run = lockstep.init(global_batch=GLOBAL_BATCH, micro_batches=MICRO_BATCHES, seed=3, **options)
    model = network(dropout=0.3)
    model, optimizer = run.prepare(model, sgd(model))
    for _ in run.epochs(epochs):
        for batch in run.batches(photos(SAMPLES)):
            run.backward(batch, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
    run.save()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run.close()
    return state


def by_hand(world):
    """The same training as a plain loop: torch's BatchNorm, one forward over the global batch."""
    from lockstep.core.plan import BatchShape, SamplePlan

    model, data = network(), photos(SAMPLES)
    optimizer = sgd(model)
    shape = BatchShape(global_batch=GLOBAL_BATCH, micro_batches=MICRO_BATCHES)
    plan = SamplePlan(samples=SAMPLES, shape=shape, seed=3, smallest_micro_batch=2)
    loss, steps = nn.CrossEntropyLoss(label_smoothing=0.1), []
    for epoch in range(EPOCHS):
        for position in range(plan.steps_per_epoch):
            rows = [int(index) for part in plan.step(epoch, position).indices for index in part]
            value = loss(model(data.tensors[0][rows]), data.tensors[1][rows])
            value.backward()
            gradients = {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            steps.append({**state, **gradients, "loss": value.detach(), "norm": torch.zeros(())})
    return steps


def apart(found, expected):
    """The distance of all parameters and buffers after the last step, relative to their length."""
    names = [name for name in expected[-1] if not name.startswith("gradient")]
    mine, theirs = (torch.cat([steps[-1][n].double().flatten() for n in names]) for steps in (found, expected))
    return float((mine - theirs).norm() / theirs.norm())


def furthest(found, expected):
    """The largest difference over all steps and tensors, each in units of its largest entry, and where it was.

    Gradients in units of the largest gradient of the step; integer counters must be equal.
    """
    worst = 0.0, "nothing"
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert list(mine) == list(theirs)
        gradients = max(float(t.abs().max()) for name, t in theirs.items() if name.startswith("gradient"))
        for name, tensor in theirs.items():
            if not tensor.is_floating_point():
                assert torch.equal(mine[name], tensor), name
                continue
            scale = gradients if name.startswith("gradient") else max(float(tensor.abs().max()), 1e-30)
            distance = float((mine[name].double() - tensor.double()).abs().max()) / scale
            worst = max(worst, (distance, f"{name} after step {step}"))
    return worst
