"""Level A of tensor parallelism: with ``tensor.shards``, the bits of one process on every number of ranks."""

import logging
from functools import cache, partial

import pytest
import torch
from tests.ranks import run_ranks
from tests.strategies.contract_jobs import train
from tests.strategies.tensor.tensor_jobs import JOBS
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.config.strategy_options import Level
from lockstep.core.fingerprint import digest_tensors
from lockstep.errors import CheckpointMismatch
from lockstep.run import Run, RunOptions
from lockstep.runtime.lazy_compiler import postpone_compiler

pytestmark = pytest.mark.timeout(300)
FOUR = ("heads", "features", "channels", "blocks")
TENSOR = {"strategy": "tensor"}
LAYOUTS = {
    "tensor 1": (1, TENSOR),
    "tensor 2": (2, TENSOR),
    "tensor 4": (4, TENSOR),
    "ddp 3": (3, {"strategy": "ddp"}),
    "data x tensor": (4, {"strategy": "hybrid", "mesh": "data=2,tensor=2"}),
    "tensor x data": (4, {"strategy": "hybrid", "mesh": "tensor=2,data=2"}),
}
QUICK = (("tensor 2", 4, "fp32 of some jobs"),)
CASES = [
    *QUICK,
    *((name, shards, "fp32") for name in LAYOUTS for shards in (4, 8)),
    *((name, 12, "fp32") for name in ("tensor 1", "tensor 2", "tensor 4")),
    *((name, 4, way) for name in ("tensor 2", "tensor 4") for way in ("bf16", "fp16", "channels_last")),
]


@pytest.mark.parametrize(
    ("name", "shards", "way"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in CASES],
)
def test_every_layout_has_the_bits_of_one_process(name, shards, way):
    """Losses, norms, parameters, buffers and optimizer tensors of 12 steps with clipping, the last ones ragged."""
    world, options = LAYOUTS[name]
    jobs = FOUR if shards != 12 else ("heads",)
    if way == "fp32 of some jobs":  # blocks have split channels, too
        way, jobs = "fp32", ("blocks",)
    settings = {**options, **recipe(shards, way)}
    expected = alone(shards, way, jobs)
    found = run_ranks(train_jobs, world, settings, jobs, 2 if shards == 8 else 1, timeout=200)[0]
    for job in jobs:
        assert set(found[job]) == set(expected[job])
        wanted, given = digest_tensors(expected[job]), digest_tensors(found[job])
        different = [each for each in wanted if given[each] != wanted[each]]
        assert not different, f"{job}: {len(different)} of {len(wanted)} differ: {different[:5]}"


def recipe(shards, way):
    """The settings of a number of shards, in a precision or with channels-last images."""
    other = {"channels_last": True} if way == "channels_last" else {"precision": way}
    return {"tensor": {"shards": shards}, **other}


@cache
def alone(shards, way, jobs):
    settings = {"strategy": "single", **recipe(shards, way)}
    return run_ranks(train_jobs, 1, settings, jobs, 2 if shards == 8 else 1, timeout=200)[0]


def train_jobs(world, options, jobs, wide):
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    return {job: train(world, partial(JOBS[job], torch.float32, wide), options) for job in jobs}


def call_twice(world, options):
    """Digests of the parameters after two steps in bf16, in each of which the model is called twice."""
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
    data = TensorDataset(torch.randn(16, 6), torch.arange(16) % 8)
    recipe = {"global_batch": 8, "micro_batches": 4, "seed": 3, "threads": 1, "precision": "bf16"}
    run = Run(RunOptions.of(**recipe, tensor={"shards": 2}, **options), world)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in run.batches(data):
        forward = lambda part: model(part[0]) + model(part[0].flip(0))  # noqa: E731  # short
        run.backward(batch, lambda output, part: nn.functional.cross_entropy(output, part[1]), forward=forward)
        optimizer.step()
        optimizer.zero_grad()
    digests = digest_tensors(run.state_dict())
    run.close()
    return digests


def test_a_layer_that_is_called_twice_adds_its_gradients_alike_on_every_number_of_ranks():
    """Autocast keeps the rounded copy of a parameter: where a rank held one shard, they were added in bf16."""
    assert run_ranks(call_twice, 2, TENSOR)[0] == run_ranks(call_twice, 1, {"strategy": "single"})[0]


@pytest.mark.slow
def test_another_number_of_shards_gives_other_bits():
    """The counter-check: what is compared depends on the shapes of matrices, and on the order of sums."""
    four, twelve = alone(4, "fp32", ("heads",))["heads"], alone(12, "fp32", ("heads",))["heads"]
    assert digest_tensors(four) != digest_tensors(twelve)


def go_on(world, directory, epochs, shards, **options):
    """Trains up to ``epochs`` from the newest checkpoint of the folder, and saves; the bits and the level."""
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    torch.manual_seed(1)
    job = JOBS["features"](torch.float32)
    given = {"directory": directory, "resume": "auto", "tensor": {"shards": shards}, **job.options, **options}
    run = Run(RunOptions.of(seed=3, threads=1, **given), world)
    _, optimizer = run.prepare(job.model, job.optimizer)
    for _ in run.epochs(epochs):
        for batch in run.batches(job.data):
            run.backward(batch, job.loss)
            optimizer.step()
            optimizer.zero_grad()
    run.save()
    digest, level = run.fingerprint(), run.strategy.level
    run.close()
    return digest, level


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks_and_not_with_other_shards(tmp_path):
    whole = run_ranks(go_on, 1, str(tmp_path / "whole"), 2, 4)[0]
    parts = str(tmp_path / "parts")
    run_ranks(partial(go_on, **TENSOR), 4, parts, 1, 4)
    with pytest.raises(CheckpointMismatch, match="tensor_shards: 4 there, 2 here"):
        run_ranks(partial(go_on, **TENSOR), 2, parts, 2, 2)
    assert run_ranks(partial(go_on, **TENSOR), 2, parts, 2, 4)[0] == whole == (whole[0], Level.BITWISE)


def freeze_for_a_while(world, frozen, options):
    """Digests of the parameters after four steps, in two of which layers are frozen; for each choice of them."""
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    digests = []
    for layers in frozen:
        torch.manual_seed(1)
        job = JOBS["features"](torch.float32)
        run = Run(RunOptions.of(seed=3, threads=1, **job.options, **options, tensor={"shards": 2}), world)
        model, optimizer = run.prepare(job.model, job.optimizer)
        for batch in run.batches(job.data):
            for layer in layers:
                model.get_submodule(layer).requires_grad_(run.position.step not in (1, 2))
            run.backward(batch, job.loss)
            optimizer.step()
            optimizer.zero_grad()
            if run.position.step == 3:
                break
        digests.append(digest_tensors(run.state_dict()))
        run.close()
    return digests


@pytest.mark.slow
def test_split_layers_that_are_frozen_after_prepare_are_not_trained():
    names = [name for name, each in JOBS["features"]().model.named_modules() if isinstance(each, nn.Linear)]
    frozen = [[], names[:1], names[1:2], names[:2]]
    expected = run_ranks(freeze_for_a_while, 1, frozen, {"strategy": "single"})[0]
    assert run_ranks(freeze_for_a_while, 2, frozen, TENSOR)[0] == expected
    assert all(each != expected[0] for each in expected[1:])


def test_without_shards_it_is_level_b(tmp_path):
    assert run_ranks(partial(go_on, **TENSOR), 2, str(tmp_path), 1, 0)[0][1] is Level.TOLERANCE
