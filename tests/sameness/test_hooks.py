"""Hooks on parameters, gradients and modules: the bits of one device, or a refusal."""

import io
import logging
from functools import cache

import pytest
import torch
from tests.ranks import run_ranks
from tests.sameness.training import (
    DDP,
    DP,
    FSDP,
    LAYERS,
    PIPELINE,
    SERVERS,
    SHARDED_PIPELINE,
    SINGLE,
    TENSOR,
    WIDTH,
    Program,
    chain,
    differing,
    rows,
    under,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_pre_hook
from torch.utils.checkpoint import checkpoint

from lockstep.core.world import World
from lockstep.errors import ConfigError
from lockstep.run import Run, RunOptions

pytestmark = pytest.mark.timeout(180)


def halve(parameter):
    parameter.grad.mul_(0.5)


def noisy(gradient):
    return gradient + 0.01 * torch.randn_like(gradient)


def noisy_output(module, given, output):
    return output + 0.1 * torch.randn_like(output)


def noisy_input(module, given):
    return (given[0] + 0.1 * torch.randn_like(given[0]),)


def noisy_gradients(module, inputs, outputs):
    return tuple(None if each is None else noisy(each) for each in inputs)


def on_gradients():
    model = chain()
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    model[2].bias.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
    model[6].weight.register_post_accumulate_grad_hook(halve)
    return Program(model)


def on_gradients_after_prepare():
    def after(model, prepared):
        for name, parameter in prepared.named_parameters():
            if name.endswith("weight"):
                parameter.register_hook(lambda gradient: gradient * 0.5)
            else:
                parameter.register_post_accumulate_grad_hook(halve)

    return Program(chain(), after=after)


def removed_after_prepare():
    model = chain()
    handles = [
        model[0].weight.register_hook(lambda gradient: gradient * 0.5),
        model[4].weight.register_post_accumulate_grad_hook(halve),
    ]
    return Program(model, after=lambda *_: [handle.remove() for handle in handles])


def noise_on_gradients():
    model = chain(nn.Dropout(0.2))
    for parameter in model.parameters():
        parameter.register_hook(noisy)
    return Program(model)


def noise_in_backward_of_modules():
    model = chain()
    for number in (2, 4):
        model[number].register_full_backward_hook(noisy_gradients)
        model[number].register_full_backward_pre_hook(lambda module, outputs: tuple(map(noisy, outputs)))
    return Program(model)


def noise_in_forward():
    model = chain(nn.Dropout(0.2))
    for number in (1, 2, 5):
        model[number].register_forward_hook(noisy_output)
        model[number].register_forward_pre_hook(noisy_input)
    return Program(model)


def noise_in_forward_after_prepare():
    def after(model, prepared):
        for module in prepared.modules():
            if type(module) is nn.Linear:
                module.register_forward_hook(noisy_output)
                module.register_forward_pre_hook(noisy_input)

    return Program(chain(), after=after)


def kept_in_the_last_stage():
    kept, model = {}, chain()
    model[5].register_forward_hook(lambda module, given, output: kept.update(x=output))
    return Program(model, loss=lambda output, target: F.cross_entropy(output, target) + kept["x"].pow(2).mean())


class Kept:
    """Keeps what a module gives, for the loss."""

    def __init__(self, module):
        self.found = []
        module.register_forward_hook(self.keep)

    def keep(self, module, given, output):
        self.found.append(output)

    def loss(self, output, target):
        extra = sum((each.pow(2).mean() for each in self.found), torch.zeros(()))
        self.found.clear()
        return F.cross_entropy(output, target) + extra


def kept_for_the_loss():
    model = chain()
    return Program(model, loss=Kept(model[3]).loss)


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return noisy(gradient)


class Noisy(nn.Module):
    def forward(self, x):
        return NoisyGradient.apply(x)


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), Noisy(), nn.Dropout(0.2))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def noise_in_functions():
    return Program(nn.Sequential(nn.Linear(6, WIDTH), Noisy(), Recomputed(), Noisy(), nn.Linear(WIDTH, 4)))


EVERYWHERE = (
    on_gradients,
    on_gradients_after_prepare,
    removed_after_prepare,
    noise_on_gradients,
    noise_in_backward_of_modules,
    noise_in_forward,
    noise_in_forward_after_prepare,
    kept_in_the_last_stage,
)
WHOLE = (kept_for_the_loss, noise_in_functions)
"""Where one process has the whole graph of a micro-batch."""


@cache
def alone():
    return under(SINGLE, *EVERYWHERE, *WHOLE)


