"""Loops as people write them end in the same bits on 1, 2 and 3 ranks."""

import functools

import pytest
import torch
from tests.ranks import run_ranks
from tests.run.jobs import GLOBAL_BATCH, begin, correct, dataset, network, train_step
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lockstep
from lockstep.core.fingerprint import combine, digest_tensors
from lockstep.errors import ConfigError

cross_entropy = nn.functional.cross_entropy


def plain(run, model, optimizer, data=None, loss=cross_entropy, **options):
    for _ in range(2):
        for batch in run.batches(dataset() if data is None else data):
            run.backward(batch, loss, **options)
            optimizer.step()
            optimizer.zero_grad()
    return run.fingerprint()


class Dicts(Dataset):
    """Samples as dicts, with noise that is drawn."""

    def __len__(self):
        return 53

    def __getitem__(self, index):
        x, y = dataset()[index]
        return {"x": x + 0.1 * torch.randn(6), "y": y}


class TakesDicts(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x, y=None):
        return self.net(x)


class Tied(nn.Module):
    """One weight used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(self.second(self.first(x).relu()).relu())


class Checkpointed(nn.Module):
    """Recomputes a part with dropout and BatchNorm in backward."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        hidden = checkpoint(self.net[:4], x, use_reentrant=False)
        return self.net[4](hidden)


def dict_batches():
    return plain(*begin(TakesDicts()), Dicts(), lambda output, batch: cross_entropy(output, batch["y"]))


def own_forward():
    run, model, optimizer = begin()

    def forward(data):
        return model(data[0] + torch.randn_like(data[0]))  # drawn before the model is entered

    return plain(run, model, optimizer, loss=lambda output, data: cross_entropy(output, data[1]), forward=forward)


def adversaries():
    """Two models, two optimizers, two backward passes over each batch, noise in both."""
    torch.manual_seed(0)
    models = nn.ModuleDict({"g": nn.Linear(2, 6), "d": nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))})
    run = lockstep.init(global_batch=GLOBAL_BATCH)
    by_d = torch.optim.AdamW(models["d"].parameters(), 0.01)
    by_g = torch.optim.AdamW(models["g"].parameters(), 0.01)
    models, by_d, by_g = run.prepare(models, by_d, by_g)

    def real_and_fake(data):
        fake = models["g"](torch.randn(len(data[0]), 2)).detach()
        return models["d"](data[0]), models["d"](fake)

    def fake_only(data):
        return models["d"](models["g"](torch.randn(len(data[0]), 2)))

    for batch in run.batches(dataset()):
        run.backward(batch, lambda out, _: (out[1] - out[0]).sigmoid().mean(), forward=real_and_fake)
        by_d.step()
        by_d.zero_grad()
        run.backward(batch, lambda out, _: (-out).sigmoid().mean(), forward=fake_only)
        by_g.step()
        by_g.zero_grad()
        by_d.zero_grad()
    return run.fingerprint()


def accumulated():
    """One update from the gradients of two batches."""
    run, _, optimizer = begin()
    for _ in range(4):
        for number, batch in enumerate(run.batches(dataset())):
            run.backward(batch, cross_entropy)
            if number % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
    optimizer.zero_grad()
    return run.fingerprint()


def moving_average():
    run, model = lockstep.init(global_batch=GLOBAL_BATCH), network()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    model, optimizer, average = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), average)
    for batch in run.batches(dataset()):
        train_step(run, batch, optimizer)
        average.update_parameters(model)
    return combine(digest_tensors(average.state_dict())), run.evaluate(dataset(seed=2), correct, model=average)


def evaluated():
    """Sets of 3 * W samples and one more or less; a metric that counts the samples; dropout off, mode put back."""
    run, model, _ = begin(checks="off")  # the count of a micro-batch is no mean over its samples
    model[1].eval()
    values = []
    for samples in (1, 2, 3, 5, 6, 7, 8, 9, 10, 23, 24, 25):
        results = run.evaluate(
            dataset(samples),
            {
                "seen": lambda output, target: target.double(),
                "right": correct,
                "loss": cross_entropy,
            },
        )
        targets = [dataset(samples)[number][1] for number in range(samples)]
        assert results["seen"] * samples == pytest.approx(float(sum(targets)))
        values.append(results)
    assert [module.training for module in model] == [True, False, True, True, True]
    return values


def random_in_evaluation():
    """The draws of a model while it is evaluated, and of the loop afterwards."""
    run, model, _ = begin()
    noisy = run.evaluate(dataset(), cross_entropy, forward=None, model=Noisy(model))
    return noisy, torch.rand(1).item()


class Noisy(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x + torch.randn_like(x))


def taken_over_loader():
    run, model, optimizer = begin()
    sampler = DistributedSampler(dataset(), num_replicas=run.world.world_size, rank=run.world.rank, shuffle=True)
    return plain(run, model, optimizer, DataLoader(dataset(), batch_size=8, sampler=sampler))


def left_early():
    """Two steps of each epoch; evaluation in the middle of the steps."""
    run, _, optimizer = begin()
    seen = []
    for _ in run.epochs(3):
        for number, batch in enumerate(run.batches(dataset())):
            train_step(run, batch, optimizer)
            seen.append((run.evaluate(dataset(seed=2), correct), batch.plan.step))
            if number == 1:
                break
    return run.fingerprint(), seen


def other_ways():
    return {
        "dict batches": dict_batches(),
        "own forward": own_forward(),
        "adversaries": adversaries(),
        "accumulated": accumulated(),
        "moving average": moving_average(),
        "evaluated": evaluated(),
        "random in evaluation": random_in_evaluation(),
        "loader taken over": taken_over_loader(),
        "left early": left_early(),
        "tied weights": plain(*begin(Tied())),
        "clipped, over collectives": clipped(),
    }


