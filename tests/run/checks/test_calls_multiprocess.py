"""Losses, metrics, data sets and scripts that learn the number of processes are named; their exchanges are refused."""

import linecache
import logging
import os
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from lockstep.errors import ConfigError
from lockstep.run import Run, RunOptions
from lockstep.run.checks import calls
from lockstep.runtime.lazy_compiler import postpone_compiler

WORLD = 1
RUNS = []


class Rows(Dataset):
    """Of pairs; ``change`` is called with each input."""

    def __init__(self, change=None):
        self.change = change
        self.x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.x[index] if self.change is None else self.change(self.x[index]), index % 4


class Scaled(nn.Module):
    """Multiplies by what a function gives, and has numbers of its own."""

    def __init__(self, factor=None, world_size=1):
        super().__init__()
        self.factor, self.world_size = factor, world_size

    def forward(self, x):
        return x * (self.factor() if self.factor else self.world_size)


def get_world_size():
    """As scripts have it."""
    return dist.get_world_size() if dist.is_initialized() else 1


def times_world(output, target):
    return F.cross_entropy(output, target) * get_world_size()


def by_environment(output, target):
    return F.cross_entropy(output, target) * int(os.environ.get("WORLD_SIZE", 1))


def by_variable(output, target):
    return F.cross_entropy(output, target) / WORLD


def by_run(output, target):
    return F.cross_entropy(output, target) * RUNS[0].world.world_size


class Trainer:
    """One of an installed package."""

    __module__ = "lightning.pytorch.trainer"

    def __init__(self):
        self.world_size = 2


TRAINER = Trainer()


def by_trainer(output, target):
    return F.cross_entropy(output, target) * TRAINER.world_size


class Gathering(nn.Module):
    """A loss with a number of processes of its own, as those of open_clip: 1 unless it is told otherwise."""

    def __init__(self, world_size):
        super().__init__()
        self.world_size = world_size

    def forward(self, output, target):
        return F.cross_entropy(output, target) * (2 if self.world_size == 2 else 1)


GATHERING, ALONE = Gathering(2), Gathering(1)


def by_attribute_of_loss(output, target):
    return GATHERING(output, target)


def of_one_process(output, target):
    return ALONE(output, target)


def boxes(output, target):
    """The loss of DETR divides by the mean number of boxes in the micro-batches of all processes."""
    count = torch.tensor(float(len(target)))
    dist.all_reduce(count)
    return F.cross_entropy(output, target, reduction="sum") / (count / dist.get_world_size())


def mean_logit(x):
    from torch.distributed.nn.functional import all_reduce  # with a gradient

    return all_reduce(x.mean()) * x


def hit(output, target):
    return (output.argmax(1) == target).float() * get_world_size()


def hit_by_run(output, target):
    return (output.argmax(1) == target).float() / RUNS[0].world.world_size


def scaled_by_variable(x):
    return x * WORLD


def times_size(x):
    return x * get_world_size()


def speaking(output, target):
    """Prints on rank 0 only, and chooses a device, as ordinary scripts do."""
    if dist.is_initialized() and dist.get_rank() == 0:
        print("loss", os.environ.get("LOCAL_RANK", "0"), torch.device("cpu"))
    return F.cross_entropy(output, target)


