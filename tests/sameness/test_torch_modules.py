"""Every module of torch, and what draws or reads across a batch: the bits of one device in every layout, or a refusal.

python -m pytest --slow tests/sameness/test_torch_modules.py
"""

import logging
import warnings

import pytest
import torch
from tests.ranks import run_ranks
from tests.sameness.layouts import LAYOUTS, Outcome
from torch import nn
from torch.distributions import Beta, Binomial, Categorical, Dirichlet, Gamma, MultivariateNormal, StudentT, VonMises
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.data import TensorDataset

from lockstep.core.fingerprint import digest_tensors
from lockstep.errors import LockstepError
from lockstep.run import Run, RunOptions
from lockstep.runtime.lazy_compiler import postpone_compiler

WIDTH = 16
"""Features of a sample before and after the module."""


class Call(nn.Module):
    """Gives what a function makes of some modules and the input; of several outputs the first."""

    def __init__(self, function, *modules):
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(modules)

    def forward(self, x):
        output = self.function(*self.inner, x)
        return output[0] if isinstance(output, tuple) else output


class Noise(nn.Module):
    """Adds a little of what a function makes of the input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return x + 0.1 * self.function(x)


def of(*shape):
    """The features in another shape."""
    return nn.Unflatten(1, shape)


def ids(module, x):
    return module((x.detach().abs() * 7).long() % 20)


def twice(module, x):
    return module(x, x.flip(-1))


def called(module, x):
    return module(x)


def attend(module, x):
    return module(x, x, x, need_weights=False)


def decode(module, x):
    return module(x, x)


def unpool(pool, undo, x):
    return undo(*pool(x))


def recur(cell, x):
    state = None
    for step in x.unbind(1):
        state = cell(step, state)
    return state


def tables():
    """The modules by name, each a list of those between the first layers and the last."""
    found = {
        name: [getattr(nn, name)()]
        for name in (
            *("ELU", "Hardshrink", "Hardsigmoid", "Hardtanh", "Hardswish", "LeakyReLU", "LogSigmoid", "PReLU"),
            *("ReLU", "ReLU6", "RReLU", "SELU", "CELU", "GELU", "Sigmoid", "SiLU", "Mish", "Softplus", "Softshrink"),
            *("Softsign", "Tanh", "Tanhshrink", "GLU", "Identity", "Flatten"),
        )
    }
    found |= {name: [getattr(nn, name)(dim=1)] for name in ("Softmin", "Softmax", "LogSoftmax")}
    for dims, channels, shape in ((1, 2, (2, 8)), (2, 1, (1, 4, 4)), (3, 1, (1, 2, 4, 2))):
        arguments = {
            **dict.fromkeys(("Conv", "ConvTranspose"), (channels, 3, 1)),
            **dict.fromkeys(("LazyConv", "LazyConvTranspose"), (3, 1)),
            **dict.fromkeys(("LazyBatchNorm", "LazyInstanceNorm"), ()),
            **dict.fromkeys(("AdaptiveAvgPool", "AdaptiveMaxPool"), (1,)),
            **dict.fromkeys(("CircularPad", "ReflectionPad", "ReplicationPad", "ZeroPad"), (1,)),
            **dict.fromkeys(("MaxPool", "AvgPool"), (2,)),
            "BatchNorm": (channels,),
            "Dropout": (0.4,),
            "LPPool": (2, 2),
            "ConstantPad": (1, 0.5),
            "InstanceNorm": (channels, 1e-5, 0.1, True, True),
        }
        for name, given in arguments.items():
            first = [nn.Softplus()] if name == "LPPool" else []
            found[f"{name}{dims}d"] = [*first, of(*shape), getattr(nn, f"{name}{dims}d")(*given)]
        pool, undo = getattr(nn, f"MaxPool{dims}d"), getattr(nn, f"MaxUnpool{dims}d")
        found[f"MaxUnpool{dims}d"] = [of(*shape), Call(unpool, pool(2, return_indices=True), undo(2))]
    image, words = of(1, 4, 4), of(2, 8)
    found |= {
        "Linear": [nn.Linear(WIDTH, 9)],
        "LazyLinear": [nn.LazyLinear(9)],
        "Threshold": [nn.Threshold(0.1, 0.2)],
        "Softmax2d": [image, nn.Softmax2d()],
        "FractionalMaxPool2d": [image, nn.FractionalMaxPool2d(2, output_ratio=0.5)],
        "FractionalMaxPool3d": [of(1, 4, 2, 2), nn.FractionalMaxPool3d((2, 1, 1), output_size=(2, 1, 1))],
        "Fold": [of(4, 4), nn.Fold((4, 4), 2, stride=2)],
        "Unfold": [image, nn.Unfold(2)],
        "Unflatten": [nn.Unflatten(1, (2, 8))],
        "PixelShuffle": [of(4, 2, 2), nn.PixelShuffle(2)],
        "PixelUnshuffle": [image, nn.PixelUnshuffle(2)],
        "ChannelShuffle": [of(4, 2, 2), nn.ChannelShuffle(2)],
        "Upsample": [image, nn.Upsample(scale_factor=2, mode="bicubic")],
        "UpsamplingNearest2d": [image, nn.UpsamplingNearest2d(scale_factor=2)],
        "UpsamplingBilinear2d": [image, nn.UpsamplingBilinear2d(scale_factor=2)],
        "Dropout": [nn.Dropout(0.4)],
        "AlphaDropout": [nn.AlphaDropout(0.4)],
        "FeatureAlphaDropout": [image, nn.FeatureAlphaDropout(0.4)],
        "LayerNorm": [nn.LayerNorm(WIDTH)],
        "RMSNorm": [nn.RMSNorm(WIDTH)],
        "GroupNorm": [nn.GroupNorm(4, WIDTH)],
        "LocalResponseNorm": [of(4, 4), nn.LocalResponseNorm(2)],
        "CrossMapLRN2d": [of(4, 2, 2), nn.CrossMapLRN2d(2)],
        "Embedding": [Call(ids, nn.Embedding(20, 4, padding_idx=0, scale_grad_by_freq=True))],
        "Embedding, sparse": [Call(ids, nn.Embedding(20, 4, sparse=True))],
        "Embedding, max_norm": [Call(ids, nn.Embedding(20, 4, max_norm=0.5))],
        "EmbeddingBag": [Call(ids, nn.EmbeddingBag(20, 8, mode="max"))],
        "EmbeddingBag, sparse": [Call(ids, nn.EmbeddingBag(20, 8, mode="sum", sparse=True))],
        "Bilinear": [Call(twice, nn.Bilinear(WIDTH, WIDTH, 9))],
        "CosineSimilarity": [Call(twice, nn.CosineSimilarity(eps=1e-3)), nn.Unflatten(0, (-1, 1))],
        "PairwiseDistance": [Call(twice, nn.PairwiseDistance()), nn.Unflatten(0, (-1, 1))],
        "RNN": [words, Call(called, nn.RNN(8, 6, batch_first=True))],
        "GRU": [words, Call(called, nn.GRU(8, 6, 2, batch_first=True, dropout=0.3, bidirectional=True))],
        "LSTM": [words, Call(called, nn.LSTM(8, 6, 2, batch_first=True, dropout=0.3, proj_size=3))],
        "RNNCell": [words, Call(recur, nn.RNNCell(8, 5))],
        "GRUCell": [words, Call(recur, nn.GRUCell(8, 5))],
        "LSTMCell": [words, Call(recur, nn.LSTMCell(8, 5))],
        "MultiheadAttention": [
            words,
            Call(attend, nn.MultiheadAttention(8, 2, 0.2, add_bias_kv=True, batch_first=True)),
        ],
        "TransformerEncoderLayer": [words, nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)],
        "TransformerEncoder": [
            words,
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        ],
        "TransformerDecoderLayer": [words, Call(decode, nn.TransformerDecoderLayer(8, 2, 16, batch_first=True))],
        "TransformerDecoder": [
            words,
            Call(decode, nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2)),
        ],
        "Transformer": [words, Call(decode, nn.Transformer(8, 2, 1, 1, 16, batch_first=True))],
        "Linear, weight_norm": [parametrizations.weight_norm(nn.Linear(WIDTH, 9))],
        "Linear, spectral_norm": [parametrizations.spectral_norm(nn.Linear(WIDTH, 9))],
        "Linear, orthogonal": [parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))],
        "Linear, spectral_norm of hooks": [nn.utils.spectral_norm(nn.Linear(WIDTH, 9))],
        "Linear, pruned": [prune.l1_unstructured(nn.Linear(WIDTH, 9), "weight", 0.3)],
    }
    return found | {f"f {name}": [Noise(function)] for name, function in FUNCTIONS.items()}


FUNCTIONS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(-1, 2, 2, 4)] * 3, dropout_p=0.3).reshape(x.shape),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x.detach())),
    "multinomial": lambda x: torch.multinomial(torch.softmax(x.detach(), 1), WIDTH, replacement=True),
    "normal": lambda x: torch.normal(x.detach(), 1.0),
    "poisson": lambda x: torch.poisson(x.detach().abs()),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 5), torch.sigmoid(x.detach())),
    "rand_like": torch.rand_like,
    "randn": lambda x: torch.randn(x.shape),
    "randint": lambda x: torch.randint(3, x.shape),
    "randperm": lambda x: x[:, torch.randperm(WIDTH)],
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.4),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(torch.empty(WIDTH)),
    "Gamma": lambda x: Gamma(x.abs() + 0.5, 1.0).rsample(),
    "Beta": lambda x: Beta(x.abs() + 0.5, x.abs() + 0.7).rsample(),
    "Dirichlet": lambda x: Dirichlet(x.abs() + 0.5).rsample(),
    "Binomial": lambda x: Binomial(3, logits=x.detach()).sample(),
    "Categorical": lambda x: Categorical(logits=x.detach()).sample()[:, None],
    "StudentT": lambda x: StudentT(x.abs() + 2).rsample(),
    "VonMises": lambda x: VonMises(x.detach(), 1.0).sample(),
    "MultivariateNormal": lambda x: MultivariateNormal(x, torch.eye(WIDTH)).rsample(),
    "a generator of the call's own": lambda x: torch.rand(WIDTH, generator=torch.Generator().manual_seed(3)),
    "manual_seed": lambda x: (torch.manual_seed(7), torch.rand(WIDTH))[1],
    "the order of the micro-batch": lambda x: x[torch.randperm(len(x))],
    "a mean over the micro-batch": lambda x: x - x.mean(0),
    "the norm of the micro-batch": lambda x: x / x.norm(),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True) if len(x) > 1 else x,
    "rfft": lambda x: torch.fft.rfft(x).abs()[:, :1],
    "svdvals": lambda x: torch.linalg.svdvals(x.view(-1, 4, 4)).repeat(1, 4),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(1)[0],
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(1, (x.detach().abs() * 9).long() % WIDTH, x),
    "index_add": lambda x: torch.zeros_like(x).index_add(1, torch.arange(WIDTH) % 3, x),
    "cdist": lambda x: torch.cdist(*[x.view(-1, 4, 4)] * 2).view(-1, WIDTH),
    "interpolate": lambda x: F.interpolate(x.view(-1, 1, 4, 4), size=(4, 4), mode="bicubic").view(-1, WIDTH),
}
"""Functions of a micro-batch, by name."""

OTHERS = {
    *("Container", "Module", "ModuleDict", "ModuleList", "ParameterDict", "ParameterList", "Sequential"),
    *("RNNBase", "RNNCellBase", "NLLLoss2d"),
    "DataParallel",  # refused: tests/run/test_prepare.py
    "SyncBatchNorm",  # an option of the run
    "AdaptiveLogSoftmaxWithLoss",  # a loss, as are the others of their name
}
"""Classes of torch.nn that are no layers."""


def train(world, name, settings):
    """The losses, evaluations, parameters and buffers of two epochs of two steps, the second of them ragged."""
    torch.manual_seed(0)
    last = [nn.Flatten(), nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3)]
    model = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), *tables()[name], *last)
    with torch.no_grad(), torch.random.fork_rng():
        model.eval()(torch.randn(3, 6))  # lazy layers take their shapes
    model.train()
    data = TensorDataset(torch.randn(20, 6, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 3)
    is_sparse = any(getattr(module, "sparse", False) for module in model.modules())
    optimizer = (torch.optim.SGD if is_sparse else torch.optim.Adam)(model.parameters(), lr=0.02)
    recipe = {"global_batch": 12, "micro_batches": 6, "seed": 3, "threads": 1}
    run = Run(RunOptions.of(**recipe, **settings), world)
    model, optimizer = run.prepare(model, optimizer)
    found = {}
    for epoch in run.epochs(2):
        for batch in run.batches(data):
            found[f"loss {batch.plan.step}"] = run.backward(batch, nn.CrossEntropyLoss())
            optimizer.step()
            optimizer.zero_grad()
        found[f"evaluation {epoch}"] = torch.tensor(run.evaluate(data, lambda output, _: output.sum(1)))
    found |= {key: tensor.clone() for key, tensor in run.state_dict().items()}
    fingerprint = run.fingerprint()
    run.close()
    return {**(digest_tensors(found) if world.is_main else {}), "fingerprint": fingerprint}


def train_all(world, names, settings):
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    ended = {}
    for name in names:
        try:
            ended[name] = Outcome(train(world, name, dict(settings)))
        except LockstepError as error:
            ended[name] = Outcome({}, refusal=str(error))
    return ended


def under(layout, names):
    """How each model ends, which is the same on every rank."""
    chosen = LAYOUTS[layout]
    everyone = run_ranks(train_all, chosen.world, names, chosen.settings, timeout=1500)
    for name in names:
        assert len({bool(each[name].refusal) for each in everyone}) == 1, f"{name}: {[each[name] for each in everyone]}"
    return everyone[0]


@pytest.fixture(scope="module")
def one_device():
    return under("single", list(tables()))


def test_every_layer_of_torch_is_in_the_table():
    classes = {name for name, each in vars(nn).items() if isinstance(each, type) and issubclass(each, nn.Module)}
    layers = {name for name in classes - OTHERS if not name.endswith("Loss")}
    assert layers == {name.partition(",")[0] for name in tables() if not name.startswith("f ")}


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "pipeline", "dp", "server", "layers"])
def test_every_layer_of_torch_has_the_bits_of_one_device(layout, one_device):
    found = under(layout, list(tables()))
    for ended in (one_device, found):
        assert {name for name in ended if ended[name].refusal} == {"Embedding, max_norm"}  # writes into its weight
    assert [name for name in found if found[name].digests != one_device[name].digests] == []
