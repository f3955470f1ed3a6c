"""A rank reads the samples that ``lockstep data`` names."""

import pytest
import torch
from tests.ranks import run_ranks
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from lockstep.config.job_file import Override, load_job
from lockstep.job import data_report
from lockstep.models import digits_net
from lockstep.run import Run

READS = []
"""Not of the data set: one that has changed is compared over the ranks again, which reads some samples."""


class Recorded(torch.utils.data.Dataset):
    """Fifteen pictures. With micro-batches of two the last is of one sample, which BatchNorm leaves out."""

    def __len__(self):
        return 15

    def __getitem__(self, index):
        READS.append(index)
        return torch.full((1, 8, 8), float(index)), index % 10


def job(**training):
    training |= {"global_batch": 8, "micro_batches": 4}
    return load_job(
        "digits",
        [Override(path=("training", key), value=value, origin="") for key, value in training.items()]
        + [Override(path=("run", "devices"), value="auto", origin="")],
    )


def reads_of_an_epoch(world, training):
    """The samples that this rank reads in each step of epoch 1, in order."""
    run, data, steps = Run(job(**training).run_options(None), world), Recorded(), []
    torch.manual_seed(0)
    model = digits_net(width=4)
    model, optimizer = run.prepare(model, SGD(model.parameters(), 0.01))
    for _ in run.epochs(2):
        steps = []
        for batch in run.batches(data):
            steps.append(list(READS))
            READS.clear()
            run.backward(batch, cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
    run.close()
    return steps


@pytest.mark.parametrize(
    ("ranks", "training"),
    [
        (3, {}),
        pytest.param(2, {"sync_batch_norm": True}, marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "fsdp"}, marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "pipeline"}, marks=pytest.mark.slow),
        pytest.param(4, {"strategy": "hybrid", "mesh": "data=2,pipeline=2"}, marks=pytest.mark.slow),
        pytest.param(1, {"strategy": "dp"}, marks=pytest.mark.slow),
        pytest.param(2, {"strategy": "tensor"}, marks=pytest.mark.slow),
        pytest.param(3, {"strategy": "parameter_server"}, marks=pytest.mark.slow),
        pytest.param(4, {"strategy": "hybrid", "mesh": "fsdp=2,pipeline=2"}, marks=pytest.mark.slow),
        pytest.param(4, {"strategy": "hybrid", "mesh": "tensor=2,data=2"}, marks=pytest.mark.slow),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_every_rank_reads_what_is_shown(ranks, training):
    found = run_ranks(reads_of_an_epoch, ranks, training)
    for position in range(2):
        facts = data_report.look_at_step(job(**training), Recorded(), ranks, epoch=1, position=position)
        assert facts.steps_per_epoch == 2 and facts.micro_batches == (4, 3)[position]
        shown = [[int(name) for names in reads.values() for name in names] for reads in facts.reads]
        assert shown == [steps[position] for steps in found]
