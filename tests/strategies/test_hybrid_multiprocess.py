"""Pipelines of sharded stages on real ranks: the bits of one device, what a rank holds, and what is refused."""

import gc
import logging
from functools import cache

import pytest
import torch
from tests.ranks import run_ranks
from tests.strategies.pipeline.test_strategy_multiprocess import train_all
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.errors import ConfigError
from lockstep.run import Run, RunOptions

pytestmark = pytest.mark.timeout(300)
MESH = {"strategy": "hybrid", "mesh": "fsdp=2,pipeline=2"}
ANYWHERE = {"channels_last": False, "pipeline": {}}
"""Settings of the jobs that are the same for all layouts: cuts for three stages do not fit two."""


@cache
def trained(world, jobs, **settings):
    return run_ranks(train_all, world, jobs, {**ANYWHERE, **settings}, timeout=200)[0]


@pytest.mark.parametrize(
    ("world", "mesh", "jobs"),
    [
        (4, "fsdp=2,pipeline=2", ("in_place", "few_rows")),
        pytest.param(4, "fsdp=2,pipeline=2", ("recomputed",), marks=pytest.mark.slow),
        pytest.param(
            4,
            "pipeline=2,fsdp=2",
            ("frozen_start", "images", "recurrent"),
            marks=pytest.mark.slow,
        ),
        pytest.param(6, "fsdp=3,pipeline=2", ("recomputed", "few_rows", "images"), marks=pytest.mark.slow),
        pytest.param(8, "fsdp=2,pipeline=4", ("recomputed",), marks=pytest.mark.slow),
        pytest.param(8, "fsdp=4,pipeline=2", ("recomputed", "recurrent"), marks=pytest.mark.slow),
    ],
)
def test_the_bits_are_those_of_one_device(world, mesh, jobs):
    """With recomputation, flattened weights, and epochs in which some ranks have no micro-batch or no rows."""
    expected = trained(1, jobs, strategy="single")
    found = trained(world, jobs, strategy="hybrid", mesh=mesh)
    for job in jobs:
        assert list(found[job]) == list(expected[job])
        assert [name for name in expected[job] if found[job][name] != expected[job][name]] == [], job


WIDTH, TOKENS = 48, 40


def words(samples):
    """Whole numbers alone, so that every float32 in memory belongs to the training."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randint(TOKENS, (samples,), generator=generator),
        torch.randint(3, (samples,), generator=generator),
    )


def reader():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
    )


def live_bytes():
    """Of all float32 memory of this process, once each; scalars, such as losses and counters, left out."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    storages = [
        each.untyped_storage() for each in tensors if each.dtype == torch.float32 and each.dim() and not each.is_meta
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def hold(world):
    """The parts of a rank before, after and between steps; gradients of two backward passes; outputs and metrics."""
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    settings = MESH if world.world_size > 1 else {"strategy": "single"}
    run = Run(RunOptions.of(global_batch=8, micro_batches=4, threads=1, **settings), world)
    model, found = reader(), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if world.world_size > 1:
        first = model[0].weight
        found["own"] = first.detach().clone()
    model, optimizer = run.prepare(model, optimizer)
    if world.world_size > 1:
        found["same"] = first is next(model.parameters())
        del first
        kept = found["own"].nbytes
        found["placed"] = live_bytes() - kept
        found["shapes"] = {name: tuple(rows.shape) for name, rows in run.strategy.trainable().items()}
        found["names"] = {name: tuple(p.shape) for name, p in model.named_parameters()}
    data = words(24)
    for _ in run.epochs(1):
        for number, batch in enumerate(run.batches(data)):
            loss = run.backward(batch, nn.CrossEntropyLoss())
            if number != 1:  # its gradients are added to
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            del batch, loss
            if number == 0 and world.world_size > 1:
                found["bytes"] = live_bytes() - kept
    found["metric"] = run.evaluate(words(6), lambda output, target: (output.argmax(1) == target).double())
    found["output"] = model(data.tensors[0][:5]).detach()
    found |= {name: tensor.clone() for name, tensor in run.strategy.state()}
    run.close()
    return found


def test_a_rank_holds_its_rows_of_its_stage_and_gives_the_whole():
    """Six samples are three micro-batches of an evaluation: one holder has two of them, the other one. The head has
    three rows: two on rank 1, one on rank 3."""
    (alone,) = run_ranks(hold, 1)
    outcome = ("metric", "output", *[name for name in alone if "." in name])
    for rank, (found, _) in enumerate(in_one_world()):
        rows = (2, 1)[rank // 2]
        held = 4 * (WIDTH * WIDTH + WIDTH + (2 * rows * (WIDTH + 1) if rank % 2 else WIDTH * TOKENS)) // 2
        assert found["placed"] == 2 * held, "parameters, and memory for their gradients"
        assert found["bytes"] == 4 * held, "parameters, gradients and two moments"
        start = {"0.weight": (20, WIDTH), "1.weight": (24, WIDTH), "1.bias": (24,)}
        end = {"2.weight": (24, WIDTH), "2.bias": (24,), "3.weight": (rows, WIDTH), "3.bias": (rows,)}
        assert found["shapes"] == (end if rank % 2 else start)
        assert found["names"] == {name: tuple(p.shape) for name, p in reader().named_parameters()}
        assert found["same"], "a parameter that the user has kept is the prepared model's"
        for name in outcome:
            assert found[name] == alone[name] if name == "metric" else torch.equal(found[name], alone[name]), name


class Noisy(torch.optim.SGD):
    """Adds noise to what it updates."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter))


def chain():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def scaled():
    model = chain()
    model[1].scale = nn.Parameter(torch.tensor(1.0))
    return model


REFUSED = {
    "another reducer": (chain, {"reduce": "ring"}, r"'hybrid' has an exchange of its own. Use 'ordered'"),
    "options of fsdp": (
        chain,
        {"fsdp": {"reshard_after_forward": False}},
        r"no use for fsdp.reshard_after_forward",
    ),
    "too few micro-batches": (chain, {"micro_batches": 3, "global_batch": 6}, r"at least micro_batches=4"),
    "channels-last": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 4)),
        {"channels_last": True},
        "ddp",
    ),
    "a single number": (scaled, {}, r"'1.scale' is a scalar"),
    "an optimizer": (chain, {}, r"Noisy draws random numbers in its step"),
    "a call after the end": (chain, {}, r"was called after run\.close\(\), where under strategy 'hybrid'"),
}


def test_what_sharded_stages_cannot_do_is_refused_on_every_rank():
    for _, said in in_one_world():
        for case, (_, _, expected) in REFUSED.items():
            with pytest.raises(ConfigError, match=expected):
                raise said[case]


@cache
def in_one_world():
    return run_ranks(hold_and_refuse, 4)


def hold_and_refuse(world):
    return hold(world), {case: refusal(world, case) for case in REFUSED}


def refusal(world, case):
    make, given, _ = REFUSED[case]
    model = make()
    kind = Noisy if case == "an optimizer" else torch.optim.SGD
    try:
        run = Run(RunOptions.of(**{"global_batch": 8, "micro_batches": 4, "threads": 1, **MESH, **given}), world)
        model, _ = run.prepare(model, kind(model.parameters(), lr=0.1))
        run.close()
        model(torch.ones(2, 4))
    except ConfigError as error:
        return error
    return AssertionError(f"{case} was not refused")
