"""Audits of honest and of tampered runs."""

import hashlib
import json
import math
import random
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file
from tests.ranks import run_ranks

from lockstep import audit as audits
from lockstep import checkpoint
from lockstep.audit import Interval, audit, chance, choose, describe
from lockstep.cli import main
from lockstep.config.job_file import parse_set
from lockstep.core.fingerprint import combine, digest_tensors
from lockstep.core.world import World
from lockstep.errors import ConfigError
from lockstep.job import load_job
from lockstep.job.assemble import assemble
from lockstep.job.rank import record
from lockstep.job.run_folder import choose_run_folder, run_folder
from lockstep.trainer.audit_record import FILE, digest_file, link, read_chain
from lockstep.trainer.gradient_record import read_records

JOB = """
[model]
target = "audited_parts:model"

[data.train]
target = "audited_parts:Points"

[optimizer]
target = "audited_parts:Optimizer"
lr = 0.05
momentum = 0.9

[schedule]
kind = "cosine"

[training]
epochs = 2
global_batch = 16
micro_batches = 4
audit = true

[data]
workers = 0

[checkpoint]
every_steps = 2
keep = 100

[log]
tensorboard = false
progress = false
"""

PARTS = """\
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

HERE = Path(__file__).parent

def tampered():
    '''What is done in secret, and in which step; nothing in an audit.'''
    kind, _, step = (HERE / "tamper").read_text().partition(" ")
    return kind, int(step or -1)

class Showing(nn.ReLU):
    '''Keeps what it computed last, which is of other samples on another number of processes.'''
    def forward(self, x):
        self.last = super().forward(x).detach().repeat(500, 1)
        return super().forward(x)

def model():
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), Showing(), nn.Dropout(0.2), nn.Linear(16, 3))

class Points(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(64, 4, generator=generator)
        self.targets = torch.randint(0, 3, (64,), generator=generator)
        kind, index = tampered()
        if kind == "poison":
            self.targets[index] = (self.targets[index] + 1) % 3
        elif kind == "data":
            self.inputs += 0.01

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]

class Optimizer(torch.optim.SGD):
    done = 0

    def step(self, closure=None):
        kind, step = tampered()
        here, self.done = self.done == step, self.done + 1
        if kind == "skip" and here:
            return None
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] *= 2 if kind == "rate" and here else 1
        result = super().step(closure)
        for group, rate in zip(self.param_groups, rates):
            group["lr"] = rate
        return result
"""
STEPS, EVERY = 8, 2
INTERVALS = STEPS // EVERY


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "audited_parts.py").write_text(PARTS)
    (tmp_path / "tamper").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("audited_parts", None)


def train(home, *settings, ranks=1, tamper="", name="run"):
    """Trains the job and returns its run folder; ``tamper`` is what its own code does in secret."""
    given = [f"run.directory={home / 'runs'}", f"run.devices=cpu:{ranks}", *settings]
    given += [] if any("resume" in each for each in settings) else [f"run.name={name}"]
    config = choose_run_folder(load_job(str(home / "job.toml"), [parse_set(text) for text in given]))
    (home / "tamper").write_text(tamper)
    if ranks == 1:
        _train(World(), config)
    else:
        run_ranks(_train, ranks, config)
    (home / "tamper").write_text("")
    return run_folder(config)


def _train(world, config):
    trainer = assemble(config, world)
    recorder = record(trainer, config, run_folder(config))
    outcome = trainer.fit()
    recorder.end(trainer.run.position.step, outcome.fingerprint, outcome.weights)


def forge(folder, change):
    """Changes the entries of a chain, and gives all of them hashes that fit."""
    previous, lines = "0" * 64, []
    for line in (folder / FILE).read_text().splitlines():
        entry = json.loads(line)
        del entry["chain"]
        change(entry)
        previous = link(previous, entry)
        lines.append(json.dumps({**entry, "chain": previous}) + "\n")
    (folder / FILE).write_text("".join(lines))


