"""The bytes that a run says it sent, against arithmetic on a model whose sizes divide evenly."""

import logging

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.run import Run, RunOptions

pytestmark = pytest.mark.timeout(120)
STEPS, K, ROWS, WIDTH = 3, 8, 2, 512
SETTINGS = {"seed": 3, "threads": 1, "global_batch": K * ROWS, "micro_batches": K, "force_context": True}


def sent(world, strategy, options):
    """Bytes that a rank says it sent in the steps of one epoch, which an evaluation and predictions follow."""
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    middle = [nn.BatchNorm1d(WIDTH)] if strategy == "ddp" else []
    model = nn.Sequential(nn.Linear(8, WIDTH), *middle, nn.Linear(WIDTH, 4, bias=False))
    samples = STEPS * K * ROWS
    data = TensorDataset(torch.ones(samples, 8), torch.arange(samples) % 4)
    run = Run(RunOptions.of(**SETTINGS, strategy=strategy, **options), world)
    _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = run.strategy.bytes_sent
    for batch in run.batches(data):
        run.backward(batch, nn.CrossEntropyLoss())
        optimizer.step()
        optimizer.zero_grad()
    run.evaluate(data, nn.CrossEntropyLoss(reduction="none"))
    run.predict(data)
    found = run.strategy.bytes_sent - before
    run.close()
    return found


def test_fsdp_counts_the_parameters_it_gathers_beside_the_gradients():
    first, second = 9 * WIDTH * 4 // 2, 4 * WIDTH * 4 // 2
    # Of a micro-batch: all before the forward pass. The second layer is kept for backward, which needs no weight of the
    # first, whose input has no gradient.
    gathered, gradients = first + second, first + second
    assert run_ranks(sent, 2, "fsdp", {}) == [STEPS * (K // 2) * (gathered + gradients)] * 2


def test_pipeline_counts_activations_and_their_gradients_and_no_losses():
    activations = STEPS * K * ROWS * WIDTH * 4
    for found in run_ranks(sent, 2, "pipeline", {"pipeline": {"split": ["1"]}}):
        assert activations <= found < activations + STEPS * 2 * K * 8, "to describe tensors takes little, once"


def test_sharded_pipeline_counts_the_parameters_it_gathers_too():
    """A run of ``fsdp=2,pipeline=2`` said nothing of them, which are as many bytes as the gradients."""
    activations = STEPS * K // 2 * ROWS * WIDTH * 4
    options = {"mesh": "fsdp=2,pipeline=2", "pipeline": {"split": ["1"]}}
    for rank, found in enumerate(run_ranks(sent, 4, "hybrid", options)):
        gathered = gradients = (4 if rank % 2 else 9) * WIDTH * 4 // 2
        expected = activations + STEPS * (gathered + gradients)
        assert expected <= found < expected + 300, rank


def test_ddp_counts_the_statistics_of_sync_batch_norm_beside_the_gradients():
    """A run with ``sync_batch_norm`` said that it sent as much as one without."""
    plain, synchronised = (run_ranks(sent, 2, "ddp", {"sync_batch_norm": on}) for on in (False, True))
    forward, backward = 2 * WIDTH + 2, 2 * WIDTH + 1  # two numbers of each channel, the count, the number of the layer
    statistics = STEPS * (K // 2) * (forward + backward) * 8
    assert [found - before for found, before in zip(synchronised, plain)] == [statistics] * 2
