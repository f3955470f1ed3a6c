"""Every strategy with every setting: a step is taken, or one sentence says why not, and the next one can be tried."""

import contextlib
import logging
import warnings
from itertools import product

import pytest
import torch
from tests.ranks import run_ranks
from tests.strategies.jobs import SmallResNet, photos, token_loss, tokens
from torch import nn

from lockstep.errors import LockstepError
from lockstep.models import transformer
from lockstep.run import Run, RunOptions
from lockstep.runtime.lazy_compiler import postpone_compiler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LAYOUTS = {
    "single": (1, {}),
    "dp": (1, {}),
    "layers": (1, {}),
    "ddp": (3, {}),
    "fsdp": (3, {}),
    "pipeline": (3, {}),
    "tensor": (2, {}),
    "parameter_server": (3, {}),
    **{mesh: (4, {"strategy": "hybrid", "mesh": mesh}) for mesh in ("data=2,pipeline=2", "fsdp=2,pipeline=2")},
    **{mesh: (4, {"strategy": "hybrid", "mesh": mesh}) for mesh in ("data=2,tensor=2",)},
    "data=2,layers=2": (2, {"strategy": "hybrid", "mesh": "data=2,layers=2"}),
}
SETTINGS = [
    *[{"reduce": reduce} for reduce in ("ring", "bf16", "powersgd")],
    *[{"precision": precision} for precision in ("tf32", "bf16", "fp16")],
    {"channels_last": True},
    {"sync_batch_norm": True},
    {"compile": True},
    {"micro_batches": 1},
    {"micro_batches": 5},
    {"fsdp": {"cpu_offload": True}},
    {"fsdp": {"mixed_precision": "bf16"}},
    {"fsdp": {"reshard_after_forward": False}},
    {"pipeline": {"schedule": "interleaved"}},
    {"tensor": {"plan": ("nothing=column",)}},
    {"running_buffers": ("nowhere",)},
    {"parameter_server": {"servers": 3}},
    {"layers": {"split": ("nowhere",)}},
    {"dp": {"replicas": 9}},
]
OPTIMIZERS = {"lbfgs": torch.optim.LBFGS, "adafactor": torch.optim.Adafactor, "adamw": torch.optim.AdamW}


class Unknown(nn.Module):
    """No chain, no plan, no more than one part."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 3))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images):
        return self.scale * (images.mean((2, 3)) @ self.weight.t())


MODELS = {
    "resnet": (SmallResNet, lambda: photos(40), nn.CrossEntropyLoss()),
    "tied": (
        lambda: transformer(vocabulary_size=13, max_length=7, width=16, depth=2, heads=2, tied=True),
        lambda: tokens(40),
        token_loss,
    ),
    "unknown": (Unknown, lambda: photos(40), nn.CrossEntropyLoss()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_combination_trains_or_is_refused_in_one_sentence(layout):
    world, _ = LAYOUTS[layout]
    everyone = run_ranks(try_all, world, layout, timeout=600)
    assert all(found == everyone[0] for found in everyone), "the ranks do not say the same"
    wrong = {case: said for case, said in everyone[0].items() if said.startswith("!")}
    assert not wrong, "\n".join(f"{case}: {said}" for case, said in wrong.items())


def cases(layout):
    given = LAYOUTS[layout][1]
    given = given or {"strategy": layout}
    for model, setting in product(MODELS, SETTINGS):
        if setting.get("compile") and "tensor" not in layout:
            continue  # it works, and takes minutes: tests/sameness/test_compiled.py
        yield f"{model} {setting}", model, {**given, **setting}, "adamw"
    for model, optimizer in product(MODELS, OPTIMIZERS):
        yield f"{model} {optimizer}", model, given, optimizer


def try_all(world, layout):
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    return {name: attempt(world, model, given, kind) for name, model, given, kind in cases(layout)}


def attempt(world, model, given, kind):
    """``trains``, or what was said; with an exclamation mark what no user should see."""
    torch.manual_seed(0)
    make, data, loss = MODELS[model]
    run = None
    try:
        module = make()
        options = {"global_batch": 20, "micro_batches": 10, "threads": 1, "timeout": 60.0, **given}
        run = Run(RunOptions.of(**options), world)
        module, optimizer = run.prepare(module, OPTIMIZERS[kind](module.parameters(), lr=0.01))
        for _ in run.epochs(1):
            for batch in run.batches(data()):
                run.backward(batch, loss)
                run.clip_gradients(1.0)
                optimizer.step()
                optimizer.zero_grad()
        return "trains"
    except LockstepError as error:
        return str(error) if len(str(error)) > 40 else f"! {error}"
    except Exception as error:
        return f"! {type(error).__name__}: {error}"
    finally:
        if run is not None:
            with contextlib.suppress(Exception):
                run.close()