def findings(folder, checks=0, seed=0, **more):
    return [str(each) for each in audit(folder, seed=seed, checks=checks, **more).findings]


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("ddp", 2),
        pytest.param("fsdp", 2, marks=pytest.mark.slow),
        pytest.param("pipeline", 2, marks=pytest.mark.slow),
        pytest.param("parameter_server", 3, marks=pytest.mark.slow),
    ],
)
def test_an_honest_run_of_any_layout_has_the_recorded_bits(home, strategy, ranks):
    folder = train(home, f"training.strategy={strategy}", ranks=ranks)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    report = audit(folder, seed=0, checks=0)
    assert report.findings == []
    checked = ["steps 0 to 1", "steps 2 to 3", "steps 4 to 5", "steps 6 to 7"]
    assert [str(interval) for interval in report.checked] == checked
    assert "equal: everything that was checked has the recorded bits" in describe(report)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_layouts_leave_the_same_steps_in_their_chains(home):
    one, two = train(home, name="one"), train(home, "training.strategy=fsdp", ranks=2, name="two")
    assert read_chain(one).last("step") == read_chain(two).last("step")
    assert read_chain(one).end == read_chain(two).end


@pytest.mark.slow
def test_a_run_that_was_resumed_in_another_layout_is_audited_whole(home):
    folder = train(home, "training.max_steps=4", "schedule.kind=constant")
    again = ("training.strategy=fsdp", "schedule.kind=constant", f"checkpoint.resume={folder}")
    train(home, *again, ranks=2)
    report = audit(folder, seed=0, checks=0)
    assert report.findings == [] and len(report.checked) == INTERVALS
    assert report.layouts == ["ddp on 1", "fsdp on 2"]


def test_steps_that_a_killed_run_has_lost_are_recorded_again(home):
    folder = train(home)
    shutil.rmtree(folder / "step-00000008")
    with (folder / FILE).open("a") as file:
        file.write('{"kind": "step", "st')
    assert "chain" in findings(folder)[0] and "cut off" in findings(folder)[0]
    train(home, f"checkpoint.resume={folder}")
    assert len(read_chain(folder).last("step")) == STEPS
    assert findings(folder) == []


@pytest.mark.slow
def test_steps_that_a_run_went_back_behind_do_not_count(home):
    """An honest run that lost steps, and went on by another recipe but not as far, was said to differ in those."""
    folder = train(home, "schedule.kind=constant")
    for name in ("step-00000006", "step-00000008"):
        shutil.rmtree(folder / name)
    again = ("schedule.kind=constant", "training.clip_norm=0.1", "training.max_steps=6")
    train(home, *again, "training.gradients_every=0", f"checkpoint.resume={folder}")
    assert sorted(read_chain(folder).last("step")) == [*range(6)]
    assert sorted(read_chain(folder).last("checkpoint")) == [2, 4, 6]
    assert findings(folder) == []
    assert max(read_records(folder)) < 4


TAMPERED = {
    "poison 5": "the data of micro-batch",
    "data 0": "the data of micro-batch",
    "skip 3": "is not the recorded one",
    "rate 3": "the state after it is not that of step-00000004",
}


@pytest.mark.parametrize(
    "tamper",
    [pytest.param(each, marks=[pytest.mark.slow] * (each != "poison 5")) for each in TAMPERED],
)
def test_what_was_done_in_secret_is_found(home, tamper):
    found = findings(train(home, tamper=tamper))
    assert any(TAMPERED[tamper] in each for each in found) or (
        tamper in ("skip 3", "rate 3") and "step 3: the state after it is not that of" in found[0]
    ), found


@pytest.mark.slow
def test_poisoned_data_under_a_forged_chain_changes_the_gradient(home):
    honest, folder = train(home, name="honest"), train(home, tamper="poison 5", name="poisoned")
    clean = read_chain(honest).last("step")
    forge(folder, lambda entry: entry.update(data=clean[entry["step"]]["data"]) if "data" in entry else None)
    assert "is not the recorded one" in findings(folder)[0]


def test_swapped_weights_are_found_with_and_without_a_forged_chain(home):
    folder = train(home)
    path = folder / "step-00000004"

    def rename(entry):
        if entry.get("name") == path.name:
            entry["manifest"] = digest_file(path / "manifest.json")

    state = checkpoint.read(path)
    name = "0.weight"
    state.model[name] = state.model[name] + 1e-3
    shutil.rmtree(path)
    checkpoint.write(folder, state, step=4).rename(path)
    assert findings(folder)[0].startswith("step-00000004: its files are not those")
    forge(folder, rename)
    found = findings(folder)
    assert found[0].startswith("step 3: the state after it is not that of step-00000004: 0.weight")
    assert found[1].startswith("step-00000004: it cannot be loaded: ")
    assert "do not have the fingerprint that it records" in found[1]

    state.progress["fingerprint"] = combine(digest_tensors(state.model))
    shutil.rmtree(path)
    checkpoint.write(folder, state, step=4).rename(path)
    forge(folder, rename)
    found = findings(folder)
    assert found[0].startswith("step 3: the state after it is not that of step-00000004: 0.weight, fingerprint (2")
    assert "is not the recorded one" in found[1]


