"""``lockstep verify --script`` on scripts as people have them: with a run of Lockstep's, or with a Recorder."""

import json
from pathlib import Path

import pytest

OWN_LOOP = (Path(__file__).parents[2] / "examples" / "02_lockstep.py").read_text()
PLAIN = """
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lockstep.verify import Recorder

dist.init_process_group("gloo")
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
data = TensorDataset(torch.arange(64), torch.randn(64, 12), torch.randint(0, 4, (64,)))
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
network = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sampler = DistributedSampler(data, world_size, rank)
loader = DataLoader(data, batch_size=16 // world_size, sampler=sampler)
recorder = Recorder("records", model, optimizer)
for epoch in range(3):
    if "--forget" not in sys.argv:
        sampler.set_epoch(epoch)
    for indices, x, y in loader:
        losses = cross_entropy(network(x), y, reduction="none")
        optimizer.zero_grad()
        loss = losses.mean() / (world_size if "--divide" in sys.argv else 1)
        loss.backward()
        recorder.batch(samples=indices, inputs=x, losses=losses)
        optimizer.step()
        recorder.step()
    print("the script's own output", epoch)
dist.destroy_process_group()
"""


@pytest.fixture
def verified(process, tmp_path):
    def run(text, *arguments, devices="2", steps="6", more=()):
        (tmp_path / "own.py").write_text(text)
        options = ("--devices", devices, "--steps", steps, "--json", "found.json", *more)
        result = process("verify", *options, "--script", "own.py", *arguments)
        found = tmp_path / "found.json"
        return result, json.loads(found.read_text()) if found.exists() else []

    return run


@pytest.mark.slow
def test_an_own_loop_has_equal_bits_and_leaves_nothing_behind(verified, tmp_path):
    text = OWN_LOOP.replace("global_batch=128)", "global_batch=128, directory='runs/own', resume='auto')")
    text = text.replace("scheduler.step()", "scheduler.step()\n        run.save()")
    result, found = verified(text, steps="2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert [(each["layout"], each["reached"]) for each in found] == [("1 process", "A"), ("2 processes", "A")]
    assert found[1]["strategy"] == "ddp"
    assert found[1]["sent"] > 0
    assert not (tmp_path / "runs").exists()


LOSING = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

torch.manual_seed(0)
data, model = TensorDataset(torch.randn(64, 12), torch.randint(0, 4, (64,))), nn.Linear(12, 4)
run = lockstep.init(global_batch=16, micro_batches=4)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
weight, seen = WEIGHT, 0


def loss(output, target):
    return weight * nn.functional.cross_entropy(output, target)


for epoch in run.epochs(3):
    for batch in run.batches(data):
        run.backward(batch, loss)
        optimizer.step()
        optimizer.zero_grad()
        weight *= 0.9
        run.extra["weight"] = weight
        seen += 16
print(seen)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weight", "code", "reached", "said"),
    [
        pytest.param(
            "1.0",
            1,
            "",
            "The loss or the model reads weight, which the loop changes",
            marks=pytest.mark.slow,  # in make test: sameness/test_loop_draws
        ),
        (
            "run.extra.get('weight', 1.0)",
            0,
            "A",
            "that are not what they were at the checkpoint: seen (0, was 48)",
        ),
    ],
)
def test_what_a_stop_loses_is_found_before_it_is_lost(verified, weight, code, reached, said):
    """A weight that the loop changes and the loss reads is refused unless it is kept; a count is named."""
    text = LOSING.replace("WEIGHT", weight)
    result, (_, found) = verified(text, more=("--stop-after", "3"), devices="1")
    assert (found["layout"], result.returncode) == ("1 process, then 1 process", code), result.stderr
    assert found["reached"] == reached
    assert said in result.stdout


AHEAD = """
import torch, lockstep
from torch import nn
torch.manual_seed(0)
run = lockstep.init(global_batch=16, micro_batches=4, seed=1, directory="runs", resume="auto")
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.arange(64) % 3)
for _ in run.epochs(3):
    batches = iter(run.batches(data))
    batch = next(batches, None)
    while batch is not None:
        run.backward(batch, nn.functional.cross_entropy)
        following = next(batches, None)
        optimizer.step()
        optimizer.zero_grad()
        batch = following
    run.save()
"""


