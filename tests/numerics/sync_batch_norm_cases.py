"""Bodies of ranks that normalise their share of a batch, beside torch's BatchNorm over the whole batch.

The measure: the largest difference of any entry, divided by the largest entry of the whole batch's tensor; for
gradients of parameters, of all of them together. Gradients are sums of terms that cancel, so an entry near zero has no
relative precision in any implementation: that of a bias before a normalisation is nothing but rounding.
"""

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from lockstep.numerics.sync_batch_norm import convert_sync_batch_norm

STEPS, CHANNELS = 3, 5
SHARES = {1: (11,), 2: (3, 8), 3: (4, 0, 7), 4: (1, 5, 0, 6)}
"""Rows of each rank, by number of ranks."""


@dataclass(frozen=True)
class Case:
    """A module, its input, and how exactly it must agree."""

    module: type = nn.BatchNorm2d
    inner: tuple = (4, 3)
    dtype: torch.dtype = torch.float32
    options: tuple = ()
    channels_last: bool = False
    autocast: torch.dtype | None = None
    offset: float = 0.5
    bound: float = 1e-5


CASES = {
    "rows": Case(nn.BatchNorm1d, ()),
    "sequences": Case(nn.BatchNorm1d, (6,)),
    "images": Case(),
    "volumes": Case(nn.BatchNorm3d, (2, 3, 2)),
    "doubles": Case(dtype=torch.float64, bound=1e-10),
    "doubles in rows": Case(nn.BatchNorm1d, (), torch.float64, bound=1e-10),
    "far from zero": Case(dtype=torch.float64, offset=100.0, bound=1e-10),
    "channels last": Case(channels_last=True),
    "volumes, channels last": Case(nn.BatchNorm3d, (2, 3, 2), channels_last=True),
    "not affine": Case(options=(("affine", False),)),
    "no running statistics": Case(options=(("track_running_stats", False),)),
    "momentum none": Case(dtype=torch.float64, options=(("momentum", None),), bound=1e-10),
    "momentum and eps": Case(options=(("momentum", 0.3), ("eps", 1e-2))),
    "autocast bf16": Case(autocast=torch.bfloat16, bound=2e-2),
    "autocast fp16": Case(autocast=torch.float16, bound=4e-3),
    "autocast bf16, channels last": Case(autocast=torch.bfloat16, channels_last=True, bound=2e-2),
}


def network(case):
    """A normalisation between two layers that see its output and its gradient."""
    torch.manual_seed(1)
    kinds = {0: nn.Linear, 1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
    layer = kinds[len(case.inner)]
    arguments = (CHANNELS, CHANNELS) if layer is nn.Linear else (CHANNELS, CHANNELS, 1)
    model = nn.Sequential(layer(*arguments), case.module(CHANNELS, **dict(case.options)), nn.Tanh(), layer(*arguments))
    with torch.no_grad():
        for parameter in model[1].parameters():
            parameter.uniform_(-1.0, 2.0)
    model = model.to(case.dtype)
    return model.to(memory_format=_format(case)) if case.channels_last else model


def batches(case, rows):
    generator = torch.Generator().manual_seed(2)
    shape = (rows, CHANNELS, *case.inner)
    for _ in range(STEPS):
        x = torch.randn(shape, generator=generator, dtype=torch.float64) + case.offset
        x = x.to(case.dtype)
        yield x.contiguous(memory_format=_format(case)) if case.channels_last else x


def _format(case):
    return torch.channels_last_3d if len(case.inner) == 3 else torch.channels_last


def train(world, name):
    """The largest scaled difference of anything to one forward over the whole batch, over the steps, by what it is."""
    case, sizes = CASES[name], SHARES[world.world_size]
    mine, total = slice(sum(sizes[: world.rank]), sum(sizes[: world.rank + 1])), sum(sizes)
    plain = network(case)
    synced = convert_sync_batch_norm(copy.deepcopy(plain))
    off = {}
    for x in batches(case, total):
        expected = run_step(plain, x, slice(0, total), total, case)
        found = run_step(synced, x[mine], mine, total, case)
        for part in ("output", "input gradient"):
            note(off, part, found[part], expected[part][mine], largest([expected[part]]))
        size = largest(expected["gradients"].values())
        for key, gradient in expected["gradients"].items():
            summed = found["gradients"][key].clone()
            if dist.is_initialized():
                dist.all_reduce(summed)
            note(off, f"gradient of {key}", summed, gradient, size)
        for (key, own), value in zip(synced.named_buffers(), plain.buffers()):
            note(off, key, own, value, largest([value]))
        assert found["dtype"] == expected["dtype"]
        assert found["layout"] in (None, expected["layout"]) or not case.channels_last
    assert list(synced.state_dict()) == list(plain.state_dict())
    return off


def train_all(world, names):
    return {name: train(world, name) for name in names}


def under_ddp(world):
    """Two steps of torch's DistributedDataParallel with equal shares, and of the whole batch; largest difference."""
    case, rows = Case(dtype=torch.float64), 4
    plain = network(case)
    synced = convert_sync_batch_norm(copy.deepcopy(plain), group=dist.new_group())
    ddp = nn.parallel.DistributedDataParallel(synced)
    place, worst = slice(rows * world.rank, rows * (world.rank + 1)), 0.0
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, synced)]
    for x in batches(case, rows * world.world_size):
        for model, optimizer, given in zip((plain, ddp), optimizers, (x, x[place])):
            optimizer.zero_grad()
            model(given).pow(3).mean().backward()
            optimizer.step()
    for found, expected in zip(synced.state_dict().values(), plain.state_dict().values()):
        worst = max(worst, float((found - expected).abs().max()))
    return worst


def run_step(model, x, place, total, case):
    """One forward and backward; every entry of the output has a weight of its own in the loss."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    model.zero_grad()
    weights = torch.linspace(-1, 2, total * max(1, x[:1].numel())) if len(x) else torch.empty(0)
    weights = weights.view(total, *x.shape[1:])[place] if len(x) else weights.view(x.shape)
    middle = []
    handle = model[1].register_forward_hook(lambda module, given, output: middle.append(output))
    with torch.autocast("cpu", dtype=case.autocast or torch.bfloat16, enabled=case.autocast is not None):
        output = model(x)
    handle.remove()
    (output.to(case.dtype).square() * weights.to(case.dtype)).sum().backward()
    return {
        "output": output.detach(),
        "input gradient": x.grad,
        "gradients": {key: parameter.grad for key, parameter in model.named_parameters()},
        "dtype": middle[0].dtype,
        "layout": middle[0].stride() if len(x) else None,
    }


def note(off, what, found, expected, scale):
    """Keeps the largest difference that there was, in units of ``scale``."""
    if found.numel():
        distance = float((found.double() - expected.double()).abs().max()) / max(scale, 1e-30)
        off[what] = max(off.get(what, 0.0), distance)


def largest(tensors):
    return max(float(tensor.double().abs().max()) for tensor in tensors)
