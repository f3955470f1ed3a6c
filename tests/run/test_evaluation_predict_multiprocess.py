"""``run.predict``: the output for every sample, each once and in order, with the same bits in every layout."""

import pytest
import torch
from tests.ranks import run_ranks
from tests.run.jobs import network
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler, default_collate

import lockstep
from lockstep.data import Bucketed, SkipBroken, Weighted
from lockstep.errors import ConfigError, RankError

SAMPLES = 53
QUICK = {
    "ddp": {},
    "fsdp": {"strategy": "fsdp"},
    "sharded stages": {"strategy": "hybrid", "mesh": "fsdp=2,pipeline=2"},
    "parameter server": {"strategy": "parameter_server"},
}
SLOW = {
    "pipeline": {"strategy": "pipeline"},
    "replicated stages": {"strategy": "hybrid", "mesh": "data=2,pipeline=2"},
    "asynchronous": {
        "strategy": "parameter_server",
        "parameter_server": {"mode": "asynchronous", "snapshot_every": 0},
    },
}


def inputs(samples=SAMPLES):
    return torch.randn(samples, 6, generator=torch.Generator().manual_seed(3))


class Alone(Dataset):
    """Inputs without targets."""

    def __init__(self, samples=SAMPLES):
        self.inputs = inputs(samples)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index]


def stages(layout):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    asynchronous = isinstance(layout.get("parameter_server"), dict)
    return (model, torch.optim.SGD(model.parameters(), lr=0.1)) if asynchronous else (model,)


def predicted(world, layouts):
    found = {}
    for name, layout in layouts.items():
        run = lockstep.init(**{"global_batch": 24, "micro_batches": 8, **layout})
        run.prepare(*stages(layout))
        pairs = TensorDataset(inputs(), torch.zeros(SAMPLES))
        found[name] = (
            run.predict(pairs),
            run.predict(Alone(), workers=1),
            run.predict(pairs, lambda output: output.argmax(1)),
            run.predict(Alone(2)),
            run.predict(pairs, everywhere=True),
        )
        run.close()
    return found


def by_hand():
    """The output of each micro-batch of three samples, computed without Lockstep."""
    (model, *_), parts = stages({}), inputs().split(3)
    model.eval()
    with torch.no_grad():
        return torch.cat([model(part.clone()) for part in parts]), model(inputs(2))


@pytest.mark.parametrize("layouts", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_every_layout_gives_the_bits_of_a_computation_by_hand(layouts):
    wanted, of_two = by_hand()
    first, *others = run_ranks(predicted, 4, layouts)
    for name in layouts:
        pairs, alone, best, two, _ = first[name]
        assert torch.equal(pairs, wanted) and torch.equal(alone, wanted), name
        assert all(torch.equal(each[name][4], wanted) for each in (first, *others)), name
        assert best.dtype == torch.int64 and torch.equal(best, wanted.argmax(1)), name
        assert torch.equal(two, of_two), name
        assert all(other[name][:4] == (None,) * 4 for other in others), name


def test_the_model_is_left_in_the_mode_that_it_had():
    run = lockstep.init(global_batch=24, micro_batches=8)
    model = run.prepare(network())
    model.train()
    assert run.predict(Alone()).shape == (SAMPLES, 3)
    assert all(module.training for module in model.modules())
    run.close()


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.uint8, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_with_its_values(dtype):
    run = lockstep.init(global_batch=24, micro_batches=8)
    run.prepare(network())
    values = (inputs() * 40).abs().to(dtype)
    found = run.predict(Alone(), lambda output: values[: len(output)])
    assert found.dtype == dtype and torch.equal(found[:3], values[:3])
    run.close()


def test_rows_are_in_the_order_of_the_data_set_where_it_is_read_in_another():
    """Those of ``Bucketed`` were in its own order, so that they were compared with other samples' labels."""
    run = lockstep.init(global_batch=24, micro_batches=8)
    run.prepare(network())
    pairs = TensorDataset(inputs(), torch.zeros(SAMPLES))
    lengths = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1))
    for data in (
        Bucketed(pairs, lengths, 4, collate=default_collate),
        SkipBroken(Bucketed(pairs, lengths, 4)),
    ):
        assert torch.allclose(run.predict(data), run.predict(pairs), atol=1e-6)
    drawn = DataLoader(pairs, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))
    for data in (Weighted(pairs, [1.0] * SAMPLES), drawn):
        with pytest.raises(ConfigError, match="was given one that draws samples"):
            run.predict(data)
    run.close()


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (lambda output: output.sum(), r"one row for each of the 3 samples .* a tensor of shape \[\]"),
        (lambda output: output[:2], r"a tensor of shape \[2, 3\]"),
        (lambda output: output.to_sparse(), r"was given a sparse, nested or quantized one\. Take"),
        (lambda output: {"logits": output}, r"was given dict\. Take the part to keep"),
        (lambda output: output.to(torch.complex64), r"others, of torch\.complex64\. Convert"),
        (lambda output: torch.full((len(output),), 2**53 + 1), r"up to 2\*\*53.*torch\.int64"),
        (
            lambda output: output[:, : len(output)],
            r"rows of torch\.float32 and shape \[2\], others .* shape \[3\]",
        ),
    ],
)
def test_what_cannot_be_kept_is_named(keep, message):
    run = lockstep.init(global_batch=24, micro_batches=8)
    run.prepare(network())
    with pytest.raises(ConfigError, match=message):
        run.predict(Alone(), keep)
    with pytest.raises(ConfigError, match="empty data set"):
        run.predict(Alone(0))
    run.close()


def test_outputs_that_are_lost_with_a_process_are_an_error(monkeypatch):
    run = lockstep.init(global_batch=24, micro_batches=8)
    run.prepare(network())
    gather = type(run.strategy).gather
    for lost_from, message in ((1, "micro-batch 0 are lost"), (2, "micro-batch 1 are lost")):
        calls = []

        def gathered(strategy, row, calls=calls, lost_from=lost_from):
            calls.append(row)
            return gather(strategy, row) * (len(calls) < lost_from)

        monkeypatch.setattr(type(run.strategy), "gather", gathered)
        with pytest.raises(RankError, match=message):
            run.predict(Alone())
    run.close()
