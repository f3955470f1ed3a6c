"""Compiled models under every layout: the bits of ``single``, or a refusal. Compiles, so ``make test-all`` runs it."""

import shutil

import pytest
import torch
from tests.ranks import run_ranks
from tests.sameness.layouts import outcomes, require_ends
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import ConfigError
from lockstep.run import Run, RunOptions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # the first that compiles finds no graph in torch's cache
    pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler (apt-get install g++)"),
]
WIDTH = 40
AS_ONE = "the model is compiled as one"
NO_CHAIN = "the model is not a chain of modules"
WITH_HOOKS = "compiles a call with the hooks around it"


class Block(nn.Module):
    """Draws, has a shortcut, and more parameters than ``fsdp`` leaves to the rest."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))


def chained():
    return nn.Sequential(nn.Linear(6, WIDTH), Block(), nn.Dropout(0.1), Block(), nn.Linear(WIDTH, 3))


class Listed(nn.Module):
    """Blocks that are recomputed in backward, one of them used twice, two with one weight."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[2].up.weight = self.blocks[0].up.weight

    def forward(self, x):
        x = self.embed(x)
        for block in (*self.blocks, self.blocks[1]):
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def normalized():
    """Has no blocks, so that it is compiled as one."""
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
    return nn.Sequential(nn.Linear(6, WIDTH), inner, nn.Dropout(0.2), nn.Linear(WIDTH, 3))


def trained(model, settings, samples=48, epochs=1):
    run = lockstep.init(global_batch=16, micro_batches=4, seed=3, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = run.prepare(model, optimizer)
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 6, generator=numbers)
    data = torch.utils.data.TensorDataset(inputs, torch.randint(0, 3, (samples,), generator=numbers))
    for _ in run.epochs(epochs):
        for batch in run.batches(data, shuffle=True):
            run.backward(batch, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        found = run.evaluate(data, {"loss": nn.functional.cross_entropy})
    digest = run.fingerprint()
    run.close()
    return {
        "evaluated": torch.tensor(found["loss"], dtype=torch.float64),
        "digest": torch.tensor(list(digest.encode())),
    }


def seeded(make):
    """A model in a process that has compiled nothing, as a user's would be."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    return make()


def chain(world, settings):
    return trained(seeded(chained), {"compile": True, **settings})


def chain_in_bf16(world, settings):
    return trained(seeded(chained), {"compile": True, "precision": "bf16", **settings})


def chain_partly_frozen(world, settings):
    model = seeded(chained)
    model[1].up.weight.requires_grad_(False)
    model[3].requires_grad_(False)
    return trained(model, {"compile": True, **settings})


def chain_with_hooks(world, settings):
    """torch gives blocks with hooks the graph of those without, which were compiled first."""
    model = seeded(chained)
    model[3].up.register_forward_hook(lambda module, inputs, output: output * 1.5)
    model[3].down.weight.register_hook(lambda gradient: gradient * 2)
    return trained(model, {"compile": True, **settings})


def listed(world, settings):
    return trained(seeded(Listed), {"compile": True, **settings})


def without_blocks(world, settings):
    return trained(seeded(normalized), {"compile": True, **settings})


def layer_by_hand(world, settings):
    model = seeded(chained)
    model[1] = torch.compile(model[1])
    return trained(model, settings)


def whole_by_hand(world, settings):
    return trained(torch.compile(seeded(chained)), settings)


def several_shapes_by_hand(world, settings):
    model = seeded(chained)
    model[3] = torch.compile(model[3])
    return trained(model, settings, samples=45, epochs=3)


def method_of_a_layer(world, settings):
    model = seeded(chained)
    model[1].compile()
    return trained(model, settings)


PROGRAMS = [
    chain,
    chain_in_bf16,
    chain_partly_frozen,
    chain_with_hooks,
    listed,
    without_blocks,
    layer_by_hand,
    whole_by_hand,
    several_shapes_by_hand,
    method_of_a_layer,
]
IN_PARTS = {without_blocks: AS_ONE, whole_by_hand: AS_ONE, listed: NO_CHAIN}
REFUSED = {
    "layers": IN_PARTS,
    "fsdp": {method_of_a_layer: WITH_HOOKS},
    "fsdp-3": {method_of_a_layer: WITH_HOOKS},
    "pipeline": IN_PARTS,
    "data-pipeline": IN_PARTS,
    "fsdp-pipeline": IN_PARTS,
}


@pytest.fixture(scope="module")
def alone():
    return outcomes(PROGRAMS, "single", timeout=500)


@pytest.mark.parametrize(
    "layout",
    [
        "dp",
        "layers",
        "ddp",
        "server",
        "servers",
        "fsdp",
        "fsdp-3",
        "pipeline",
        "data-pipeline",
        "fsdp-pipeline",
    ],
)
def test_compiled_models_have_the_bits_of_one_device(alone, layout):
    found = outcomes(PROGRAMS, layout, timeout=500)
    require_ends(PROGRAMS, alone, found, layout, REFUSED.get(layout, {}))


def eager_or_compiled(compiled):
    """``chain_with_hooks`` without its dropouts, which draw other numbers where they are compiled."""
    model = seeded(chained)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model[3].up.register_forward_hook(lambda module, inputs, output: output * 1.5)
    return trained(model, {"compile": compiled})["evaluated"]


def both(world):
    return eager_or_compiled(False), eager_or_compiled(True)


def test_a_hook_in_one_of_several_equal_blocks_runs_in_compiled_code():
    ((eager, compiled),) = run_ranks(both, 1, timeout=300)
    torch.testing.assert_close(eager, compiled, rtol=1e-5, atol=1e-5)


def many_shapes(world):
    model = seeded(chained)
    model[1] = torch.compile(model[1])
    run = lockstep.init(global_batch=12, micro_batches=1)
    model = run.prepare(model)
    for rows in range(1, 12):
        data = torch.utils.data.TensorDataset(torch.zeros(rows, 6), torch.zeros(rows, dtype=torch.int64))
        run.evaluate(data, nn.functional.cross_entropy)


def test_more_graphs_than_torch_keeps_are_refused_in_a_sentence():
    with pytest.raises(ConfigError, match=r"more came than torch keeps of one function \(8\)"):
        run_ranks(many_shapes, 1, timeout=300)


def compiled_step(world, settings, compiled):
    """A step of the loop that the user has compiled, with an optimizer and a schedule."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = Run(RunOptions.of(global_batch=8, micro_batches=4, threads=1, **settings), world)
    model, optimizer = run.prepare(model, optimizer)

    def step(batch):
        loss = run.backward(batch, nn.functional.cross_entropy)
        norm = run.clip_gradients(0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss + norm

    step = torch.compile(step, backend="eager") if compiled else step
    data = torch.utils.data.TensorDataset(torch.randn(24, 6), torch.arange(24) % 4)
    values = [float(step(batch)).hex() for _ in run.epochs(1) for batch in run.batches(data)]
    found = values, run.fingerprint()
    run.close()
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline", "parameter_server"])
def test_a_step_of_the_loop_may_be_compiled(strategy):
    (expected,) = run_ranks(compiled_step, 1, {"strategy": "single"}, False, timeout=100)
    assert run_ranks(compiled_step, 2, {"strategy": strategy}, True, timeout=100)[0] == expected
