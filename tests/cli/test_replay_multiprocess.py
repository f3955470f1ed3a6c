"""``lockstep replay`` of runs that several ranks made: on one device, in this process, in a debugger."""

import bdb
import json
import platform
import shutil
import subprocess
import sys

import pytest
from tests.ranks import run_ranks

from lockstep.cli import main
from lockstep.config.job_file import parse_set
from lockstep.job import load_job
from lockstep.job.assemble import assemble
from lockstep.job.rank import record
from lockstep.job.run_folder import choose_run_folder, run_folder

pytestmark = [
    # fp16 finds its loss scale by skipping the first steps, and torch then takes the scheduler for too early
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
]
RANKS = {"ddp": "rank 1", "fsdp": "rank 1", "pipeline": "ranks 0, 1"}
LOCKSTEP = (sys.executable, "-m", "lockstep")
JOB = """
[model]
target = "replayed_parts:model"

[weights]
path = "start.safetensors"

[data.train]
target = "replayed_parts:Dimmed"
split = "validation"

[loss]
target = "replayed_parts:Loss"

[optimizer]
target = "torch.optim:AdamW"
lr = 0.003

[schedule]
kind = "cosine"

[training]
epochs = 1
global_batch = 32
micro_batches = 8
precision = "fp16"
clip_norm = 0.5
gradients_every = 3
record_micro_batches = true

[data]
workers = 0

[checkpoint]
every_steps = 4
keep = 100

[log]
tensorboard = false
progress = false
"""

PARTS = """\
import threading
from pathlib import Path

from torch import nn
from lockstep.data import Digits

HERE = Path(__file__).parent

class Activation(nn.ReLU):
    def forward(self, hidden):
        return super().forward(hidden)  # in the model

def model():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), Activation(), nn.Dropout(0.2), nn.Linear(32, 10)
    )

class Dimmed(Digits):
    '''Images that are as bright as a file says.'''
    get_batch = None
    brightness = float((HERE / "brightness").read_text())

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image * float((HERE / "brightness").read_text()), label  # in the data set

class Loss(nn.CrossEntropyLoss):
    '''Smoothed as much as a file says.'''
    def __init__(self):
        super().__init__(label_smoothing=float((HERE / "smoothing").read_text()))

    def forward(self, output, target):
        in_main_thread = threading.current_thread() is threading.main_thread()
        return super().forward(output, target)  # in the loss
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A job's folder with runs of it by three strategies on two ranks; the last is one of the command line."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "job.toml").write_text(JOB)
    (folder / "replayed_parts.py").write_text(PARTS)
    (folder / "brightness").write_text("1.0")
    (folder / "smoothing").write_text("0.1")
    run_ranks(_write_weights, 1, folder)
    for strategy in ("ddp", "fsdp"):
        train(folder, strategy, 2)
    command = [*LOCKSTEP, "train", "job.toml", "--devices", "cpu:2", "--strategy", "pipeline"]
    trained = subprocess.run(
        [*command, "--set", "run.name=pipeline"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert trained.returncode == 0, trained.stderr
    return folder


_EXPECTED = ("imports: replayed_parts from ", "BatchNorm '2' normalises each micro-batch by itself")


def unexpected(errors):
    """The lines of stderr, but for those on imports of the user's modules, and on the model's BatchNorm."""
    lines = errors.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(_EXPECTED))


@pytest.fixture
def replay(home, monkeypatch, capsys):
    """``lockstep replay`` in this process, from the job's folder."""
    monkeypatch.chdir(home)

    def run(name, *arguments):
        status = main(["replay", f"runs/{name}", *map(str, arguments)])
        told = capsys.readouterr()
        return status, told.out + unexpected(told.err)

    yield run
    sys.modules.pop("replayed_parts", None)


@pytest.fixture
def changed(home):
    """Changes a file of the job's folder until the test is over."""
    kept = {}

    def change(name, content):
        kept[name] = (home / name).read_bytes()
        (home / name).write_bytes(content)

    yield change
    for name, content in kept.items():
        (home / name).write_bytes(content)


def train(folder, strategy, ranks, **more):
    """A run of the job, named after its strategy, by ranks of this test session."""
    training = {"strategy": strategy, **more}
    settings = [f"run.directory={folder / 'runs'}", f"run.name={strategy}"]
    settings += [f"training.{name}={value}" for name, value in training.items()]
    config = load_job(str(folder / "job.toml"), [parse_set(text) for text in settings])
    run_ranks(_train, ranks, choose_run_folder(config))


def _write_weights(world, folder):
    import torch
    from safetensors.torch import save_file

    sys.path.insert(0, str(folder))
    import replayed_parts

    torch.manual_seed(5)
    save_file(replayed_parts.model().state_dict(), folder / "start.safetensors")
    save_file(replayed_parts.model().state_dict(), folder / "other.safetensors")