def checkpointed_ways():
    """Apart from the others: each rank imports torch's compiler."""
    return {"activation checkpointing": plain(*begin(Checkpointed()))}


def clipped():
    run, _, optimizer = begin(shared_memory=False)
    norms = []
    for batch in run.batches(dataset()):
        run.backward(batch, cross_entropy)
        norms.append(float(run.clip_gradients(0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return run.fingerprint(), norms


def body(world, checkpointed):
    return checkpointed_ways() if checkpointed else other_ways()


WAYS = (
    "dict batches",
    "own forward",
    "adversaries",
    "accumulated",
    "moving average",
    "evaluated",
    "random in evaluation",
    "loader taken over",
    "left early",
    "tied weights",
    "activation checkpointing",
    "clipped, over collectives",
)

CHECKPOINTED = "activation checkpointing"
"""Left to ``make test-all``: recomputation on three ranks is also in strategies/test_ddp_multiprocess.py."""


@functools.cache
def results(world_size, checkpointed):
    return run_ranks(body, world_size, checkpointed)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way == CHECKPOINTED)) for way in WAYS])
def test_the_result_is_the_same_on_1_2_and_3_ranks(way, world_size):
    (alone,) = results(1, way == CHECKPOINTED)
    assert [rank[way] for rank in results(world_size, way == CHECKPOINTED)] == [alone[way]] * world_size


def test_activation_checkpointing_changes_nothing():
    run, model, optimizer = begin(Checkpointed())
    without = plain(*begin(Plain()))
    assert plain(run, model, optimizer) == without


class Plain(Checkpointed):
    def forward(self, x):
        return self.net(x)


def compiled(world):
    return plain(*begin(compile=True))


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_on_one_and_two_ranks():
    (alone,) = run_ranks(compiled, 1, timeout=170)
    assert run_ranks(compiled, 2, timeout=170) == [alone] * 2


@pytest.mark.slow
# Torch's own, on its import
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_more_shapes_than_torch_keeps_graphs_for_are_refused():
    _, model, _ = begin(nn.Linear(6, 3), compile=True)
    model(torch.zeros(1, 6))
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        pytest.raises(ConfigError, match="more came than torch keeps"),
    ):
        for rows in range(2, 5):
            model(torch.zeros(rows, 6))


def second_training(world, strategy):
    first, model, _ = begin(strategy=strategy)
    first.close()
    run = lockstep.init(global_batch=GLOBAL_BATCH, strategy=strategy)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline", "tensor"])
def test_a_model_that_an_earlier_run_has_shared_out_is_refused(strategy):
    """It ended in errors about a forward pass, or about ranks that differ."""
    with pytest.raises(ConfigError, match=f"belongs to an earlier run, under whose strategy '{strategy}'.*state_dict"):
        run_ranks(second_training, 2, strategy)


class Scaled(torch.optim.SGD):
    """Reads what is set on a parameter: a rate, a mask, and whether its gradient is normalised."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (each for group in self.param_groups for each in group["params"]):
            parameter.grad *= getattr(parameter, "rate", 1.0) * getattr(parameter, "mask", 1.0)
            if getattr(parameter, "is_normalised", False):
                parameter.grad /= parameter.grad.norm() + 1
        return super().step(closure)


def with_marks(world, mark, strategy):
    model = network()
    model[0].weight.rate, model[4].bias.rate = 0.25, 3.0
    for parameter in model.parameters():
        parameter.is_normalised = mark == "normalised" and parameter is model[4].weight
    if mark == "mask":
        model[4].weight.mask = torch.rand(3, 8)
    run, model, optimizer = begin(model, Scaled, strategy=strategy)
    for batch in run.batches(dataset()):
        train_step(run, batch, optimizer)
        model[0].weight.rate *= 1.5
    return run.fingerprint()


@pytest.mark.parametrize(
    "mark", ["rate", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mask", "normalised"))]
)
def test_optimizers_find_what_is_set_on_a_parameter(mark):
    """Under fsdp and parameter_server they took what they take where nothing is set, and ended in other bits."""
    expected = with_marks(None, mark, "single")
    assert with_marks(None, mark, "dp") == expected
    for strategy in ("ddp", "fsdp", "pipeline", "parameter_server"):
        assert run_ranks(with_marks, 2, mark, strategy) == [expected] * 2, strategy


class Known(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad *= self.rates.get(id(parameter), 1.0)
        return super().step(closure)


def with_rates(world, strategy):
    model = network()
    run = lockstep.init(global_batch=GLOBAL_BATCH, micro_batches=8, strategy=strategy)
    optimizer = Known(model.parameters(), lr=0.1)
    optimizer.rates = {id(model[4].bias): 0.25}
    model, optimizer = run.prepare(model, optimizer)
    for batch in run.batches(dataset()):
        train_step(run, batch, optimizer)
    return run.fingerprint()


def test_an_optimizer_that_looks_parameters_up_is_refused_where_it_gets_others():
    """It took the rates of none of them, and ended in other bits."""
    for strategy in ("ddp", "pipeline"):
        assert run_ranks(with_rates, 2, strategy) == [with_rates(None, "single")] * 2
    for strategy in ("fsdp", "parameter_server", "tensor"):
        with pytest.raises(ConfigError, match=r"Known steps some of the model's in another way.*p\.scale = 0\.1"):
            run_ranks(with_rates, 2, strategy)
