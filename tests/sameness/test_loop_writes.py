"""The loop changes parameters, gradients, momenta and freezing itself: on every rank it may, on one it is refused."""

import re
from functools import cache

import pytest
import torch
from tests.ranks import run_ranks
from tests.sameness.layouts import outcomes, require_ends
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep.errors import LockstepError, ReplicaError
from lockstep.run import Run, RunOptions

ROWS = 48
DATA = TensorDataset(torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(2)), torch.arange(ROWS) % 4)
CHANGED_AT = 5
"""The last step of the first epoch."""


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def scale_all(model, optimizer):
    for parameter in model.parameters():
        parameter.mul_(0.5)


def scale_data(model, optimizer):
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def assign_data(model, optimizer):
    for parameter in model.parameters():
        parameter.data *= 0.5


def scale_head(model, optimizer):
    model[4].weight.mul_(0.5)


def scale_data_of_head(model, optimizer):
    model[4].weight.data.mul_(0.5)


def clamp_data(model, optimizer):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def load(model, optimizer):
    model.load_state_dict({name: torch.full(p.shape, 0.1) for name, p in model.named_parameters()})


def scale_gradients(model, optimizer):
    for parameter in trained(model):
        parameter.grad.mul_(0.5)


def scale_gradient_of_head(model, optimizer):
    model[4].weight.grad.mul_(0.5)


def clamp_gradients(model, optimizer):
    for parameter in trained(model):
        parameter.grad.data.clamp_(-0.01, 0.01)