def listened():
    """A list that gets what is logged from now on, in place of those before."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lockstep").handlers[:] = [handler]
    return said


def train(world, strategy, loss=F.cross_entropy, layer=None, change=None, also=None, metric=None, evaluated=None):
    """The warnings."""
    postpone_compiler()
    said = listened()
    os.environ["WORLD_SIZE"] = str(world.world_size)
    options = {"global_batch": 12, "micro_batches": 3, "threads": 1, "strategy": strategy}
    run = Run(RunOptions.of(**options), world)
    globals()["WORLD"], RUNS[:] = world.world_size, [run]
    model = nn.Sequential(nn.Linear(6, 8), layer() if layer else nn.ReLU(), nn.Linear(8, 4))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = Rows(change)
    for _ in run.epochs(2):
        for batch in run.batches(data):
            run.backward(batch, loss, also=also)
            optimizer.step()
            optimizer.zero_grad()
        run.evaluate(Rows(), metric or F.cross_entropy)
        if evaluated:
            run.predict(Rows(), forward=lambda data: evaluated(model(data[0])), everywhere=True)
    run.close()
    if run.is_main and world.world_size > 1:
        print(f"{world.world_size} processes, {dist.get_world_size() * 24} samples")
    return said


def scaled_by_world():
    return Scaled(lambda: dist.get_world_size())


def scaled_by_attribute():
    return Scaled(world_size=2)


def scaled_by_mean():
    class Mean(nn.Module):
        def forward(self, x):
            return mean_logit(x)

    return Mean()


def scaled_by_other():
    return Scaled(world_size=7)


def scaled_sample(x):
    return x * int(os.environ["WORLD_SIZE"])


ASKING = (
    ("loss", times_world, "The forward pass or the loss asks", ": torch.distributed.get_world_size())"),
    ("loss", by_environment, "The forward pass or the loss asks", ": os.environ['WORLD_SIZE'])"),
    ("loss", by_run, "The forward pass or the loss asks", "(an attribute world_size)"),
    (
        "loss",
        by_trainer,
        "The forward pass or the loss asks",
        "(the attribute 'world_size' of the global variable",
    ),
    (
        "loss",
        by_attribute_of_loss,
        "The forward pass or the loss asks",
        "(the attribute 'world_size' of the global variable",
    ),
    ("loss", by_variable, "The forward pass or the loss asks", "(the global variable 'WORLD')"),
    ("layer", scaled_by_world, "The forward pass or the loss asks", ": torch.distributed.get_world_size())"),
    ("layer", scaled_by_attribute, "The forward pass or the loss asks", "(the attribute 'world_size' of 1)"),
    ("change", scaled_sample, "The data set asks", ": os.environ['WORLD_SIZE'])"),
    ("metric", hit, "The metric 'hit' asks", ": torch.distributed.get_world_size())"),
    ("metric", hit_by_run, "The metric 'hit_by_run' asks", ": run.world.world_size)"),
    (
        "evaluated",
        times_size,
        "The forward pass of an evaluation asks",
        ": torch.distributed.get_world_size())",
    ),
    ("change", scaled_by_variable, "The data set asks", ": WORLD)"),
    ("also", {"hits": hit}, "The metric 'hits' asks", ": torch.distributed.get_world_size())"),
)
ORDINARY = ({"loss": speaking}, {"loss": of_one_process}, {"layer": scaled_by_other})


def train_all(world, strategy, programs):
    """The messages on each program."""
    return [train(world, strategy, **program) for program in programs]


@pytest.mark.parametrize(
    ("strategy", "programs"),
    [
        ("ddp", ASKING[::2]),
        pytest.param("ddp", ASKING[1::2], marks=pytest.mark.slow),
        pytest.param("fsdp", ASKING, marks=pytest.mark.slow),
    ],
    ids=["ddp", "ddp, the others", "fsdp"],
)
def test_what_asks_for_the_number_of_processes_is_told_once_and_ordinary_programs_hear_nothing(strategy, programs):
    asking = [({name: value}, words) for name, value, *words in programs]
    everyone = run_ranks(train_all, 2, strategy, [*(program for program, _ in asking), *ORDINARY], timeout=300)
    asked = [[[each for each in said if " asks " in each] for said in found] for found in everyone]
    assert not any(asked[1]), "rank 0 speaks for all"
    for (program, words), told in zip(asking, asked[0], strict=False):
        assert len(told) == 1 and all(word in told[0] for word in words), (program, told)
        assert "(test_calls_multiprocess.py:" in told[0] or words[1].startswith("(")
    assert not any(asked[0][len(asking) :])


def test_a_stage_that_asks_for_its_rank_is_told():
    """Of those that compute the same there is no other to compare with."""
    (said,), _ = run_ranks(train_all, 2, "pipeline", [{"loss": speaking}])
    assert any("the loss asks" in each and ": torch.distributed.get_rank()" in each for each in said)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_an_exchange_in_a_loss_a_model_or_a_metric_is_refused_before_it_waits(strategy):
    """Three micro-batches on two processes: one has more than the other, which would wait for ever."""
    for program in ({"loss": boxes}, {"layer": scaled_by_mean}, {"metric": boxes}, {"evaluated": mean_logit}):
        with pytest.raises(ConfigError, match=r"all_reduce is called in .* \(test_calls_multiprocess\.py:\d+\)"):
            run_ranks(train_all, 2, strategy, [program])


SCRIPT = """
import torch
from torch import nn
WORLD = 2
def train(run, data):
    model = nn.Linear(6, 4)
    world_size = run.world.world_size
    optimizer = torch.optim.SGD(model.parameters(), lr={lr})
    fit(run, *run.prepare(model, optimizer), data)
    run.print(world_size, "processes", len(data) * world_size)