@pytest.mark.parametrize(
    "layout, makes",
    [
        pytest.param(DP, EVERYWHERE + WHOLE, id="dp"),
        pytest.param(LAYERS, EVERYWHERE + WHOLE, id="layers", marks=pytest.mark.slow),
        pytest.param(FSDP, EVERYWHERE + WHOLE, id="fsdp", marks=pytest.mark.slow),
        pytest.param(PIPELINE, EVERYWHERE, id="pipeline", marks=pytest.mark.slow),
        pytest.param(SERVERS, EVERYWHERE + WHOLE, id="parameter_server", marks=pytest.mark.slow),
        pytest.param(DDP, EVERYWHERE + WHOLE, id="ddp", marks=pytest.mark.slow),
        pytest.param(SHARDED_PIPELINE, EVERYWHERE, id="fsdp-pipeline", marks=pytest.mark.slow),
    ],
)
def test_hooks_have_the_bits_of_one_device(layout, makes):
    expected = {make.__name__: alone()[make.__name__] for make in makes}
    assert differing(expected, under(layout, *makes)) == {}


def test_the_hooks_of_these_programs_change_what_they_compute():
    """The counter-check: without their hooks the programs give something else."""
    plain = under(SINGLE, removed_after_prepare)["removed_after_prepare"]
    for name in (
        "on_gradients",
        "on_gradients_after_prepare",
        "noise_in_backward_of_modules",
        "noise_in_forward",
    ):
        assert alone()[name]["0.weight"] != plain["0.weight"], name


def on_an_opened_module():
    return Program(chain(), after=lambda model, prepared: model.register_forward_hook(noisy_output))


def on_a_split_layer():
    model = chain()
    model[0].weight.register_hook(lambda gradient: gradient / gradient.norm())
    return Program(model)


def swapped():
    def after(model, prepared):
        for parameter in prepared.parameters():
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 0.5))

    return Program(chain(), after=after)


class SetsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.save_for_backward(x)
        ctx.weight = module.weight
        return x @ ctx.weight.detach()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        ctx.weight.grad = x.T @ gradient
        return gradient @ ctx.weight.detach().T, None


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) + 0.01)

    def forward(self, x):
        return SetsGradient.apply(x, self)


def gradient_by_hand():
    return Program(chain(ByHand()))


def on_all_modules():
    register_module_forward_hook(lambda module, given, output: None)
    return Program(chain())


