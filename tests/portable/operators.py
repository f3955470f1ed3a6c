"""Digests of torch's operators on fixed inputs, forward and backward: ``python operators.py OUT.json [--portable]``.

Inputs are computed in float64 from +, -, *, / and floor alone, which IEEE 754 defines to the last bit, so that every
CPU begins with the same numbers. Run by ``run.py`` on this CPU and on emulated ones.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep

Case = tuple[str, list[Tensor]]
FLOATS = {"float32": torch.float32, "float64": torch.float64}
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def values(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0) -> Tensor:
    """Float32 numbers between ``low`` and ``high``, the same on every CPU."""
    count = torch.tensor(shape).prod().item()
    spread = (torch.arange(count, dtype=torch.float64) * 2654435761 + seed * 40503 + 12345) % 100003 / 100003
    return (spread * (high - low) + low).to(torch.float32).reshape(shape)


def both_ways(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The result, and the gradients of a weighted sum of it."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    result = function(*leaves)
    result.backward(values(*result.shape, seed=99).to(result.dtype))
    return [result, *(each.grad for each in leaves if each.grad is not None)]


RANGES = {
    **dict.fromkeys(("sqrt", "rsqrt", "log", "log2", "log10", "lgamma", "digamma", "reciprocal"), (0.01, 4.0)),
    **dict.fromkeys(("asin", "acos", "erfinv", "atanh", "log1p"), (-0.99, 0.99)),
    **dict.fromkeys(("acosh",), (1.01, 5.0)),
}
UNARY = [
    "sqrt",
    "rsqrt",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "log2",
    "log10",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "acosh",
    "atanh",
    "sigmoid",
    "erf",
    "erfc",
    "erfinv",
    "lgamma",
    "digamma",
    "reciprocal",
    "square",
    "sinc",
    "i0",
]
ACTIVATIONS = [
    "relu",
    "gelu",
    "silu",
    "softplus",
    "mish",
    "elu",
    "celu",
    "selu",
    "hardswish",
    "logsigmoid",
    "softsign",
    "tanhshrink",
    "leaky_relu",
    "hardtanh",
]
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum of rows": lambda x: x.sum(1),
    "sum of columns": lambda x: x.sum(0),
    "sum of all": lambda x: x.sum(),
    "mean": lambda x: x.mean(1),
    "var": lambda x: x.var(1),
    "std": lambda x: x.std(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "prod": lambda x: x.prod(1),
    "cumsum": lambda x: x.cumsum(1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "3-norm": lambda x: torch.linalg.vector_norm(x, ord=3, dim=1),
    "amax": lambda x: x.amax(1),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "softmax over columns": lambda x: x.softmax(0),
    "cosine_similarity": lambda x: F.cosine_similarity(x[:-1], x[1:]),
    "normalize": lambda x: F.normalize(x),
    "cdist": lambda x: torch.cdist(x[:7], x[7:]),
}


def elementwise() -> Iterator[Case]:
    for name, (kind, dtype) in product(UNARY, FLOATS.items()):
        x = values(1013, low=RANGES.get(name, (-2.0, 2.0))[0], high=RANGES.get(name, (-2.0, 2.0))[1])
        yield (f"{name} {kind}", both_ways(getattr(torch, name), x.to(dtype)))
    for name, (kind, dtype) in product(ACTIVATIONS, {**FLOATS, **HALVES}.items()):
        yield (f"{name} {kind}", both_ways(getattr(F, name), values(1013).to(dtype)))
    for exponent, (kind, dtype) in product((0.5, -0.5, 2, 3, -1, -2, 1.7, 1 / 3), FLOATS.items()):
        x = values(1013, low=0.01).to(dtype)
        yield (f"x ** {exponent:.3g} {kind}", both_ways(partial(torch.pow, exponent=exponent), x))
    for name in ("atan2", "hypot", "fmod", "remainder", "copysign", "logaddexp", "xlogy"):
        pair = (values(515, low=0.1), values(515, low=0.2, seed=1))
        yield (name, [getattr(torch, name)(*pair), getattr(torch, name)(*(each.double() for each in pair))])
    yield ("tensor ** tensor", both_ways(torch.pow, values(515, low=0.1), values(515, seed=1)))
    yield ("lerp", both_ways(torch.lerp, values(515), values(515, seed=1), values(515, seed=2)))
    yield ("addcdiv", both_ways(torch.addcdiv, values(515), values(515, seed=1), values(515, low=0.1)))


def reductions() -> Iterator[Case]:
    for (name, function), width, (kind, dtype) in product(REDUCTIONS.items(), (7, 64, 257), FLOATS.items()):
        x = values(33, width, low=0.1, seed=9).to(dtype)
        yield (f"{name} {width} {kind}", both_ways(function, x))


def products() -> Iterator[Case]:
    for width, (kind, dtype) in product((7, 64, 257), {**FLOATS, **HALVES}.items()):
        x, w, b = (values(*s, seed=i).to(dtype) for i, s in enumerate([(33, width), (width + 3, width), (width + 3,)]))
        yield (f"linear {width} {kind}", both_ways(F.linear, x, w, b))
        p, q = (values(5, 17, width, seed=4).to(dtype), values(5, width, 9, seed=5).to(dtype))
        yield (f"bmm {width} {kind}", both_ways(torch.bmm, p, q))
        yield (f"matrix times vector {width} {kind}", both_ways(torch.mv, p[0], q[0, :, 0]))
    yield (
        "einsum",
        both_ways(lambda p, q: torch.einsum("bij,bkj->bik", p, q), values(3, 9, 21), values(3, 11, 21, seed=1)),
    )
    for size, (kind, dtype) in product((512, 1000), FLOATS.items()):
        x, w = (values(64, size, seed=1).to(dtype), values(200, size, seed=2).to(dtype))
        yield (f"large linear {size} {kind}", both_ways(F.linear, x, w))
    matrix = values(20, 20).double()
    positive = matrix @ matrix.T + 50 * torch.eye(20, dtype=torch.float64)
    for name in ("cholesky", "inv", "det", "svdvals", "eigvalsh"):
        f = getattr(torch.linalg, name)
        yield (f"linalg.{name}", [f(positive), f(positive.float())])
    yield ("linalg.qr", [*torch.linalg.qr(positive), *torch.linalg.qr(positive.float())])
    yield ("linalg.solve", [torch.linalg.solve(positive, matrix)])
    yield ("fft.rfft", [torch.view_as_real(torch.fft.rfft(values(5, 60)))])


def layers() -> Iterator[Case]:
    for size, stride, width, (kind, dtype) in product((1, 3, 5, 7), (1, 2), (13, 64), {**FLOATS, **HALVES}.items()):
        if dtype is not torch.float32 and (size, stride) not in ((3, 1), (1, 2)):
            continue
        x, w = (values(2, width, 11, 11).to(dtype), values(24, width, size, size, seed=1).to(dtype))
        yield (
            f"conv2d {size}x{size} stride {stride}, {width} channels {kind}",
            both_ways(partial(F.conv2d, stride=stride, padding=size // 2), x, w),
        )
    for batch, width, side in ((1, 64, 28), (1, 256, 7), (1, 512, 4)):
        x, w = (values(batch, width, side, side), values(width, width, 3, 3, seed=1))
        yield (f"conv2d {width} x {side} x {side}", both_ways(lambda x, w: F.conv2d(x, w, padding=1), x, w))
    yield (
        "conv2d channels_last",
        both_ways(
            lambda x, w: F.conv2d(x.contiguous(memory_format=torch.channels_last), w),
            values(2, 16, 11, 11),
            values(24, 16, 3, 3),
        ),
    )
    yield (
        "conv2d depthwise",
        both_ways(lambda x, w: F.conv2d(x, w, groups=16), values(2, 16, 11, 11), values(16, 1, 3, 3, seed=1)),
    )
    yield ("conv1d", both_ways(F.conv1d, values(2, 16, 50), values(8, 16, 3, seed=1)))
    yield ("conv3d", both_ways(F.conv3d, values(2, 4, 7, 9, 9), values(6, 4, 3, 3, 3, seed=1)))
    yield (
        "conv_transpose2d",
        both_ways(lambda x, w: F.conv_transpose2d(x, w, stride=2), values(2, 8, 9, 9), values(8, 6, 3, 3, seed=1)),
    )
    image = values(2, 16, 12, 13)
    for name, function in {
        "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
        "group_norm": lambda x: F.group_norm(x, 4),
        "instance_norm": F.instance_norm,
        "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
        "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
        "local_response_norm": lambda x: F.local_response_norm(x, 3),
        "avg_pool2d": lambda x: F.avg_pool2d(x, 3),
        "max_pool2d": lambda x: F.max_pool2d(x, 3),
        "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 5),
        "interpolate bilinear": lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
        "interpolate bicubic": lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic"),
        "reflection pad": lambda x: F.pad(x, (2, 2, 2, 2), mode="reflect"),
        "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
        "unfold": lambda x: F.unfold(x, 3),
    }.items():
        yield (name, both_ways(function, image))
    for cls, bidirectional in product((nn.LSTM, nn.GRU, nn.RNN), (False, True)):
        yield (f"{cls.__name__}{', both ways' * bidirectional}", recurrent(cls, bidirectional))
    heads = [values(2, 3, 17, 16, seed=seed) for seed in range(3)]
    for causal in (False, True):
        yield (
            f"attention{', causal' * causal}",
            both_ways(partial(F.scaled_dot_product_attention, is_causal=causal), *heads),
        )
    yield ("embedding", both_ways(lambda w: F.embedding(torch.arange(40) % 13, w), values(13, 9)))
    yield (
        "embedding_bag",
        both_ways(lambda w: F.embedding_bag(torch.arange(40) % 13, w, torch.arange(0, 40, 8)), values(13, 9)),
    )


def recurrent(cls: type[nn.RNNBase], bidirectional: bool) -> list[Tensor]:
    layer = cls(13, 24, 2, batch_first=True, bidirectional=bidirectional)
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data = values(*parameter.shape, seed=seed) / 5
    results = both_ways(lambda x: layer(x)[0], values(3, 7, 13))
    return [*results, *(parameter.grad for parameter in layer.parameters())]


def losses() -> Iterator[Case]:
    scores, labels = (values(33, 10), torch.arange(33) % 10)
    yield ("cross_entropy", both_ways(lambda x: F.cross_entropy(x, labels), scores))
    yield (
        "cross_entropy, label smoothing",
        both_ways(lambda x: F.cross_entropy(x, labels, label_smoothing=0.1), scores),
    )
    target = values(33, 10, seed=1, low=0.05, high=0.95)
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"):
        yield (name, both_ways(partial(getattr(F, name), target=target), scores))
    yield (
        "ctc_loss",
        both_ways(
            lambda x: F.ctc_loss(x.log_softmax(-1), torch.arange(1, 5).repeat(3, 1), (11,) * 3, (4,) * 3),
            values(11, 3, 10),
        ),
    )


def optimizers() -> Iterator[Case]:
    for name, more in (
        ("SGD", {"momentum": 0.9}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        *(
            (name, {})
            for name in [
                "Adam",
                "AdamW",
                "RMSprop",
                "Adagrad",
                "Adadelta",
                "Adamax",
                "NAdam",
                "RAdam",
                "ASGD",
                "Rprop",
            ]
        ),
        ("Adam", {"foreach": True}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {"fused": True}),
    ):
        yield (f"{name} {more or ''}".strip(), stepped(name, more))
    yield ("clip_grad_norm_", clipped())


def stepped(name: str, more: dict[str, object]) -> list[Tensor]:
    parameter = nn.Parameter(values(1013))
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1, **more)
    for seed in range(5):
        parameter.grad = values(1013, seed=seed)
        optimizer.step()
    return [parameter]


def clipped() -> list[Tensor]:
    parameters = [nn.Parameter(values(n)) for n in (1013, 7)]
    for parameter in parameters:
        parameter.grad = values(*parameter.shape, seed=3)
    norm = nn.utils.clip_grad_norm_(parameters, 1.0)
    return [norm, *(parameter.grad for parameter in parameters)]


def drawn() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(7)
    for name, f in {
        "rand": lambda: torch.rand(1001, generator=generator),
        "randn": lambda: torch.randn(1001, generator=generator),
        "randn of few": lambda: torch.randn(11, generator=generator),
        "randperm": lambda: torch.randperm(1001, generator=generator),
        "bernoulli": lambda: torch.bernoulli(torch.full((1001,), 0.3), generator=generator),
        "exponential": lambda: torch.empty(1001).exponential_(generator=generator),
        "multinomial": lambda: torch.multinomial(torch.full((50,), 0.02), 30, generator=generator),
        "trunc_normal": lambda: nn.init.trunc_normal_(torch.empty(999), generator=generator),
        "kaiming_uniform": lambda: nn.init.kaiming_uniform_(torch.empty(31, 17), generator=generator),
    }.items():
        yield (name, [f()])


def digest(tensors: list[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    torch.set_num_threads(1)
    if "--portable" in sys.argv:
        lockstep.init(global_batch=1, micro_batches=1, portable=True).close()
    groups = (elementwise, reductions, products, layers, losses, optimizers, drawn)
    found = {name: digest(results) for group in groups for name, results in group()}
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
