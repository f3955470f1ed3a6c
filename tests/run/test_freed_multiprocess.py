"""Memory of a closed run is freed: scripts that train several models, one after the other, need the memory of one."""

import gc
import weakref

import pytest
import torch
from tests.ranks import run_ranks
from tests.run.jobs import dataset, train_step
from torch import nn

import lockstep

LAYOUTS = [
    (1, "single", {}),
    (1, "dp", {"dp": {"replicas": 2}}),
    (1, "layers", {}),
    (2, "ddp", {}),
    (2, "fsdp", {}),
    (2, "pipeline", {}),
    (2, "parameter_server", {}),
    (2, "tensor", {}),
    (2, "hybrid", {"mesh": "data=2,layers=2"}),
]


def trained(strategy, options):
    """Weak references to what a training had, after it was closed."""
    run = lockstep.init(global_batch=16, micro_batches=4, seed=3, strategy=strategy, **options)
    layers = [nn.Linear(6, 40), nn.ReLU(), nn.Dropout(0.1), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = [run, model, optimizer, *model.parameters()]
    model, optimizer = run.prepare(model, optimizer)
    found += [model, optimizer, *model.parameters()]
    for _ in run.epochs(1):
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
    run.close()
    return {f"{number} {type(each).__name__}": weakref.ref(each) for number, each in enumerate(found)}


def left(world, strategy, options):
    """The names of its parts that are there still."""
    found = trained(strategy, options)
    gc.collect()
    return [name for name, each in found.items() if each() is not None]


@pytest.mark.parametrize(
    ("ranks", "strategy", "options"),
    [
        pytest.param(*each, marks=[pytest.mark.slow] * (each[1] not in ("single", "ddp", "fsdp", "pipeline")))
        for each in LAYOUTS
    ],
    ids=[each[1] for each in LAYOUTS],
)
def test_nothing_of_a_closed_run_is_kept(ranks, strategy, options):
    assert run_ranks(left, ranks, strategy, options) == [[]] * ranks