def _train(world, config):
    trainer = assemble(config, world)
    record(trainer, config, run_folder(config))
    trainer.fit()


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_any_step_and_micro_batch_matches_on_one_device(strategy, replay, home):
    before = contents(home / "runs")
    for arguments in (("--step", 6), ("--step", 6, "--micro-batch", 5), ("--step", 3)):
        status, told = replay(strategy, *arguments)
        assert "\nrecord    matches" in told
        assert status == 0
        assert ("from      step-00000004, 2 steps before" in told) == (6 in arguments)
        assert f"micro-batch 5 of {RANKS[strategy]} (step 6 of epoch 1)" in told or "--micro-batch" not in arguments
    assert contents(home / "runs") == before, "a replay writes nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks", "more", "held_by"),
    [
        ("parameter_server", 3, {}, "rank 1"),
        ("hybrid", 4, {"mesh": "data=2,pipeline=2"}, "ranks 2, 3"),
        ("hybrid", 2, {"mesh": "data=2,layers=2"}, "rank 1"),
        ("layers", 1, {}, "rank 0"),
        ("single", 1, {}, "rank 0"),
    ],
)
def test_runs_of_other_layouts_match_too(strategy, ranks, more, held_by, replay, home):
    train(home, strategy, ranks, **more)
    told = [replay(strategy, "--step", 6), replay(strategy, "--step", 6, "--micro-batch", 5)]
    assert all(status == 0 and "\nrecord    matches" in text for status, text in told), told
    assert f"micro-batch 5 of {held_by} (" in told[1][1]
    shutil.rmtree(home / "runs" / strategy)


@pytest.mark.slow
def test_whole_steps_of_strategy_dp_match(replay, home):
    train(home, "dp", 1, record_micro_batches="false")
    assert "\nrecord    matches" in replay("dp", "--step", 6)[1]
    assert "training.record_micro_batches=true" in replay("dp", "--step", 6, "--micro-batch", 5)[1]


def test_strategies_leave_the_same_record(home):
    texts = {name: (home / "runs" / name / "gradients.jsonl").read_text() for name in ("ddp", "fsdp", "pipeline")}
    assert texts["fsdp"] == texts["ddp"]
    assert texts["pipeline"] == texts["ddp"]
    steps = [json.loads(line)["step"] for line in texts["ddp"].splitlines()]
    assert steps == [0, 3, 4, 6, 8, 9], "every third, and those after checkpoints"


@pytest.mark.slow
def test_the_samples_and_loss_of_a_micro_batch_are_those_of_the_step(replay):
    whole, parts = (
        replay("ddp", "--step", 6)[1],
        [replay("ddp", "--step", 6, "--micro-batch", k) for k in range(8)],
    )
    shown = [dict(line.split(maxsplit=1) for line in told.splitlines()) for _, told in parts]
    whole = dict(line.split(maxsplit=1) for line in whole.splitlines())
    assert ", ".join(each["samples"] for each in shown) == whole["samples"]
    assert sum(float(each["loss"]) for each in shown) / 8 == pytest.approx(float(whole["loss"]), rel=1e-6)
    assert len({each["digest"] for each in shown}) == 8


def test_what_was_not_recorded_is_computed_all_the_same(replay):
    status, told = replay("fsdp", "--step", 11, "--micro-batch", 1)
    assert status == 0
    assert "was not recorded; train with --set training.gradients_every=1" in told
    assert "(step 9, the last recorded one before it, matches)" in told