@pytest.mark.parametrize("name", [pytest.param("weights", marks=pytest.mark.slow), "average"])
def test_other_weights_at_the_end_are_found(home, name):
    """Other averages of the weights were audited as equal."""
    folder = train(home, *(["training.ema_decay=0.9"] if name == "average" else []))
    file = folder / {"weights": "model.safetensors", "average": "average.safetensors"}[name]
    weights = load_file(file)
    save_file({name: tensor + 1e-3 for name, tensor in weights.items()}, file)
    assert findings(folder)[0] == f"{file.name}: the file is not the one that the run wrote at its end"
    digest = digest_file(file)
    forge(folder, lambda entry: entry.update({name: digest}) if entry["kind"] == "end" else None)
    assert findings(folder)[0].startswith(f"{file.name}: the trained weights are not those of the file")


def test_weights_whose_line_was_removed_are_found(home):
    """They were audited as equal, since the chain said nothing of them."""
    folder = train(home, "training.ema_decay=0.9")
    lines = (folder / FILE).read_text().splitlines(keepends=True)
    (folder / FILE).write_text("".join(lines[:-1]))
    files = ["model.safetensors", "average.safetensors"]
    assert findings(folder, checks=1) == [f"{each}: the chain has no line for this file" for each in files]
    for each in files:
        (folder / each).unlink()
    assert findings(folder, checks=1) == []


@pytest.mark.slow
def test_a_chain_of_before_averages_were_recorded_is_honest(home):
    folder = train(home, "training.ema_decay=0.9")
    forge(folder, lambda entry: entry.pop("average", None))
    assert findings(folder) == []


@pytest.mark.parametrize("change", ["loss", "removed", "swapped", "recipe"])
def test_a_changed_line_breaks_the_chain(home, change):
    folder = train(home)
    lines = (folder / FILE).read_text().splitlines(keepends=True)
    if change == "loss":
        lines[3] = lines[3].replace('"loss": "0x', '"loss": "-0x')
    elif change == "removed":
        del lines[3]
    elif change == "swapped":
        lines[3], lines[4] = lines[4], lines[3]
    else:
        lines[0] = lines[0].replace('"recipe": "', '"recipe": "0')
    (folder / FILE).write_text("".join(lines))
    found = findings(folder)
    assert len(found) == 1 and found[0].startswith("chain: The chain is broken at line")


def test_a_recipe_that_was_changed_later_is_found(home):
    folder = train(home)
    text = (folder / "job.json").read_text()
    assert '"lr": 0.05' in text
    (folder / "job.json").write_text(text.replace('"lr": 0.05', '"lr": 0.06'))
    assert findings(folder)[0].startswith("step 0: job.json has another recipe")


def test_a_published_head_excludes_another_chain(home):
    folder = train(home)
    head = read_chain(folder).head
    assert findings(folder, head=head, checks=1) == []
    forge(folder, lambda entry: entry.update(note="x") if entry["step"] == 7 else None)
    assert findings(folder, checks=1) == []
    assert findings(folder, head=head)[0].startswith(f"chain: none of its hashes is {head}")


