"""The needs of optimizers are found out by trying: bits decide, not classes."""

import pytest
import torch
from torch import nn, optim

from lockstep.strategies.optimizer_trial import Unit, knows_parameters, refused_optimizer, try_optimizer

CPU = torch.device("cpu")


def model(dtype=torch.float32):
    return nn.Sequential(nn.Linear(6, 37), nn.LayerNorm(37), nn.Linear(37, 53), nn.Conv1d(4, 3, 2)).to(dtype)


def matrices():
    return [parameter for parameter in model().parameters() if parameter.dim() == 2]


class Noisy(optim.SGD):
    """Draws random numbers, and says that it is elementwise."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter))


class Normalized(optim.SGD):
    """Divides every gradient by its norm."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm() + 1)
        super().step(closure)


class Scaled(optim.SGD):
    """Steps as far as the norm of the parameter says, as LAMB does; its state tells nothing of it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] * float(parameter.norm()))


class InBlocks(optim.SGD):
    """Scales the gradients of large parameters in blocks, as optimizers with a state of 8 bits do."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.numel() >= 4096:
                blocks = parameter.grad.flatten()[: parameter.numel() // 256 * 256].view(-1, 256)
                blocks.div_(blocks.abs().amax(1, keepdim=True))
        super().step(closure)


class Factored(optim.SGD):
    """Scales gradients by means of rows and columns where both are many, as Adafactor of timm does."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.dim() > 1 and sorted(parameter.shape)[-2] >= 32:
                parameter.grad.div_(parameter.grad.abs().mean(0, keepdim=True) + 1)
        super().step(closure)


class Delayed(optim.SGD):
    """Divides gradients by their largest, from the eleventh step on, as AdaShift does."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (each for group in self.param_groups for each in group["params"]):
            self.state[parameter]["steps"] = steps = self.state[parameter].get("steps", 0) + 1
            if steps > 10 and parameter.numel():
                parameter.grad.div_(parameter.grad.abs().max())
        super().step(closure)


class Squared(optim.SGD):
    """Keeps a matrix for each vector, as Shampoo does, so that long ones would take minutes."""

    def step(self, closure=None):
        own = [each for group in self.param_groups for each in group["params"] if each.dim() == 1]
        assert all(each.numel() <= 407 for each in own), "much longer than any of the model"
        super().step(closure)


class Moded(optim.SGD):
    """Steps in its training mode alone, as those without a schedule; counts beside the state of parameters."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.trains, self.state["steps"] = False, 0

    def train(self):
        self.trains = True

    def step(self, closure=None):
        assert self.trains
        self.state["steps"] += 1
        super().step(closure)


class Coupled(optim.SGD):
    """Divides all gradients by the largest of all."""

    @torch.no_grad()
    def step(self, closure=None):
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        largest = max((float(each.grad.abs().max()) for each in own if each.numel()), default=1.0)
        for parameter in own:
            parameter.grad.div_(largest)
        super().step(closure)


class Remembering(optim.SGD):
    """An elementwise optimizer of somebody's own, with attributes that hold its parameters."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.first = self.param_groups[0]["params"][0]
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        super().step(closure)


class Sparse(optim.SGD):
    """Keeps a sparse tensor for each parameter."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["graph"] = torch.eye(3).to_sparse()


class Failing(optim.SGD):
    def step(self, closure=None):
        raise ValueError("no")


def bf16():
    return list(model(torch.bfloat16).parameters())


def plain():
    return list(model().parameters())


class Wrapping(optim.Optimizer):
    """Wraps another optimizer, as Lookahead does."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure=None):
        self.inner.step(closure)


def warmed_up(optimizer):
    """The optimizer under a schedule that begins at 0."""
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    return optimizer


TRIALS = {
    "sgd": (lambda: optim.SGD(plain(), lr=0.1, momentum=0.9, nesterov=True), Unit.ELEMENT),
    "adamw": (lambda: optim.AdamW(plain(), lr=0.1, amsgrad=True), Unit.ELEMENT),
    "adamw foreach": (lambda: optim.AdamW(model().named_parameters(), lr=0.1, foreach=True), Unit.ELEMENT),
    "adagrad": (lambda: optim.Adagrad(plain(), initial_accumulator_value=0.1), Unit.ELEMENT),
    "own": (lambda: Remembering(plain(), lr=0.1), Unit.ELEMENT),
    "adamw bf16": (lambda: optim.AdamW(bf16(), lr=0.1), Unit.ELEMENT),
    "adamw fused": (lambda: optim.AdamW(plain(), lr=0.1, fused=True), Unit.PLACE),
    "sgd fused": (lambda: optim.SGD(plain(), lr=0.1, momentum=0.9, fused=True), Unit.PLACE),
    "sgd bf16": (lambda: optim.SGD(bf16(), lr=0.1), Unit.PLACE),
    "adafactor": (lambda: optim.Adafactor(plain(), lr=0.1), Unit.PARAMETER),
    "muon": (lambda: optim.Muon(matrices(), lr=0.1), Unit.PARAMETER),
    "norms": (lambda: Normalized(plain(), lr=0.1), Unit.PARAMETER),
    "norms, rate 0": (lambda: warmed_up(Scaled(plain(), lr=0.1)), Unit.PARAMETER),
    "norms, rate tensor(0)": (lambda: Scaled(plain(), lr=torch.tensor(0.0)), Unit.PARAMETER),
    "adamw fused, rate 0": (lambda: warmed_up(optim.AdamW(plain(), lr=0.1, fused=True)), Unit.PLACE),
    "blocks": (lambda: InBlocks([nn.Parameter(torch.ones(70, 70))], lr=0.1), Unit.PARAMETER),
    "factored, if large": (lambda: Factored(plain(), lr=0.1), Unit.PARAMETER),
    "of the eleventh step": (lambda: Delayed(plain(), lr=0.1), Unit.PARAMETER),
    "slow for long vectors": (lambda: Squared(plain(), lr=0.1), Unit.ELEMENT),
    "sparse": (lambda: Sparse(plain(), lr=0.1), Unit.ELEMENT),
    "with modes": (lambda: Moded(plain(), lr=0.1), Unit.ELEMENT),
    "blocks of narrow rows": (lambda: InBlocks([nn.Parameter(torch.ones(5000, 2))], lr=0.1), Unit.PARAMETER),
    "six dimensions": (lambda: optim.AdamW([nn.Parameter(torch.ones(3, 3, 3, 3, 3, 3))]), Unit.ELEMENT),
    "noise": (lambda: Noisy(plain(), lr=0.1), Unit.MODEL),
    "coupled": (lambda: Coupled(plain(), lr=0.1), Unit.MODEL),
    "failing": (lambda: Failing(plain(), lr=0.1), Unit.MODEL),
    "wrapping": (lambda: Wrapping(optim.SGD(plain(), lr=0.1)), Unit.MODEL),
}


@pytest.mark.parametrize("name", TRIALS)
def test_bits_say_what_an_optimizer_needs(name):
    if name == "muon" and not hasattr(optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no torch.optim.Muon")
    make, unit = TRIALS[name]
    trial = try_optimizer(make(), CPU)
    assert trial.unit is unit
    assert bool(trial.reason) == (unit is not Unit.ELEMENT)


class Centred(optim.SGD):
    """Takes the mean of each row out of its gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.dim() > 1 and parameter.numel():
                parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))
        super().step(closure)


def test_an_optimizer_of_whole_rows_needs_whole_parameters_where_columns_are_cut():
    centred, adam = Centred(matrices(), lr=0.1), optim.AdamW(model().parameters())
    units = [try_optimizer(each, CPU, dimensions=n).unit for each in (centred, adam) for n in (1, 2)]
    assert units == [Unit.ELEMENT, Unit.PARAMETER, Unit.ELEMENT, Unit.ELEMENT]


def test_a_rate_of_zero_stays_zero():
    optimizer = optim.SGD(plain(), lr=torch.tensor(0.0))
    assert try_optimizer(optimizer, CPU).unit is Unit.ELEMENT
    assert optimizer.param_groups[0]["lr"] == 0


def test_a_trial_changes_nothing():
    """Neither parameters, gradients and state, nor hooks, schedulers and generators of the user's."""
    parameters, called = plain(), []
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = Remembering(parameters, lr=0.1, momentum=0.9)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    before = [parameter.clone() for parameter in parameters]
    momentum = [optimizer.state[parameter]["momentum_buffer"].clone() for parameter in parameters]
    generator = torch.get_rng_state()
    assert try_optimizer(optimizer, CPU).unit is Unit.ELEMENT
    assert all(map(torch.equal, before, parameters))
    assert all(torch.equal(optimizer.state[p]["momentum_buffer"], m) for p, m in zip(parameters, momentum))
    assert torch.equal(torch.get_rng_state(), generator)
    assert not called and optimizer.calls == 1 and scheduler.last_epoch == 0


def test_one_option_of_one_group_decides():
    first, second = plain()[:4], plain()[4:]
    groups = [{"params": first}, {"params": second, "fused": True}]
    assert try_optimizer(optim.AdamW(groups, lr=0.1), CPU).unit is Unit.PLACE


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adamw fused", "AdamW rounds an element with fused=True by its place in the tensor"),
        ("sgd bf16", "SGD rounds an element of torch.bfloat16 by its place in the tensor"),
        ("norms", "Normalized updates an element by others of its parameter"),
        ("noise", "Noisy draws random numbers in its step"),
        ("coupled", "Coupled updates a parameter by what it finds in others"),
        ("adafactor", "Adafactor fails on parts of parameters (ZeroDivisionError: float division by zero)"),
        ("wrapping", "Wrapping wraps another one (SGD), whose parameters are the whole ones, so"),
        ("wrapping", "Use the one that it wraps, or"),
    ],
)
def test_a_refusal_names_the_optimizer_and_the_remedy(name, words):
    optimizer = TRIALS[name][0]()
    text = str(refused_optimizer(optimizer, try_optimizer(optimizer, CPU), "fsdp"))
    assert words in text and text.endswith("strategy 'ddp'.")
    assert ("fused=False" in text) == (name == "adamw fused")