def clear_gradients(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = None


def scale_momenta(model, optimizer):
    for parameter in trained(model):
        optimizer.state[parameter]["momentum_buffer"].mul_(0.5)


def forget_momenta(model, optimizer):
    optimizer.state.clear()


def clamp_in_vain(model, optimizer):
    for parameter in model.parameters():
        parameter.data.clamp_(-50.0, 50.0)
        if parameter.grad is not None:
            parameter.grad.data.clamp_(-50.0, 50.0)


def scale_zeros(model, optimizer):
    model[0].weight.data.mul_(0.5)
    model[5].bias.data.mul_(0.5)  # frozen, and zero


def freeze(model, optimizer):
    model[2].requires_grad_(False)


def give_gradient_to_frozen(model, optimizer):
    model[5].bias.grad = torch.full((16,), 0.01)


BEFORE_STEP = (
    *(
        scale_gradients,
        scale_gradient_of_head,
        clamp_gradients,
        clear_gradients,
        scale_momenta,
        clamp_in_vain,
    ),
)
AFTER_STEP = (
    *(scale_all, scale_data, assign_data, scale_head, scale_data_of_head, clamp_data, load),
    *(forget_momenta, clamp_in_vain, scale_zeros, freeze),
)


class Case:
    """A training in which the loop changes something once."""

    def __init__(self, change, *, on_all):
        self._change, self._on_all = change, on_all
        self.__name__ = f"{change.__name__} on {'all ranks' if on_all else 'rank 0'}"

    def __call__(self, world, settings):
        run = Run(RunOptions.of(global_batch=8, micro_batches=4, seed=3, **settings), world)
        torch.manual_seed(1)
        layers = (
            nn.Linear(6, 16),
            nn.ReLU(),
            nn.Linear(16, 16),
            nn.ReLU(),
            nn.Linear(16, 16),
            nn.LayerNorm(16),
        )
        model = nn.Sequential(*layers, nn.Linear(16, 4))
        model[5].bias.requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
        model, optimizer = run.prepare(model, optimizer)
        losses = []
        try:
            for _ in run.epochs(2):
                for batch in run.batches(DATA):
                    losses.append(run.backward(batch, F.cross_entropy))
                    changes = batch.plan.step == CHANGED_AT and (self._on_all or world.is_main)
                    with torch.no_grad():
                        if changes and self._change in (*BEFORE_STEP, give_gradient_to_frozen):
                            self._change(model, optimizer)
                        optimizer.step()
                        if changes and self._change in AFTER_STEP:
                            self._change(model, optimizer)
                    optimizer.zero_grad()
            proof = torch.tensor(list(bytes.fromhex(run.fingerprint())))
        finally:
            run.close()
        return {"losses": torch.stack(losses), "fingerprint": proof}


EVERYWHERE = [Case(change, on_all=True) for change in dict.fromkeys((*BEFORE_STEP, *AFTER_STEP))]
LAYOUTS = ("ddp", "fsdp", "pipeline", "server", "servers", "fsdp-pipeline", "data-pipeline")
QUICK = ("pipeline", "servers")
ON_ONE = (scale_all, scale_data_of_head, scale_gradient_of_head, clear_gradients, scale_momenta, freeze)
"""Those that are tried on one rank, each of which takes processes of its own: a refusal leaves them where they are."""


@cache
def expected():
    return outcomes(EVERYWHERE, "single")


def is_quick(layout, change):
    """The refusals of servers are told by the same exchange as those of stages."""
    return (layout, change) in (("pipeline", scale_all), ("pipeline", clear_gradients), ("servers", freeze))


def marked(layouts, quick=QUICK):
    return [pytest.param(each, marks=() if each in quick else pytest.mark.slow) for each in layouts]


@pytest.mark.parametrize("layout", marked(LAYOUTS, quick=()))
def test_what_every_rank_changes_gives_the_bits_of_one_process(layout):
    require_ends(EVERYWHERE, expected(), outcomes(EVERYWHERE, layout), layout, {})


@pytest.mark.parametrize(
    ("layout", "change"),
    [
        pytest.param(layout, change, marks=[pytest.mark.slow] * (not is_quick(layout, change)))
        for layout in LAYOUTS
        for change in ON_ONE
    ],
)
def test_what_one_rank_changes_is_refused(layout, change):
    case = Case(change, on_all=False)
    (found,) = outcomes([case], layout)
    said = "Every rank has to call requires_grad_()" if change is freeze else "on some ranks only"
    assert said in found.refusal, (found.refusal, found.fault)


def test_a_frozen_parameter_that_gets_a_gradient_is_refused_where_nobody_would_step_it():
    (found,) = outcomes([Case(give_gradient_to_frozen, on_all=True)], "server")
    assert "'5.bias'" in found.refusal and "frozen" in found.refusal, (found.refusal, found.fault)


class Averaged(torch.optim.SGD):
    """As schedule-free optimizers do it: ``eval()`` moves the parameters that have a state."""

    @torch.no_grad()
    def eval(self):
        for parameter, state in self.state.items():
            parameter.lerp_(state["momentum_buffer"], 0.25)


def at_the_end(world, settings, change):
    """Trains an epoch, changes the parameters after its last step, and evaluates; or what this was refused with."""
    run = Run(RunOptions.of(global_batch=8, micro_batches=4, seed=3, **settings), world)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model, optimizer = run.prepare(model, Averaged(model.parameters(), 0.1, momentum=0.9))
    try:
        for batch in run.batches(DATA):
            run.backward(batch, F.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        if change == "by the optimizer":
            optimizer.eval()
        elif run.is_main:
            scale_data(model, optimizer)
        if change == "before a prediction":
            return run.predict(DATA)
        if change == "before it is kept":
            return run.state_dict()
        return run.evaluate(DATA, F.cross_entropy)
    except ReplicaError as error:
        return str(error)
    finally:
        run.close()


@pytest.mark.parametrize(
    "strategy",
    ["ddp", *(pytest.param(each, marks=pytest.mark.slow) for each in ("fsdp", "parameter_server"))],
)
def test_numbers_are_not_told_of_parameters_that_one_rank_has_changed(strategy):
    """An evaluation after the last step was of a mixture, and the run ended as if nothing were wrong."""
    changes = ["on the main process", "before a prediction", "before it is kept"]
    for change in changes[: 2 if strategy == "ddp" else 3]:
        for found in run_ranks(at_the_end, 2, {"strategy": strategy}, change):
            assert "on some ranks only" in str(found)


def test_what_an_optimizer_does_by_its_state_is_evaluated_or_refused():
    """In a pipeline each rank has the state of its stages; the worker of a parameter server would have old values."""
    (expected,) = run_ranks(at_the_end, 1, {}, "by the optimizer")
    for strategy in ("fsdp", "pipeline"):
        assert run_ranks(at_the_end, 2, {"strategy": strategy}, "by the optimizer") == [expected] * 2
    for found in run_ranks(at_the_end, 2, {"strategy": "parameter_server"}, "by the optimizer"):
        assert "goes by the optimizer's state" in found


def one_epoch(world, strategy, change):
    """An epoch in which the last rank alone does something; or what it was refused with."""
    run = Run(RunOptions.of(global_batch=8, micro_batches=4, strategy=strategy), world)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    weight = 1.0

    def loss(output, target):
        return weight * F.cross_entropy(output, target)

    try:
        for _ in run.epochs(1):
            for batch in run.batches(DATA):
                is_other = batch.plan.step == 3 and not run.is_main
                if is_other and change == "weight":
                    weight = 0.5
                if is_other and change == "dropout":
                    model[2].p = 0.5
                if is_other and change == "hook":
                    model[0].register_forward_hook(lambda module, given, output: output * 1.01)
                run.backward(batch, loss)
                if change == "norm":
                    run.clip_gradients(torch.tensor(0.05) if is_other else 0.1)
                if not (is_other and change == "step"):
                    optimizer.step()
                optimizer.zero_grad()
        return ""
    except LockstepError as error:
        return str(error)
    finally:
        run.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("weight", "'weight' of the loss .* is not the same on all of them"),
        pytest.param("dropout", "the attribute 'p' of 2 is not the same", marks=pytest.mark.slow),
        pytest.param("hook", "the hooks of 0 is not the same", marks=pytest.mark.slow),
        ("step", "<calls of step of optimizer 0>' is 6 on rank 0; 5 on rank 1"),
    ],
)
def test_what_one_rank_does_within_the_only_epoch_is_refused(change, said):
    """No epoch came after it, and fsdp has no replicas: the run ended with other bits and exit status 0."""
    for found in run_ranks(one_epoch, 2, "fsdp", change):
        assert re.search(said, found), found


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_ranks_that_clip_their_parts_to_several_norms_are_refused(strategy):
    """Each scaled its own part, and the run ended as if nothing were wrong."""
    for said in run_ranks(one_epoch, 2, strategy, "norm"):
        assert "<max_norm of run.clip_gradients>" in said
    assert run_ranks(one_epoch, 1, "single", "norm") == [""]