def test_a_signature_holds_for_the_chain_that_was_signed(home, capsys):
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not installed")
    for name in ("key", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", home / name], check=True)
    folder = train(home)
    with pytest.raises(ConfigError, match=r"has no audit.jsonl.sig"):
        audits.verify_signature(folder, home / "key.pub")
    assert main(["audit", str(folder), "--sign", str(home / "key")]) == 0
    assert "signed    " in capsys.readouterr().out
    audits.verify_signature(folder, home / "key.pub")
    with pytest.raises(ConfigError, match="ssh-keygen verify failed"):
        audits.verify_signature(folder, home / "other.pub")
    forge(folder, lambda entry: entry.update(note="x") if entry["step"] == 7 else None)
    with pytest.raises(ConfigError, match="ssh-keygen verify failed"):
        audits.verify_signature(folder, home / "key.pub")


def test_a_run_without_a_chain_and_one_of_level_b_are_refused(home):
    with pytest.raises(ConfigError, match=r"has no audit.jsonl.*training.audit=true"):
        folder = home / "runs" / "plain"
        config = load_job(
            str(home / "job.toml"),
            [parse_set(text) for text in (f"run.directory={home / 'runs'}", "run.name=plain", "training.audit=false")],
        )
        config = choose_run_folder(config)
        trainer = assemble(config, World())
        assert record(trainer, config, folder) is None
        trainer.fit()
        audit(folder, seed=0, checks=1)
    with pytest.raises(ConfigError, match="only runs of level A can be audited"):
        train(home, "training.reduce=ring", "training.strategy=ddp", ranks=2, name="ring")


def test_the_choice_follows_from_the_seed_and_the_chance_is_that_of_a_draw():
    among = [Interval(first=step, end=step + 2, checkpoint=None) for step in range(0, 20, 2)]
    chosen = choose(among, 7, 3)
    order = sorted(range(0, 20, 2), key=lambda step: hashlib.sha256(f"7 {step}".encode()).hexdigest())
    assert [interval.first for interval in chosen] == sorted(order[:3])
    assert choose(among, 7, 0) == among
    assert chance(10, 3) == pytest.approx(0.3)
    assert chance(10, 3, wrong=2) == pytest.approx(1 - math.comb(8, 3) / math.comb(10, 3))
    assert chance(3, 3) == 1.0


def tampered_run(home, kind, draw, clean, name):
    """Trains a run that is tampered with, under a chain that fits; returns how many of its intervals are wrong."""
    step = draw.randrange(STEPS)
    secret = {"poison": f"poison {draw.randrange(64)}", "data": "data 0"}.get(kind, f"{kind} {step}")
    folder = train(home, tamper=secret if kind in ("poison", "data", "skip", "rate") else "", name=name)
    checkpoints = {}
    if kind == "weights":
        end = EVERY * (step // EVERY + 1)
        state = checkpoint.read(path := folder / f"step-{end:08d}")
        state.model["0.weight"] = state.model["0.weight"] + 1e-3
        state.progress["fingerprint"] = combine(digest_tensors(state.model))
        shutil.rmtree(path)
        checkpoint.write(folder, state, step=end)
        checkpoints[path.name] = digest_file(path / "manifest.json")
        step = end

    def change(entry):
        if "data" in entry:
            entry["data"] = clean[entry["step"]]["data"]
        if kind == "chain" and entry["kind"] == "step" and entry["step"] == step:
            entry["gradient"]["digest"] = "0" * 64
        if entry.get("name") in checkpoints:
            entry["manifest"] = checkpoints[entry["name"]]

    forge(folder, change)
    return {"poison": 2, "data": INTERVALS, "weights": 1 if step == STEPS else 2}.get(kind, 1)


@pytest.mark.slow
def test_tampered_runs_are_found_at_the_rate_of_the_draw_and_honest_ones_never(home):
    """100 tampered runs and 100 honest ones of several layouts, each audited with one check of four intervals."""
    draw, found, expected, variance = random.Random(1), 0, 0.0, 0.0
    honest = [train(home, name="ddp"), train(home, "training.strategy=fsdp", ranks=2, name="fsdp")]
    honest += [train(home, "training.strategy=pipeline", ranks=2, name="pipeline")]
    assert not any(findings(honest[seed % 3], checks=1, seed=seed) for seed in range(100))
    clean = read_chain(honest[0]).last("step")
    for number in range(100):
        kind = draw.choice(["poison", "data", "skip", "rate", "weights", "chain"])
        wrong = tampered_run(home, kind, draw, clean, f"{kind}-{number}")
        found += bool(findings(home / "runs" / f"{kind}-{number}", checks=1, seed=number))
        shutil.rmtree(home / "runs" / f"{kind}-{number}")
        likely = chance(INTERVALS, 1, wrong)
        expected, variance = expected + likely, variance + likely * (1 - likely)
    print(f"{found} of 100 found, {expected:.1f} expected")
    assert abs(found - expected) < 3 * math.sqrt(variance)
