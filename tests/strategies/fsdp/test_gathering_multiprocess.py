"""Models whose blocks are not called once each, one after the other: the bits of one device, or a refusal."""

import copy
import logging

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.distributed._composable import checkpoint as recomputed
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import TensorDataset

from lockstep.core.fingerprint import digest_tensors
from lockstep.errors import ConfigError, ReplicaError
from lockstep.run import Run, RunOptions
from lockstep.runtime.lazy_compiler import postpone_compiler

WIDTH = 40
pytestmark = pytest.mark.timeout(180)


def linear():
    return nn.Linear(WIDTH, WIDTH)


class Model(nn.Module):
    """An embedding of the input, blocks, and a head; what the blocks are used for is the subclass's."""

    def __init__(self, blocks=3):
        super().__init__()
        self.start, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(linear() for _ in range(blocks))

    def between(self, x, _):
        return self.blocks[1](torch.relu(self.blocks[0](x)))

    def forward(self, rows):
        rows = rows.to(self.blocks[-1].weight.device, self.blocks[-1].weight.dtype)
        return self.head(self.between(torch.relu(self.start(rows)), rows))


class CalledThrice(Model):
    def between(self, x, _):
        for _ in range(3):
            x = torch.relu(self.blocks[0](x)) + self.blocks[1](x)
        return self.blocks[2](x)


class Experts(Model):
    """Which blocks a micro-batch uses depends on its samples; the last is never used."""

    def between(self, x, rows):
        number = int(rows[0, 0] * 100) % 2
        x = torch.relu(self.blocks[number](x))
        return self.blocks[number](x) if int(rows[0, 1] * 100) % 3 == 0 else x


class Dropped(Model):
    """Steps in which no rank uses a block in some of the rounds."""

    def between(self, x, rows):
        for number, block in enumerate(self.blocks):
            if (int(rows[0, 2] * 1000) + number) % 5 == 0:
                x = x + torch.tanh(block(x))
        return x


class UsedBoth(Model):
    """A tensor is used within blocks and outside: the order of its gradients' sum is that of one device."""

    def between(self, x, _):
        y = self.blocks[0](x) * x
        z = torch.tanh(self.blocks[1](y)) + y * x
        return self.blocks[2](z) * y + x.sin() * z


class Recomputed(Model):
    def between(self, x, _):
        for block in self.blocks[:2]:
            x = checkpoint(lambda value, block=block: torch.relu(block(value)) * value, x, use_reentrant=False)
        return checkpoint(lambda value: self.blocks[0](torch.sigmoid(self.blocks[2](value))), x, use_reentrant=False)


class RecomputedInPart(Model):
    """Matrix products are kept and the rest is recomputed, while blocks are gathered and their gradients sent."""

    def between(self, x, _):
        for block in self.blocks[:2]:
            x = checkpoint(block, x, use_reentrant=False, context_fn=products_kept)
        return x


def products_kept():
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