"""
FIT = """
def fit(run, model, optimizer, data):
    for epoch in run.epochs(1):
        for batch in run.batches(data):
            run.backward(batch, torch.nn.CrossEntropyLoss())
            optimizer.step()
            optimizer.zero_grad()
"""


SAID = ("computes settings", "share of these samples", "changes a loss of run.backward")


def run_script(world, text):
    """The messages on the settings of a script whose loop is in another file of the same name."""
    postpone_compiler()
    said, space = listened(), {"__name__": "script"}
    for file, code in (("script.py", text), ("loops/script.py", FIT)):
        linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
        exec(compile(code, file, "exec"), space)
    run = Run(RunOptions.of(global_batch=12, micro_batches=4, threads=1), world)
    space["train"](run, Rows())
    run.close()
    return [each for each in said if any(words in each for words in SAID)]


def run_scripts(world, texts):
    return [run_script(world, text) for text in texts]


LOOP = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
def train(run, data):
    model = nn.Linear(6, 4)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    every = 4 // run.world.world_size
    {before}
    for epoch in run.epochs(1):
        for number, batch in enumerate(run.batches(data)):
            run.backward(batch, nn.CrossEntropyLoss())
            {within}
            optimizer.zero_grad()
"""
STEPS = (
    ("pass", "if number % every == 0: optimizer.step()", "step=number % every == 0"),
    ("data = Subset(data, range(6 * every))", "optimizer.step()", "Subset=range(6 * every)"),
    ("torch.manual_seed(every)", "optimizer.step()", "manual_seed=4 // run.world.world_size"),
    ("pass", "dist.all_reduce(next(model.parameters()).grad)", ".grad=dist.all_reduce("),
    (
        "val_set = data; validation = DataLoader(val_set, 4, sampler=DistributedSampler(val_set, 2, 0))",
        "for x, _ in validation: model(x)",
        "script.py:11: Each rank evaluates, or counts, a share of these samples",
    ),
    (
        "val_set = data",
        "for i in range(run.world.rank, len(val_set), run.world.world_size): model(val_set[i][0])",
        "script.py:15: Each rank evaluates, or counts, a share of these samples",
    ),
    (
        "pass",
        "for part in batch.micro_batches: model(part.data[0])",
        "script.py:15: Each rank evaluates, or counts, a share of these samples",
    ),
    (
        "val = torch.ones(8, 6)",
        "model(val[run.world.rank :: run.world.world_size])",
        "script.py:15: Each rank evaluates, or counts, a share of these samples",
    ),
    (
        "pass",
        "print(run.backward(batch, nn.CrossEntropyLoss()) / run.world.world_size)",
        "script.py:15: Run.backward(batch, nn.CrossEntropyLoss()) / run.world.world_size changes a loss of run",
    ),
)


def test_a_learning_rate_by_the_number_of_processes_is_named_with_its_line():
    said, others = run_ranks(run_script, 2, SCRIPT.format(lr="0.1 * world_size"))
    assert len(said) == 1 and "(script.py:8: lr=0.1 * world_size)" in said[0]
    assert not others
    assert run_ranks(run_script, 1, SCRIPT.format(lr="0.1 * world_size")) == [[]]


WORDS = """
import torch
import lockstep
words = ["the", "winters", "shall", "besiege", "thy", "brow"] * 4
numbers = {word: number for number, word in enumerate(set(words))}
run = lockstep.init(global_batch=4, micro_batches=2)
model = torch.nn.Linear(2, 6)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.ones(24, 2), torch.tensor([numbers[word] for word in words]))
for batch in run.batches(data):
    run.backward(batch, torch.nn.functional.cross_entropy)
    optimizer.step()
    optimizer.zero_grad()
torch.linalg.lstsq(torch.eye(2), torch.ones(2, 1))
"""