@pytest.mark.slow
def test_a_loop_that_takes_the_next_batch_before_it_updates_goes_on_with_equal_bits(verified):
    """Its steps were recorded before they had ended: "differs by 0.0e+00", with level B."""
    result, found = verified(AHEAD, steps="8", more=("--stop-after", "2"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert [each["reached"] for each in found] == ["A"] * 4


@pytest.mark.slow
def test_an_own_loop_goes_on_in_every_layout_with_equal_bits(verified):
    result, found = verified(OWN_LOOP, devices="2,4", steps="8", more=("--stop-after", "3"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert [(each["layout"], each["reached"]) for each in found[3:]] == [
        ("1 process, then 2 processes", "A"),
        ("2 processes, then 4 processes", "A"),
        ("4 processes, then 1 process", "A"),
    ]
    result, _ = verified(PLAIN, more=("--stop-after", "3"))
    assert result.returncode == 2
    assert "--stop-after is for loops on lockstep.init" in result.stderr
    short = LOSING.replace("WEIGHT", "1.0").replace("epochs(3)", "epochs(1)")
    result, _ = verified(short, devices="1", more=("--stop-after", "4"))
    assert "--stop-after is 4, and the run has 4 steps. Give a smaller number." in result.stderr


@pytest.mark.slow
def test_a_plain_loop_is_told_its_mistake(verified, tmp_path):
    result, (_, found) = verified(PLAIN, "--divide")
    assert result.returncode == 1, result.stdout + result.stderr
    assert (found["cause"], found["step"], found["reached"]) == ("gradient_scale", 0, "-")
    assert "all are 0.5 times as large: divided by the number of ranks twice, in a world of 2" in result.stdout
    assert "own output" not in result.stdout
    assert not (tmp_path / "records").exists()


@pytest.mark.slow
def test_a_sound_plain_loop_differs_by_rounding(verified):
    result, found = verified(PLAIN, devices="2,4")
    assert result.returncode == 0, result.stdout + result.stderr
    assert [each["reached"] for each in found] == ["A", "B", "B"]
    assert {each["cause"] for each in found[1:]} == {"reduction_order"}


@pytest.mark.slow
def test_a_forgotten_epoch_is_found_although_one_process_forgets_it_too(verified):
    result, (_, found) = verified(PLAIN, "--forget")
    assert result.returncode == 1
    assert (found["cause"], found["step"]) == ("epochs", 4)


@pytest.mark.slow
def test_a_script_that_fails_says_so(verified):
    result, _ = verified("raise ValueError('no data')")
    assert result.returncode == 2
    assert "rank 0 failed first" in result.stderr
    assert "ValueError: no data" in result.stderr
    result, _ = verified("print(1)")
    assert result.returncode == 2
    assert "finished no step that was recorded" in result.stderr
    result, _ = verified(PLAIN.replace("recorder = ", "assert world_size == 1\nrecorder = "), steps="2")
    assert result.returncode == 1
    assert "2 processes did not run" in result.stdout


def test_mistakes_are_refused_in_a_sentence(command):
    for arguments, said in (
        (("--script",), "--script needs a script"),
        (("--script", "nowhere.py"), "is not a file"),
        (("digits", "--script", __file__), "The job 'digits' and a script"),
        (("--strategies", "ddp", "--script", "nowhere.py"), "--strategies is for jobs"),
        (("--micro-batches", "8"), "--micro-batches '8' is not a list of two or more numbers"),
        (("--micro-batches", "1,8", "--devices", "2"), "leave out --devices"),
        (("--threads", "two", "--script", __file__), "'two' is not a number"),
        (("--stop-after", "12"), "--stop-after is 12, and must be a number from 1 to 11"),
        (("--stop-after", "late", "--script", __file__), "--stop-after is late, and must be a number"),
        (("--stop-after", "2", "--micro-batches", "1,8"), "leave out --stop-after"),
    ):
        status, _, errors = command("verify", *arguments)
        assert status == 2
        assert said in errors
        assert len(errors.splitlines()) == 1


@pytest.mark.slow
def test_a_job_in_several_micro_batches_has_its_cause_and_exit_code(process, tmp_path):
    result = process("verify", "digits", "--micro-batches", "1,3,8", "--json", "found.json")
    assert result.returncode == 1, result.stdout + result.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [each["cause"] for each in found] == ["", "refused", "batch_norm"]
    sound = process("verify", "digits", "--micro-batches", "1,8", "--set", "training.sync_batch_norm=true")
    assert sound.returncode == 0, sound.stdout + sound.stderr
    assert "equal but for rounding" in sound.stdout


CLASSES = """
import torch
import lockstep

names = ["rose", "tulip", "daisy", "sunflower", "lily", "iris", "poppy", "aster"]
numbers = {name: number for number, name in enumerate(set(names))}
run = lockstep.init(global_batch=16, micro_batches=4, seed=1)
model = torch.nn.Linear(8, 8)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
labels = torch.tensor([numbers[names[n % 8]] for n in range(96)])
data = torch.utils.data.TensorDataset(torch.randn(96, 8), labels)
for _ in run.epochs(1):
    for batch in run.batches(data):
        run.backward(batch, torch.nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
def test_classes_in_the_order_of_a_set_are_found_although_a_launch_gives_sets_one_order(verified):
    result, _ = verified(CLASSES)
    assert result.returncode == 1
    assert "the order of a set of strings, which differs from run to run" in result.stdout