class Picks(optim.SGD):
    """Steps some parameters at a tenth of the rate: those of which ``picks`` says so, or that have the mark."""

    def __init__(self, parameters, picks, **options):
        super().__init__(parameters, lr=0.1, **options)
        self.picks = picks
        self.by_key = {parameter: 0.1 for group in self.param_groups for parameter in group["params"][:2]}
        self.first = self.param_groups[0]["params"][:1]
        self.numbers = {id(parameter) for parameter in self.first}

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (each for group in self.param_groups for each in group["params"]):
            parameter.grad *= 0.1 if self.picks(self, parameter) else 1.0
        return super().step(closure)


WHOLE = model()
BY_OBJECT = {
    "id": lambda own, p: id(p) in own.numbers,
    "dict": lambda own, p: own.by_key.get(p, 1.0) < 1,
    "list": lambda own, p: any(p is each for each in own.first),
    "global": lambda own, p: p is WHOLE[2].bias,
    "model": lambda own, p: any(p is each for name, each in WHOLE.named_parameters() if "bias" in name),
}
BY_WHAT_IT_IS = {
    "mark": lambda own, p: getattr(p, "is_slow", False),
    "tensor": lambda own, p: getattr(p, "mask", p).sum() < 0,
    "dimensions": lambda own, p: p.dim() == 1,
}