class Plain(nn.Module):
    """Draws in layers that are no children of a container."""

    def __init__(self):
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(6, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.last(self.dropout(torch.relu(self.first(x))))


def plain_dropout():
    return Program(Plain())


PAST_THE_HOOKS = r"The gradient of '4.weight' did not pass through Lockstep's hooks"
REFUSED = [
    (PIPELINE, kept_for_the_loss, r"The loss reads 'self.found', which a hook .* begins with '0'.*'ddp'"),
    (PIPELINE, noise_in_functions, r"The backward pass draws random numbers.*strategy 'ddp' or 'fsdp'"),
    (
        PIPELINE,
        plain_dropout,
        r"the model' stays whole, since 'dropout' in it draws random numbers and is no child of an nn.Sequen",
    ),
    (DP, swapped, r"The gradient of '0.weight' did not pass through Lockstep's hooks"),
    (SINGLE, gradient_by_hand, PAST_THE_HOOKS + ".* or its gradient was set by hand"),
    (TENSOR, on_a_split_layer, r"'0.weight' has a hook, and strategy 'tensor' .*'ddp'"),
]
REFUSED_TOO = [
    (PIPELINE, on_an_opened_module, r"A hook was registered on 'the model' after run.prepare.*'ddp'"),
    (PIPELINE, on_all_modules, r"Hooks are registered for all modules .* no process calls all modules"),
    (LAYERS, swapped, r"The gradient of '0.weight' did not pass through Lockstep's hooks"),
    (PIPELINE, gradient_by_hand, PAST_THE_HOOKS),
    (SERVERS, gradient_by_hand, PAST_THE_HOOKS),
]
"""Left to ``make test-all``."""


@pytest.mark.parametrize(
    "layout, make, said",
    [*REFUSED, *(pytest.param(*case, marks=pytest.mark.slow) for case in REFUSED_TOO)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_hooks_cannot_do_is_refused(layout, make, said):
    with pytest.raises(ConfigError, match=said):
        under(layout, make)


def bound(gradient):
    return gradient.clamp(-1e-3, 1e-3)


def bounded_weight(model):
    model[0].weight.register_hook(bound)


def normed_weight(model):
    def normed(parameter):
        parameter.grad /= parameter.grad.norm()

    model[0].weight.register_post_accumulate_grad_hook(normed)


def bounded_layer(model):
    model[2].register_full_backward_hook(lambda module, inputs, outputs: tuple(map(bound, inputs)))


def bounded_output(model):
    def hook(module, given, output):
        if output.requires_grad:
            output.register_hook(bound)

    model[2].register_forward_hook(hook)


def halved_weight(model):
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)


def counted_weight(model):
    counts = []
    model[0].weight.register_hook(lambda gradient: counts.append(len(gradient)))


def noted_weight(model):
    norms = []
    model[0].weight.register_hook(lambda gradient: norms.append(float(gradient.norm())))


def noted_layer(model):
    norms = {}
    model[2].register_full_backward_hook(lambda module, inputs, outputs: norms.update(last=outputs[0].norm()))


def train_hooked(world, hook, options, loss=F.cross_entropy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    if hook is not None:
        hook(model)
    run = Run(RunOptions.of(global_batch=8, **options), world)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in run.epochs(1):
        for batch in run.batches(rows()):
            run.backward(batch, loss)
            optimizer.step()
            optimizer.zero_grad()
    found = run.fingerprint()
    run.close()
    return found


def warned_by(caplog, hook, **options):
    caplog.clear()
    train_hooked(World(), hook, options)
    return [said for record in caplog.records if "sum of the losses" in (said := record.getMessage())]


@pytest.mark.parametrize("hook", [bounded_weight, normed_weight, bounded_layer, bounded_output])
def test_a_hook_that_bounds_a_gradient_is_told_that_it_sees_a_sum(hook, caplog):
    (told,) = warned_by(caplog, hook, micro_batches=4)
    assert told.startswith("The gradient of '0.weight'")
    assert "of up to 2 samples" in told
    assert not warned_by(caplog, hook, micro_batches=4, checks="off")
    if hook is not bounded_output:  # what a forward pass registers is not seen before it is computed
        (told,) = warned_by(caplog, hook, micro_batches=1)
        assert "of up to 8 samples" in told


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("hook", [None, halved_weight, counted_weight])
def test_a_hook_that_scales_or_counts_gradients_is_not(hook, micro_batches, caplog):
    assert not warned_by(caplog, hook, micro_batches=micro_batches)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("hook", [noted_weight, noted_layer])
def test_a_hook_that_keeps_a_number_computed_from_gradients_is_told_too(hook, micro_batches, caplog):
    (told,) = warned_by(caplog, hook, micro_batches=micro_batches)
    assert "sets the variable 'norms' of a hook of" in told
    assert f"of up to {8 // micro_batches} samples" in told


@pytest.fixture
def hook_of_all_modules():
    hook = register_module_full_backward_pre_hook(lambda module, outputs: tuple(map(bound, outputs)))
    yield
    hook.remove()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # that of the first layer
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_hook_of_all_modules_is_looked_at(micro_batches, hook_of_all_modules, caplog):
    (told,) = warned_by(caplog, None, micro_batches=micro_batches)
    assert told.startswith("The gradient of '0.weight'")


def stepped_weight(model):
    @torch.no_grad()
    def step(parameter):
        parameter -= 0.1 * parameter.grad
        parameter.grad = None

    model[0].weight.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_hook_that_steps_an_optimizer_is_refused(micro_batches):
    with pytest.raises(ConfigError, match=r"'0\.weight'.* a hook of the backward pass steps an optimizer"):
        train_hooked(World(), stepped_weight, {"micro_batches": micro_batches})


@pytest.mark.parametrize("hook", [None, halved_weight])
def test_an_iterator_of_the_loss_that_the_look_at_hooks_moves_on_is_told(hook, caplog):
    weights = iter([0.1] * 100)
    train_hooked(World(), hook, {"micro_batches": 1}, loss=lambda *given: next(weights) * F.cross_entropy(*given))
    said = [words for record in caplog.records if "To see what hooks do" in (words := record.getMessage())]
    assert ["the variable 'weights'" in each for each in said] == ([] if hook is None else [True])


def train_on_ranks(world, settings):
    told = io.StringIO()
    logging.getLogger("lockstep").addHandler(logging.StreamHandler(told))
    train_hooked(world, bounded_weight, {"micro_batches": 4, **settings})
    return told.getvalue().count("The gradient of '0.weight' does not double")


@pytest.mark.parametrize("layout", [DDP, FSDP, PIPELINE, SERVERS])
def test_the_main_process_tells_it_once(layout):
    ranks, settings = layout
    assert sum(run_ranks(train_on_ranks, ranks, settings, timeout=100)) == 1
