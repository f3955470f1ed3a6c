"""Models that are built without values: the same start under every strategy and on any number of processes."""

import gc
from functools import partial

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.errors import ConfigError
from lockstep.run import Run, RunOptions

pytestmark = pytest.mark.timeout(300)
WIDTH = 40
HYBRID = {"mesh": "fsdp=2,pipeline=2"}


class Decoder(nn.Module):
    """Tied weights, a parameter of its own, a buffer and a way of its own to initialise, as nanoGPT has them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.place = nn.Parameter(torch.randn(3, WIDTH) * 0.1)
        self.blocks = nn.Sequential(*(self.block() for _ in range(3)))
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([0.5]))
        self.apply(self.initialise)

    def block(self):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))

    def initialise(self, module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.2)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens) + self.place) * self.scale).mean(1)


class Chain(nn.Sequential):
    """Modules in a row, for a pipeline."""

    def __init__(self):
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(3), nn.Dropout(0.1)) for _ in range(3))
        super().__init__(nn.Embedding(7, WIDTH), *blocks, nn.Flatten(), nn.Linear(3 * WIDTH, 7))
        nn.init.normal_(self[0].weight, std=0.2)


def prepare(world, strategy, build=Decoder, **more):
    if world.world_size == 1:
        strategy, more = "single", {key: value for key, value in more.items() if key != "mesh"}
    run = Run(RunOptions.of(global_batch=8, micro_batches=4, threads=1, strategy=strategy, seed=5, **more), world)
    with run.empty_model():
        model = build()
    assert all(each.is_meta for each in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return run, *run.prepare(model, optimizer)


def train(world, strategy, build=Decoder, folder=None, epochs=2, **more):
    run, _, optimizer = prepare(world, strategy, build, directory=folder, resume="auto" if folder else "", **more)
    found = [run.fingerprint()]
    tokens = torch.arange(48).view(16, 3) * 5 % 7
    for _ in run.epochs(epochs):
        for batch in run.batches(TensorDataset(tokens, tokens[:, 0])):
            run.backward(batch, nn.CrossEntropyLoss())
            optimizer.step()
            optimizer.zero_grad()
        if folder:
            run.save(wait=True)
    found.append(run.fingerprint())
    run.close()
    return found


@pytest.fixture(scope="module")
def alone():
    return run_ranks(train, 1, "single")[0]


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("fsdp", 3), *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("fsdp", "ddp"))],
)
def test_start_and_training_have_the_bits_of_one_process(strategy, ranks, alone):
    assert run_ranks(train, ranks, strategy) == [alone] * ranks


@pytest.mark.parametrize(
    ("strategy", "ranks", "more"),
    [("pipeline", 2, {}), pytest.param("hybrid", 4, HYBRID, marks=pytest.mark.slow)],
)
def test_stages_have_the_bits_of_one_process(strategy, ranks, more):
    alone = run_ranks(train, 1, "single", Chain)[0]
    assert run_ranks(partial(train, **more), ranks, strategy, Chain) == [alone] * ranks


@pytest.mark.slow
def test_a_checkpoint_is_loaded_into_a_model_without_values(tmp_path, alone):
    run_ranks(train, 3, "fsdp", Decoder, str(tmp_path), 1)
    assert [each[-1] for each in run_ranks(train, 2, "fsdp", Decoder, str(tmp_path))] == [alone[-1]] * 2


def peak_of_start(world):
    """The most bytes of float32 that a rank has when a parameter has got its values."""
    seen = []

    class Watched(nn.Linear):
        def __init__(self):
            super().__init__(256, 256, bias=False)

    run = Run(RunOptions.of(global_batch=8, micro_batches=4, threads=1, strategy="fsdp"), world)
    with run.empty_model():
        model = nn.Sequential(*(Watched() for _ in range(12)))
    fill = run._initial_values.fill

    def watched(named, device):
        fill(named, device)
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
        kept = [each.untyped_storage() for each in tensors if each.dtype == torch.float32 and not each.is_meta]
        seen.append(sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values()))

    run._initial_values.fill = watched
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.close()
    return max(seen)


def test_a_process_holds_its_part_and_one_whole_parameter():
    one = 256 * 256 * 4
    for peak in run_ranks(peak_of_start, 4):
        assert one <= peak <= 12 * one // 4 + 2 * one


def build_otherwise(world):
    run = Run(RunOptions.of(global_batch=8, micro_batches=4, threads=1, strategy="fsdp"), world)
    with run.empty_model():
        model = nn.Linear(3, 4)
        nn.init.constant_(model.bias, float(world.rank))
    with pytest.raises(ConfigError, match="initial values: ") as raised:
        run.prepare(model)
    run.close()
    return str(raised.value)


def test_ranks_that_build_otherwise_are_refused():
    told = run_ranks(build_otherwise, 2)[0]
    assert "different settings" in told and "Give all ranks one value" in told


def test_a_model_on_the_device_meta_is_refused_with_the_line_to_write():
    run = Run(RunOptions.of(global_batch=8, threads=1))
    with pytest.raises(ConfigError, match=r"'weight' is on the device 'meta'.*with run\.empty_model\(\)"):
        run.prepare(nn.Linear(3, 4, device="meta"))
