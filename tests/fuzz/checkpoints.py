"""Damaged checkpoints: bytes changed by accident, and records changed on purpose with all checksums made to fit."""

import contextlib
import json
import shutil

import torch
from tests.checkpoint.manifests import manifest_of
from tests.checkpoint.shards import save
from tests.fuzz.damage import damaged_bytes, damaged_value
from tests.run.jobs import begin, dataset, train_step
from torch import nn

from lockstep.checkpoint import read, read_best, write_best
from lockstep.checkpoint.folder import Best
from lockstep.checkpoint.manifest import MANIFEST, RECORD, seal


def begun(folder, **options):
    """A prepared run: a small model with a tied weight and buffers, momentum, and a scheduler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    return begin(
        model,
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        directory=folder,
        save_in_background=False,
        **options,
    )


def train_on(run, optimizer):
    """One step more."""
    train_step(run, next(iter(run.batches(dataset()))), optimizer)


class Attempt:
    """Goes on from a damaged copy of one sound run.

    Args:
        folder: a place of its own for the sound run.
        sharded: whether several processes have written its checkpoint.
    """

    def __init__(self, folder, sharded=False):
        run, _, optimizer, _ = begun(folder)
        run.extra = {"best": (0.9, float("inf")), 3: None}
        with contextlib.closing(run):
            train_on(run, optimizer)
            self.sound = run.save().parent
        if sharded:
            state = read(self.sound / "step-00000001")
            shutil.rmtree(self.sound / "step-00000001")
            save(self.sound, state, step=1)
        write_best(self.sound, Best(1, "loss", 0.5))
        (self.checkpoint,) = self.sound.glob("step-*")
        self.state = read(self.checkpoint)

    def __call__(self, rng, folder):
        copy = folder / "run"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.sound, copy)
        path = copy / self.checkpoint.name
        on_purpose = rng.random() < 0.6
        (self._change_records if on_purpose else self._change_bytes)(path, rng)
        read_best(copy)
        run, _, optimizer, _ = begun(copy, resume="auto")
        with contextlib.closing(run):
            if not on_purpose:
                self._require_equal(read(path))
            train_on(run, optimizer)
        return "gone on" if on_purpose else "equal"

    @staticmethod
    def _change_bytes(path, rng):
        file = rng.choice(sorted([*path.iterdir(), path.parent / "best.json"]))
        kind = rng.randrange(8)
        if kind == 0:
            file.unlink()
        elif kind == 1:
            other = rng.choice(sorted(path.iterdir()))
            file.write_bytes(other.read_bytes())
        else:
            file.write_bytes(damaged_bytes(file.read_bytes(), rng))

    @staticmethod
    def _change_records(path, rng):
        kind, files = rng.randrange(5), sorted(each.name for each in path.glob("*.safetensors"))
        if kind == 0:
            name = rng.choice([*files, RECORD])
            (path / name).write_bytes(damaged_bytes((path / name).read_bytes(), rng))
        elif kind == 1:
            _change_header(path / rng.choice(files), rng)
        elif kind == 2:
            best = path.parent / "best.json"
            body = damaged_value(json.loads(best.read_bytes())["body"], rng)
            if isinstance(body, dict):
                best.write_bytes(seal(body))
        else:
            record = json.loads((path / RECORD).read_bytes())
            for _ in range(rng.randint(1, 3)):
                record = damaged_value(record, rng)
            (path / RECORD).write_text(json.dumps(record))
        manifest = manifest_of(path, 1)
        if rng.random() < 0.25:
            body = damaged_value(json.loads(manifest)["body"], rng)
            manifest = seal(body) if isinstance(body, dict) else manifest
        (path / MANIFEST).write_bytes(manifest)

    def _require_equal(self, state):
        assert state.progress == self.state.progress
        assert state.optimizer_records == self.state.optimizer_records
        for given, own in ((state.model, self.state.model), (state.optimizer, self.state.optimizer)):
            assert given.keys() == own.keys()
            assert all(torch.equal(given[name], own[name]) for name in own)


def _change_header(path, rng):
    """Changes the names, types, shapes and places that a safetensors file states."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.dumps(damaged_value(json.loads(content[8 : 8 + size]), rng)).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