@pytest.mark.parametrize(
    ("command", "seed", "is_told"),
    [
        ((sys.executable,), {}, True),
        pytest.param((sys.executable,), {"PYTHONHASHSEED": "0"}, False, marks=pytest.mark.slow),
        pytest.param(
            (sys.executable, "-m", "lockstep", "run", "--devices", "cpu:2"), {}, False, marks=pytest.mark.slow
        ),
    ],
)
def test_words_in_the_order_of_a_set_are_named_where_the_next_process_has_another_order(
    command, seed, is_told, tmp_path
):
    """A run that was resumed by ``python train.py`` gave the words other numbers, without a word."""
    (tmp_path / "train.py").write_text(WORDS)
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    result = subprocess.run(
        [*command, "train.py"], cwd=tmp_path, env=inherited | seed, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    said = "train.py:5: A set of anything but integers has another order in every process"
    assert (said in result.stdout + result.stderr) is is_told
    assert ("Sort it, or start the script by lockstep run" in result.stderr) is is_told
    assert "On a CPU, driver 'gelsy' reads memory that torch has not set" in result.stderr


@pytest.mark.slow
def test_steps_data_seeds_gradients_and_evaluations_by_the_number_of_processes_are_named_too():
    texts = [LOOP.format(before=before, within=within) for before, within, _ in STEPS]
    said, others = run_ranks(run_scripts, 2, texts)
    for (_, _, words), told in zip(STEPS, said):
        assert len(told) == 1 and words in told[0], (words, told)
    assert others == [[]] * len(STEPS)


COUNTING = """
from lockstep.runtime import Callback
class Seen(Callback):
    def __init__(self):
        self.seen = 0
    def on_micro_batch_end(self, micro_batch):
        self.seen += len(micro_batch)
"""


def count_in_callback(world):
    """The messages for a callback whose class is in a file of its own, as in a job."""
    said, space, file = listened(), {"__name__": "counting"}, "counting.py"
    linecache.cache[file] = (len(COUNTING), None, COUNTING.splitlines(keepends=True), file)
    exec(compile(COUNTING, file, "exec"), space)
    run = Run(RunOptions.of(global_batch=12, micro_batches=4, threads=1), world)
    run.add_callback(space["Seen"]())
    model = run.prepare(nn.Linear(6, 4))
    for batch in run.batches(Rows()):
        run.backward(batch, nn.CrossEntropyLoss())
        model.zero_grad()
    run.close()
    return [each for each in said if "share of these samples" in each]


def test_a_callback_of_another_file_that_counts_one_share_is_named():
    """A job printed what the callback of one process had counted, without a word."""
    said, others = run_ranks(count_in_callback, 2)
    assert len(said) == 1 and said[0].startswith("counting.py:7: Each rank evaluates, or counts, a share")
    assert not others


@pytest.mark.parametrize("lr", ["0.1", "0.1 * world_size)  # lockstep: ignore[LS068"])
def test_other_learning_rates_are_not(lr):
    text = SCRIPT.format(lr=lr).replace("ignore[LS068)", "ignore[LS068]")
    assert run_ranks(run_script, 2, text) == [[], []]


def counted(*given, **named):
    """Stands for a tool that counts the bytes of collectives."""
    return SUM(*given, **named)


SUM = dist.all_reduce


def summed(world):
    run = Run(RunOptions.of(global_batch=8, micro_batches=4, reduce="ring", shared_memory=False), world)
    model = nn.Linear(4, 2)
    dist.all_reduce = counted
    try:
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches(TensorDataset(torch.rand(16, 4), torch.zeros(16, dtype=torch.long))):
            run.backward(batch, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        return run.fingerprint()
    finally:
        dist.all_reduce = SUM


def test_a_tool_in_the_place_of_a_collective_is_not_taken_for_the_users_code():
    assert len(set(run_ranks(summed, 2))) == 1


@pytest.mark.parametrize("is_handling", [False, True])
def test_a_call_that_waits_in_a_finally_tells_of_the_error_behind_it(monkeypatch, caplog, is_handling):
    """``finally: run.save()`` after an error of one rank was told as a stall, a minute later, without the error."""
    monkeypatch.setattr(calls, "_PATIENCE", 0.01)
    monkeypatch.setattr(calls, "gather_json", lambda mine, *_: [time.sleep(0.3), [*mine[:2], 1], [*mine[:2], 2]][1:])
    with suppress(ValueError):
        try:
            if is_handling:
                raise ValueError("of one rank")
        finally:
            assert calls.gather_agreed(1, object(), None) == [1, 2]
    assert ("the error below is being handled here" in caplog.text) is is_handling
    assert ("ValueError: of one rank" in caplog.text) is is_handling