@pytest.mark.parametrize("kind", [*BY_OBJECT, *BY_WHAT_IT_IS])
def test_optimizers_that_find_parameters_by_which_object_they_are_are_told(kind):
    WHOLE[0].weight.is_slow, WHOLE[0].bias.mask = True, torch.randn(37)
    before = [(p.data_ptr(), p.detach().clone(), dict(vars(p))) for p in WHOLE.parameters()]
    optimizer = Picks(WHOLE.parameters(), (BY_OBJECT | BY_WHAT_IT_IS)[kind], momentum=0.9)
    assert knows_parameters(optimizer) == (kind in BY_OBJECT)
    for parameter, (place, values, attributes) in zip(WHOLE.parameters(), before):
        assert parameter.data_ptr() == place and torch.equal(parameter, values) and parameter.grad is None
        assert vars(parameter) == attributes and not optimizer.state[parameter]


class ByKind(optim.SGD):
    """Normalises the gradients of parameters of one kind."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (each for group in self.param_groups for each in group["params"]):
            parameter.grad /= parameter.grad.norm() + 1 if parameter.kind == "matrix" else 1
        return super().step(closure)


def test_every_kind_of_parameter_that_an_attribute_tells_is_tried():
    parameters = [nn.Parameter(torch.randn(3, 4)) for _ in range(3)]
    for parameter, kind in zip(parameters, ["vector", "vector", "matrix"]):
        parameter.kind, parameter.rows = kind, slice(3)
    assert try_optimizer(ByKind(parameters, lr=0.1), CPU).unit is Unit.PARAMETER
    parameters[2].kind = "vector"
    assert try_optimizer(ByKind(parameters, lr=0.1), CPU).unit is Unit.ELEMENT


MOMENTA = {}


class Outside(optim.SGD):
    """Keeps momenta in a global dict."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (each for group in self.param_groups for each in group["params"]):
            momentum = MOMENTA.setdefault(id(parameter), torch.zeros_like(parameter))
            parameter.grad.add_(momentum.mul_(0.9).add_(parameter.grad))
        return super().step(closure)


def test_what_an_optimizer_keeps_in_a_global_is_as_it_was_after_each_trial():
    """Entries of small parameters were left there, and taken for those of others that had their ids later."""
    optimizer = Outside([nn.Parameter(torch.randn(37, 4)), nn.Parameter(torch.randn(37))], lr=0.1)
    MOMENTA["mine"] = torch.zeros(1)
    assert try_optimizer(optimizer, CPU).unit is Unit.ELEMENT
    assert not knows_parameters(optimizer)
    assert [*MOMENTA] == ["mine"]
