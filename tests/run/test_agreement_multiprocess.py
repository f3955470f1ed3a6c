"""Ranks that were told different things, or that drift apart, are named."""

import logging

import pytest
import torch
from tests.ranks import run_ranks
from tests.run.jobs import begin, dataset, network, train_step
from torch import nn

from lockstep.errors import ConfigError, NonFiniteError, ReplicaError


def messages(body, world_size, *args):
    """What each rank's ``body`` raised; every rank must have raised, or the world would wait."""
    return run_ranks(body, world_size, *args)


def told_otherwise(world, what):
    other = world.rank == 2
    try:
        if what == "seed":
            begin(seed=1 if other else 0)
        elif what == "reduce":
            begin(reduce="ring" if other else "ordered")
        elif what == "lr":
            begin(lr=0.2 if other else 0.1)
        elif what == "model":
            begin(nn.Sequential(*network()[:4], nn.Linear(8, 4 if other else 3)))
        elif what == "frozen":
            model = network()
            model[0].bias.requires_grad_(not other)
            begin(model)
        elif what == "samples":
            run, *_ = begin()
            next(iter(run.batches(dataset(77 if other else 53))))
    except ConfigError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("seed", "seed: 0 on ranks 0, 1; 1 on rank 2"),
        ("reduce", "reduce: ordered on ranks 0, 1; ring on rank 2"),
        ("lr", "lr of optimizer 0, group 0: 0.1 on ranks 0, 1; 0.2 on rank 2"),
        ("model", "'4.weight': (3, 8) torch.float32 on ranks 0, 1; (4, 8) torch.float32 on rank 2"),
        ("frozen", "'0.bias': (8,) torch.float32 on ranks 0, 1; (8,) torch.float32 fixed on rank 2"),
        ("samples", "samples: 53 on ranks 0, 1; 77 on rank 2"),
    ],
)
@pytest.mark.fault("S5", "C2", "C3", "C5")
def test_what_differs_is_named_on_every_rank(what, said):
    for message in run_ranks(told_otherwise, 3, what):
        assert said in message


def other_values(world):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("lockstep").addHandler(handler)
    run, _, optimizer = begin(network(seed=world.rank))
    for batch in run.batches(dataset()):
        train_step(run, batch, optimizer)
    return run.fingerprint(), [record for record in records if "began with different values" in record]


def test_other_initial_values_become_rank_0s_with_a_warning():
    results = run_ranks(other_values, 3)
    assert {result[0] for result in results} == {run_ranks(other_values, 1)[0][0]}
    assert "4 of 9 tensors (0.bias, 0.weight, 4.bias, 4.weight)" in results[0][1][0]


def drifting(world, what):
    run, model, optimizer = begin(fingerprint_every=2)
    try:
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
            if batch.plan.step == 0 and world.rank == 1:
                if what == "parameter":
                    with torch.no_grad():
                        model[4].weight.view(torch.int32)[0, 0] ^= 1
                else:
                    optimizer.param_groups[0]["lr"] = 0.05
    except ReplicaError as error:
        return str(error), run.position.step
    return "nothing", run.position.step


@pytest.mark.parametrize(
    ("what", "name"),
    [("parameter", "4.weight"), ("lr", "<lr of optimizer 0, group 0>' is 0.1 on ranks 0, 2; 0.05 on rank 1")],
)
@pytest.mark.fault("C4", "C7", "M3")
def test_a_replica_that_drifts_is_found_at_the_next_comparison(what, name):
    for message, step in run_ranks(drifting, 3, what):
        assert step == 2
        assert name in message
        assert "on ranks 0, 2" in message


def poisoned(world, directory):
    data = dataset()
    data.tensors[0][30] = float("inf")
    run, _, optimizer = begin(directory=directory)
    try:
        for batch in run.batches(data, shuffle=False):
            train_step(run, batch, optimizer)
            run.save()
    except NonFiniteError as error:
        return str(error), error.exit_code, run.position.step
    return "nothing"


@pytest.mark.fault("D6")
def test_every_rank_names_the_sample_whose_loss_is_not_finite(tmp_path):
    results = run_ranks(poisoned, 3, str(tmp_path))
    assert len({message for message, *_ in results}) == 1
    message, code, step = results[0]
    assert (code, step) == (6, 1)
    assert "loss of step 1 is nan in micro-batch 2 (samples 30, 31, 32)" in message
    assert [path.name for path in tmp_path.iterdir() if "2" in path.name] == [], "the step was not saved"