@pytest.mark.parametrize(
    ("name", "content", "step", "expected"),
    [
        pytest.param("start.safetensors", None, 3, "differs already at step 0", marks=pytest.mark.slow),
        ("brightness", b"0.99", 6, "differs already at step 4: 1.bias, 1.weight, 2.bias, 2.weight, 5.bias"),
        pytest.param(
            "smoothing",
            b"0.2",
            4,
            "in micro-batches 0, 1, 2, 3, 4, 5, 6, 7; so does the loss",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_changed_weights_data_or_loss_are_found_out(name, content, step, expected, replay, changed, home):
    changed(name, content or (home / "other.safetensors").read_bytes())
    status, told = replay("pipeline", "--step", step)
    assert expected in told
    assert status == 1
    status, told = replay("pipeline", "--step", step, "--micro-batch", 2)
    assert "differs" in told
    assert status == 1


def test_a_step_that_is_not_finite_can_be_looked_at_by_micro_batch(replay, changed, home):
    run = shutil.copytree(home / "runs" / "ddp", home / "runs" / "plain", dirs_exist_ok=True)
    text = (run / "job.json").read_text()
    (run / "job.json").write_text(text.replace('"precision": "fp16"', '"precision": "fp32"'))
    changed("brightness", b"nan")
    status, told = replay("plain", "--step", 0)
    assert status == 6
    assert told.startswith("lockstep: The loss of step 0 is nan in micro-batch 0 (samples ")
    status, told = replay("plain", "--step", 0, "--micro-batch", 1)
    assert status == 1
    assert "\nloss      nan\nnorm      nan (" in told
    assert "from      the beginning of the run, right before it" in told


@pytest.mark.slow
def test_a_parameter_whose_record_differs_is_named_alone(replay, home):
    run = shutil.copytree(home / "runs" / "ddp", home / "runs" / "altered", dirs_exist_ok=True)
    records = [json.loads(line) for line in (run / "gradients.jsonl").read_text().splitlines()]
    of_step = next(each for each in records if each["step"] == 6)
    for each in (of_step, of_step["micro_batches"]["3"]):
        each["digest"], each["parameters"]["2.weight"] = "0" * 64, "0" * 12
    (run / "gradients.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    status, told = replay("altered", "--step", 6)
    assert told.endswith("record    differs: 2.weight (1 of 6 parameters), in micro-batches 3\n")
    assert status == 1
    assert [replay("altered", "--step", 6, "--micro-batch", k)[0] for k in (2, 3)] == [0, 1]


def test_another_context_is_refused_with_what_differs_unless_forced(replay, home):
    run = shutil.copytree(home / "runs" / "ddp", home / "runs" / "elsewhere", dirs_exist_ok=True)
    text = (run / "job.json").read_text()
    (run / "job.json").write_text(text.replace('"torch": "', '"torch": "1.'))
    for step in (3, 6):
        status, told = replay("elsewhere", "--step", step)
        assert status == 2
        assert "\n  torch: '1." in told
        assert "--force-context" in told
    assert replay("elsewhere", "--step", 6, "--force-context")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("ddp", "--step", 12), "Step 12 does not exist: the steps of the run are 0 to 11."),
        (("ddp", "--step", -1), "Step -1 does not exist; steps are counted from 0."),
        (("ddp", "--step", 6, "--micro-batch", 8), "does not exist: the micro-batches of a step are 0 to 7."),
        (("ddp", "--step", 11, "--micro-batch", 2), "its micro-batches are 0 to 1."),
        (("ddp", "--step", "six"), "invalid int value: 'six'"),
        (("nowhere", "--step", 6), "There is no run folder 'runs/nowhere'."),
    ],
)
def test_mistakes_are_refused_in_a_sentence(arguments, expected, replay):
    status, told = replay(*arguments)
    assert status == 2
    assert expected in told
    assert len(told.splitlines()) == 1


def test_quitting_the_debugger_ends_the_replay_without_a_traceback(replay, monkeypatch):
    def quit_at_once():
        raise bdb.BdbQuit

    monkeypatch.setattr(sys, "breakpointhook", quit_at_once)
    status, told = replay("ddp", "--step", 6, "--debug")
    assert status == 130
    assert len(told.splitlines()) == 1
    assert "The step runs next." in told


@pytest.mark.slow
def test_a_debugger_steps_into_what_a_rank_of_a_real_run_did(home):
    """In pdb, driven by a script, which stops in data set, model and loss of a micro-batch that a pipeline computed."""
    stop = {
        where: f"b replayed_parts.py:{number}"
        for number, line in enumerate(PARTS.splitlines(), start=1)
        for where in ("data set", "model", "loss")
        if line.endswith(f"# in the {where}")
    }
    first_sample = stop["data set"].replace("b ", "tbreak ")
    script = [
        *(first_sample, stop["model"], stop["loss"]),
        *("c", "p 'image', tuple(image.shape)"),
        *("c", "p 'hidden', tuple(hidden.shape)"),
        *("c", "p 'output', tuple(output.shape), in_main_thread", "c", ""),
    ]
    command = [*LOCKSTEP, "replay", "runs/pipeline", "--step", "6", "--micro-batch", "5", "--debug"]
    found = subprocess.run(command, input="\n".join(script), cwd=home, capture_output=True, text=True, timeout=120)
    for shown in ("('image', (1, 8, 8))", "('hidden', (4, 32))", "('output', (4, 10), True)"):
        assert f"(Pdb) {shown}" in found.stdout, found.stdout + found.stderr
    for place in stop:
        assert found.stdout.count(f"# in the {place}\n") == 1, "one micro-batch is computed, and once"
    assert "record    matches" in found.stdout
    assert (found.returncode, unexpected(found.stderr)) == (0, "")


@pytest.mark.slow
def test_a_run_with_portable_bits_is_replayed_and_audited_with_them(tmp_path):
    def run(*arguments):
        done = subprocess.run([*LOCKSTEP, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout, done.stderr

    settings = (
        "--set",
        "training.audit=true",
        "--set",
        "training.gradients_every=1",
        "--set",
        "run.name=run",
    )
    status, told, errors = run("train", "digits", "--epochs", "1", "--devices", "cpu:2", *settings)
    assert status == 0, errors
    assert "(on every x86-64 CPU with AVX2)" in told or platform.machine() != "x86_64"
    assert "record    matches" in run("replay", "runs/run", "--step", "3")[1]
    status, told, errors = run("audit", "runs/run", "--checks", "0", "--seed", "1")
    assert (status, told.splitlines()[-1][:16]) == (0, "result    equal:"), errors