class RecomputedByHooks(Model):
    """Modules that torch recomputes by their hooks, as checkpoint_activations asks for: leaves and a block."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Sequential(linear(), nn.Tanh(), linear())
        for module in (self.start, self.norm, self.inner, *self.blocks):
            recomputed(module)

    def between(self, x, _):
        return self.blocks[0](self.inner(self.norm(self.blocks[1](x))) * x)


class Conditioned(nn.Module):
    """A block that gives a dictionary of tuples, with a weight among them, and takes keywords."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = linear(), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, *, condition):
        return {"pair": (self.scale(x) * condition, self.shift[: WIDTH // 2]), "whole": self.shift}


class Dictionaries(Model):
    def __init__(self):
        super().__init__(1)
        self.films = nn.ModuleList([Conditioned(), Conditioned()])

    def between(self, x, _):
        for film in self.films:
            found = film(x, condition=x.cos())
            x = found["pair"][0] * found["whole"] + found["pair"][1].sum()
        return self.blocks[0](x)


class Nested(nn.Module):
    """A block that calls itself, and gives the very list that it keeps."""

    def __init__(self):
        super().__init__()
        self.layer, self.kept = linear(), []

    def forward(self, x, depth=2):
        if depth:
            x = self(torch.tanh(x), depth - 1)[-1]
        self.kept.append(self.layer(x))
        return self.kept


class CallsItself(Model):
    def __init__(self):
        super().__init__(1)
        self.nested = nn.ModuleList([Nested()])

    def between(self, x, _):
        outputs = self.nested[0](x)
        assert outputs is self.nested[0].kept and len(outputs) == 3
        self.nested[0].kept = []
        return self.blocks[0](sum(outputs))


class Hooked(Model):
    def __init__(self):
        super().__init__()
        self.blocks[1].weight.register_hook(lambda gradient: gradient * 0.5)
        self.start.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def between(self, x, _):
        return self.blocks[1](torch.relu(self.blocks[0](x)))


class Types(Model):
    """Parameters of three number types, one of them complex, and an empty one, in one block and in the rest."""

    def __init__(self):
        super().__init__(1)
        for place in (self.blocks[0], self):
            place.extra = nn.Parameter(torch.linspace(0, 1, WIDTH, dtype=torch.float64))
            place.wave = nn.Parameter(torch.polar(torch.ones(WIDTH), torch.linspace(0, 1, WIDTH)))
            place.nothing = nn.Parameter(torch.zeros(0, 3))

    def between(self, x, _):
        x = self.blocks[0](x)
        return x * self.extra.float() * self.wave.real + self.wave.imag


class FrozenInside(Model):
    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[0].bias.requires_grad_(False)

    def between(self, x, _):
        return (
            self.blocks[2](torch.relu(self.blocks[1](torch.relu(self.blocks[0](x)))))
            + x @ self.start.weight.detach()[:, :1]
        )


class Recurrent(Model):
    def __init__(self):
        super().__init__(1)
        self.cells = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.GRUCell(WIDTH, WIDTH)])

    def between(self, x, _):
        x, _ = self.cells[0](x.unsqueeze(1).expand(-1, 3, -1))
        state = x[:, 0]
        for moment in range(3):
            state = self.cells[1](x[:, moment], state)
        return self.blocks[0](state)


MODELS = [
    CallsItself,
    CalledThrice,
    Experts,
    Dropped,
    UsedBoth,
    Recomputed,
    RecomputedInPart,
    RecomputedByHooks,
    Dictionaries,
    Hooked,
    Types,
    FrozenInside,
    Recurrent,
]


def calls_again(output, target, model=None):
    """A loss that calls the model a second time, on other rows."""
    return F.cross_entropy(output, target) + model(torch.ones(2, 6) * output.detach().mean()).square().mean()


def train(world, make, strategy, precision="fp32", again=False, change=None):
    """Digests of losses, norms, an evaluation, model and optimizer state, by name."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    recipe = {"global_batch": 14, "micro_batches": 7, "threads": 1, "precision": precision}
    run = Run(RunOptions.of(strategy=strategy, **recipe), world)
    model, optimizer = run.prepare(model, optimizer)
    torch.manual_seed(1)
    data, found = TensorDataset(torch.rand(33, 6), torch.arange(33) % 4), {}

    def loss(output, target):
        return calls_again(output, target, model) if again else F.cross_entropy(output, target)

    for number, batch in enumerate(run.batches(data)):
        found[f"loss {number}"] = run.backward(batch, loss)
        found[f"norm {number}"] = run.clip_gradients(1.0)
        if change is not None:
            change(model, number)
        optimizer.step()
        optimizer.zero_grad()
    found["evaluation"] = torch.tensor(run.evaluate(data, F.cross_entropy), dtype=torch.float64)
    state = run.require_prepared().state.capture(run.fingerprint(), keep=True)
    digests = digest_tensors(found | state.model | state.optimizer)
    run.close()
    assert len(optimizer.state) > 0  # an optimizer may be looked at after the run
    return dict(sorted(digests.items()))


def freeze_later(model, step):
    model.blocks[0].requires_grad_(step != 0)


def calls_and_changes(model, _):
    """Calls the model between backward and the step, then scales gradients and weights."""
    model(torch.ones(2, 6))
    scale_in_place(model)
    rows = torch.ones(2, 6, requires_grad=True)
    torch.autograd.grad(model(rows).sum(), [rows, *model.parameters()])
    scale_in_place(model)


def scale_in_place(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
        parameter.data.mul_(0.9)


def thaw(model, _):
    model.blocks[1].requires_grad_(True)


def train_all(world, strategy, names):
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    made = {each.__name__: each for each in MODELS}
    found = {}
    for name in names:
        try:
            found[name] = train(world, made[name], strategy)
            if name == "UsedBoth":
                found["a loss that calls the model"] = train(world, made[name], strategy, again=True)
                found["frozen later"] = train(world, made[name], strategy, change=freeze_later)
                found["bf16"] = train(world, made["CalledThrice"], strategy, precision="bf16")
        except BaseException as error:
            error.add_note(f"in {name}")
            raise
    return found


QUICK = ["CalledThrice", "Experts"]


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, QUICK),
        *(pytest.param(n, [m.__name__ for m in MODELS], marks=pytest.mark.slow) for n in (2, 3, 4)),
    ],
)
def test_however_blocks_are_called_the_bits_are_those_of_one_device(ranks, names):
    (expected,) = run_ranks(train_all, 1, "single", names, timeout=120)
    for found in run_ranks(train_all, ranks, "fsdp", names, timeout=170):
        for name in expected:
            different = [key for key in expected[name] if found[name].get(key) != expected[name][key]]
            assert not different, f"{name}: {len(different)} of {len(expected[name])} differ, first {different[:4]}"


class Exported(Model):
    """Looks at weights as arrays of NumPy, which have their memory from then on."""

    def between(self, x, _):
        return self.blocks[0](x) * float(self.head.weight.detach().numpy().mean())


def train_with_calls(world, strategy):
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    return [train(world, CalledThrice, strategy, change=calls_and_changes), train(world, Exported, strategy)]


def test_what_the_loop_changes_after_a_call_of_the_model_is_changed():
    """Such a call left parameters whole, and their copies were changed in the place of the rows that are trained."""
    (expected,) = run_ranks(train_with_calls, 1, "single")
    assert run_ranks(train_with_calls, 2, "fsdp", timeout=60)[0] == expected


class InPlace(Model):
    """Changes what backward needs, which torch refuses."""

    def between(self, x, _):
        y = torch.sigmoid(self.blocks[0](x))
        return y.mul_(2)


def errors(world, strategy):
    """The error of each mistake."""
    postpone_compiler()
    found = {}
    for name, make, change in (
        ("in place", InPlace, None),
        ("thawed", FrozenInside, thaw),
        ("state_dict", Model, lambda model, _: model.state_dict()),
        ("copy", Model, lambda model, _: copy.deepcopy(model)),
        ("data", Model, lambda model, _: model.head.weight.data.norm()),
        ("clip", Model, lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.1)),
        ("norm", Model, lambda model, _: model.blocks[0].weight.norm()),
        ("called", Model, lambda model, _: world.is_main and model(torch.rand(2, 6))),
    ):
        try:
            train(world, make, strategy, change=change)
        except (RuntimeError, ConfigError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_mistakes_are_refused_with_the_name_of_the_parameter():
    for found in run_ranks(errors, 2, "fsdp"):
        assert "has been modified by an inplace operation" in found["in place"]
        assert "'blocks.0.bias' was frozen at run.prepare" in found["thawed"] or "blocks.1" in found["thawed"]
        assert "The gradient of 'start.weight' was asked for" in found["clip"]
        for name in ("state_dict", "copy", "data", "norm"):
            assert "is used outside of the forward pass of its module" in found[name]
            assert "run.state_dict(), which all ranks call" in found[name]
        assert (
            "called outside of run.backward on rank 0, while rank 1 went on to the next collective call"
            in found["called"]
        )
        assert "'blocks.0.weight'" in found["norm"] and "'head.weight'" in found["data"]


class Padded(nn.Module):
    """An encoder that is told which places of each sample are padding."""

    def __init__(self, nested):
        super().__init__()
        torch.manual_seed(4)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.stem = nn.Linear(2, 16)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)

    def forward(self, x):
        places = x.view(-1, 3, 2)
        padding = torch.arange(3) > (places[:, :1, 0] > 0) * 2
        return self.encoder(self.stem(places), src_key_padding_mask=padding).sum(1)


def evaluated_with_padding(world, strategy):
    """The losses of evaluations with and without nested tensors, and what is said of torch's own path there."""
    found = []
    for nested in (True, False):
        run = Run(RunOptions.of(strategy=strategy, global_batch=8, micro_batches=4, seed=1, threads=1), world)
        run.prepare(model := Padded(nested), torch.optim.SGD(model.parameters(), lr=0.1))
        inputs = torch.randn(24, 6, generator=torch.Generator().manual_seed(2))
        data = TensorDataset(inputs, torch.arange(24) % 5)
        found.append(run.evaluate(data, F.cross_entropy))
        torch.backends.mha.set_fastpath_enabled(True)
        with pytest.raises(ConfigError, match=r"get_fastpath_enabled.* was False after lockstep.init, and is True now"):
            run.backward(next(iter(run.batches(data))), F.cross_entropy)
        run.close()
    return found


def test_an_encoder_is_evaluated_to_the_same_bits_as_on_one_device():
    """torch leaves out padding, or takes another path, where modules have no hooks: other numbers, or a refusal."""
    ((nested, padded),) = run_ranks(evaluated_with_padding, 1, "single")
    assert nested == padded
    assert run_ranks(evaluated_with_padding, 2, "fsdp") == [[padded, padded]] * 2


def changed_on_one_rank(world, what):
    """The messages where rank 0 alone changes its part of the parameters, or of their gradients."""
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    run = Run(RunOptions(global_batch=8, micro_batches=4, seed=3, strategy="fsdp"), world)
    model = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.randn(24, 6, generator=torch.Generator().manual_seed(2))
    try:
        for batch in run.batches(TensorDataset(inputs, torch.arange(24) % 4)):
            run.backward(batch, F.cross_entropy)
            if what == "gradients" and (world.is_main or batch.plan.step == 0):
                for parameter in model.parameters():
                    parameter.grad.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        if what == "weights" and world.is_main:
            model.load_state_dict({n: torch.ones(p.shape) for n, p in model.named_parameters()})
        return run.fingerprint()
    except ReplicaError as error:
        return str(error)
    finally:
        run.close()


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("weights", "0.bias is changed on rank 0; unchanged on rank 1"),
        ("gradients", "the gradient of 0.bias is changed 2 times on rank 0; unchanged on rank 1"),
    ],
)
def test_rows_that_some_ranks_alone_change_are_found(what, found):
    for said in run_ranks(changed_on_one_rank, 2, what):
        assert found in said and "on some ranks only" in said
